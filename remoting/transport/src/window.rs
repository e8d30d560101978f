//! The window: memory shared by both sides. It holds the rings, then the data.
//!
//! | from | what |
//! |---|---|
//! | 0 | control words of the ring of calls |
//! | 2 KiB | on an [accelerator port](remoting_proto::port): the application's hello |
//! | 3 KiB | on an accelerator port: the worker's answer to it |
//! | 4 KiB | control words of the ring of answers |
//! | 8 KiB | lines of the ring of calls |
//! | 8 KiB + ring | lines of the ring of answers |
//! | the next multiple of 2 MiB; of 4 KiB in a window below 8 MiB | data, to the end |

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};

use super::{
    ring::{Control, LINE, Lines},
    sync::AtomicU64,
};
#[cfg(feature = "std")]
use base::Mapping;
use remoting_proto::wire::hello;

/// Offset of the application's hello in its slice of an accelerator port.
pub const CLIENT_HELLO: u64 = 2048;
/// Offset of the worker's answer to it.
pub const REPLY: u64 = 3072;

const CONTROL: u64 = 4096;
const ALIGNMENT: u64 = 2 << 20;

/// Minimum size, in bytes, of a window whose data is aligned to large pages.
pub const SMALLEST: u64 = 8 << 20;
/// Minimum size of a window in bytes.
const LEAST: u64 = 512 << 10;

/// Size in bytes of each ring in the windows of pools and ports.
pub const RING: u64 = 1 << 20;

/// The sizes of window and ring are impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a window of {window} bytes with rings of {ring} bytes is impossible: rings are a power of \
     two from 64 KiB to 1 GiB, and a window has {LEAST} bytes at least, and room for data beside \
     its rings"
)]
pub struct Impossible {
    /// Size of the window in bytes.
    pub window: u64,
    /// Size of each ring in bytes.
    pub ring: u64,
}

/// Memory shared by both sides.
#[derive(Debug)]
pub struct Window {
    pub(super) base: *mut u8,
    pub(super) size: u64,
    ring: u64,
    /// The processor may reorder writes to it and reads from it.
    pub(super) weak: AtomicBool,
    /// The mapping, which is unmapped on drop.
    #[cfg(feature = "std")]
    pub(super) mapping: Option<Mapping>,
}

// SAFETY: the memory lives as long as the value, and whoever accesses it through the raw pointer
// follows the rules of shared memory (atomics in `Control`, copies elsewhere).
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Whether a window can have these sizes in bytes.
    pub fn check(size: u64, ring: u64) -> Result<(), Impossible> {
        let possible = size >= LEAST
            && ring.is_power_of_two()
            && (1 << 16..=1 << 30).contains(&ring)
            && Self::data_start(size, ring) < size;
        if possible {
            Ok(())
        } else {
            Err(Impossible { window: size, ring })
        }
    }

    /// Creates a window over existing memory: `size` bytes, with rings of `ring` bytes each. If it
    /// is `weak`, fences enforce every ordering that the rings rely on.
    ///
    /// # Safety
    /// The memory starts at a page boundary, lives as long as the window, and nothing else in this
    /// program uses it.
    pub unsafe fn over(
        base: *mut u8,
        size: u64,
        ring: u64,
        weak: bool,
    ) -> Result<Arc<Self>, Impossible> {
        Self::check(size, ring)?;
        Ok(Arc::new(Self {
            base,
            size,
            ring,
            weak: AtomicBool::new(weak),
            #[cfg(feature = "std")]
            mapping: None,
        }))
    }

    /// Creates a window over a mapping whose sizes have been checked.
    #[cfg(feature = "std")]
    pub(super) fn mapped(mapping: Mapping, ring: u64, weak: bool) -> Arc<Self> {
        Arc::new(Self {
            base: mapping.start(),
            size: mapping.len() as u64,
            ring,
            weak: AtomicBool::new(weak),
            mapping: Some(mapping),
        })
    }

    fn data_start(size: u64, ring: u64) -> u64 {
        let alignment = if size < SMALLEST { CONTROL } else { ALIGNMENT };
        // Rings have at most 1 GiB: no overflow.
        (2 * CONTROL + 2 * ring).next_multiple_of(alignment)
    }

    /// Size in bytes, rings included.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Offset of the first byte of the data.
    pub fn data(&self) -> u64 {
        Self::data_start(self.size, self.ring)
    }

    /// The address in this process of a range of the window, if the range lies within the window's
    /// data.
    pub fn at(&self, offset: u64, length: u64) -> Option<*mut u8> {
        let end = offset.checked_add(length)?;
        (offset >= self.data() && end <= self.size).then(|| {
            // SAFETY: the offset is within the mapping.
            unsafe { self.base.add(offset as usize) }
        })
    }

    /// The offset of a range of this process's memory, if it lies within the window's data.
    pub fn offset_of(&self, pointer: *const u8, length: u64) -> Option<u64> {
        let offset = (pointer as u64).checked_sub(self.base as u64)?;
        self.at(offset, length).map(|_| offset)
    }

    /// Copies the application's hello.
    pub fn client_hello(&self) -> [u8; hello::SIZE] {
        self.get(CLIENT_HELLO)
    }

    /// Writes the application's hello.
    pub fn write_client_hello(&self, bytes: &[u8; hello::SIZE]) {
        self.put(CLIENT_HELLO, bytes);
    }

    /// Copies the worker's answer to it.
    pub fn answer(&self) -> [u8; hello::SIZE] {
        self.get(REPLY)
    }

    /// Writes the answer to the application's hello.
    pub fn reply(&self, bytes: &[u8; hello::SIZE]) {
        self.put(REPLY, bytes);
    }

    fn get(&self, at: u64) -> [u8; hello::SIZE] {
        let mut bytes = [0; hello::SIZE];
        // SAFETY: within the first page, which every window has; the copy is private.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.base.add(at as usize),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
        bytes
    }

    fn put(&self, at: u64, bytes: &[u8; hello::SIZE]) {
        // SAFETY: as for `get`.
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(at as usize), bytes.len());
        }
    }

    /// The ring of calls.
    pub fn calls(self: &Arc<Self>) -> Slice {
        self.slice(0, 2 * CONTROL)
    }

    /// The ring of answers.
    pub fn answers(self: &Arc<Self>) -> Slice {
        self.slice(CONTROL, 2 * CONTROL + self.ring)
    }

    fn slice(self: &Arc<Self>, control: u64, lines: u64) -> Slice {
        // SAFETY: both lie before `data_start`, which is within the mapping; a page boundary is
        // aligned for `Control`; every bit pattern is a valid `Control`; the `Arc` in the slice
        // keeps the mapping.
        unsafe {
            Slice {
                control: self.base.add(control as usize).cast(),
                lines: self.base.add(lines as usize),
                count: self.ring as u32 / LINE as u32,
                weak: self.weak.load(Ordering::Relaxed),
                _window: Arc::clone(self),
            }
        }
    }
}

/// One ring of a window.
#[derive(Debug)]
pub struct Slice {
    control: *const Control,
    lines: *mut u8,
    count: u32,
    weak: bool,
    _window: Arc<Window>,
}

// SAFETY: as for `Window`, which the slice keeps alive.
unsafe impl Send for Slice {}

impl Slice {
    /// The address of a line. `line` is below the count.
    fn line(&self, line: u32) -> *mut u8 {
        debug_assert!(line < self.count);
        // SAFETY: within the ring, which is within the mapping.
        unsafe { self.lines.add(line as usize * LINE) }
    }
}

impl Lines for Slice {
    fn count(&self) -> u32 {
        self.count
    }

    fn control(&self) -> &Control {
        // SAFETY: see `Window::slice`.
        unsafe { &*self.control }
    }

    fn mark(&self, line: u32) -> &AtomicU64 {
        // SAFETY: see `line`; a line's start is aligned for the word, and every bit pattern is one.
        unsafe { &*self.line(line).cast() }
    }

    #[inline]
    fn fetch(&self, line: u32) {
        // SAFETY: it reads nothing; every x86-64 processor has it.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(self.line(line).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }

    unsafe fn read(&self, line: u32, at: usize, into: &mut [u8]) {
        debug_assert!(at + into.len() <= Self::PAYLOAD);
        if self.weak {
            // Orders the read of the mark before the reads of the bytes.
            load_fence();
        }
        // SAFETY: the caller keeps the range within the line; `into` is private memory.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.line(line).add(LINE - Self::PAYLOAD + at),
                into.as_mut_ptr(),
                into.len(),
            );
        }
    }

    unsafe fn write(&self, line: u32, from: &[u8]) {
        debug_assert!(from.len() <= Self::PAYLOAD);
        // SAFETY: as for `read`.
        unsafe {
            let to = self.line(line).add(LINE - Self::PAYLOAD);
            core::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
        }
        if self.weak {
            // The bytes, and whatever the application wrote to the window before, are written out
            // before the mark is.
            store_fence();
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn load_fence() {
    // SAFETY: every x86-64 processor has it.
    unsafe { core::arch::x86_64::_mm_lfence() };
}

#[cfg(target_arch = "x86_64")]
fn store_fence() {
    // SAFETY: every x86-64 processor has it.
    unsafe { core::arch::x86_64::_mm_sfence() };
}
