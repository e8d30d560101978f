//! The window: memory that both sides see. First the rings, then the data.
//!
//! | from | what |
//! |---|---|
//! | 0 | control words of the ring of calls |
//! | 2 KiB | on an [accelerator port](crate::port): the application's hello |
//! | 3 KiB | on an accelerator port: the worker's answer to it |
//! | 4 KiB | control words of the ring of answers |
//! | 8 KiB | bytes of the ring of calls |
//! | 8 KiB + ring | bytes of the ring of answers |
//! | the next multiple of 2 MiB | data, to the end |

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use super::ring::{Bytes, Control};
use crate::protocol::hello;

/// Where an application's hello is in its slice of an accelerator port.
pub const GREETING: u64 = 2048;
/// Where the worker's answer to it is.
pub const REPLY: u64 = 3072;

const CONTROL: u64 = 4096;
const ALIGNMENT: u64 = 2 << 20;

/// The smallest window, in bytes.
pub const SMALLEST: u64 = 8 << 20;

/// Why there is no window.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Sizes that make no window.
    #[error(
        "a window of {window} bytes with rings of {ring} bytes is impossible: rings are a power of \
         two from 64 KiB to 1 GiB, and a window at least {SMALLEST} bytes"
    )]
    Layout {
        /// Size of the window in bytes.
        window: u64,
        /// Size of each ring in bytes.
        ring: u64,
    },
    /// The file is smaller than its owner says.
    #[error("the window's file has {actual} bytes and not the {claimed} that were announced")]
    Truncated {
        /// Size of the file.
        actual: u64,
        /// Announced size.
        claimed: u64,
    },
    /// The system refused.
    #[error("cannot {what} a window of {size} bytes")]
    System {
        /// What was tried.
        what: &'static str,
        /// Size in bytes.
        size: u64,
        /// Why.
        source: io::Error,
    },
}

/// Shared memory, mapped.
#[derive(Debug)]
pub struct Window {
    base: *mut u8,
    size: u64,
    ring: u64,
    /// The processor may write out and read ahead in another order than the program's.
    weak: bool,
}

// SAFETY: the mapping belongs to the value, and whoever touches it through the raw pointer keeps
// the rules of shared memory by itself (atomics in `Control`, copies elsewhere).
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this size and nobody uses it any more.
        unsafe { libc::munmap(self.base.cast(), self.size as usize) };
    }
}

/// Creates the file behind a window. Its size cannot be changed any more, so that no peer can
/// make an access fault by shortening it.
pub fn create(size: u64) -> Result<OwnedFd, Error> {
    let failed = |what| Error::System {
        what,
        size,
        source: io::Error::last_os_error(),
    };
    // SAFETY: the name is a C string.
    let fd = unsafe {
        libc::memfd_create(
            c"gantry-window".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
        )
    };
    if fd < 0 {
        return Err(failed("create"));
    }
    // SAFETY: the descriptor was just made and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain calls on a descriptor that is open.
    unsafe {
        if libc::ftruncate(fd.as_raw_fd(), size as libc::off_t) != 0 {
            return Err(failed("size"));
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        if libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) != 0 {
            return Err(failed("seal"));
        }
    }
    Ok(fd)
}

/// Puts private memory in the place of a mapping: whoever still looks there finds nothing, instead
/// of dying with the device behind it.
pub fn cover(base: *mut u8, size: usize) {
    // SAFETY: the caller's own mapping is replaced; nothing else lies there.
    unsafe {
        libc::mmap(
            base.cast(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        );
    }
}

impl Window {
    /// Maps a window whose rings have `ring` bytes each.
    pub fn map(file: &OwnedFd, size: u64, ring: u64) -> Result<Arc<Self>, Error> {
        Self::new(file, 0, size, ring, false)
    }

    /// Maps a slice of an accelerator port's window, from `offset` on. The guest's kernel maps it
    /// write-combining, which some processors take at its word: everything that the rings'
    /// rules order is ordered by fences.
    pub fn map_slice(
        file: &OwnedFd,
        offset: u64,
        size: u64,
        ring: u64,
    ) -> Result<Arc<Self>, Error> {
        Self::new(file, offset, size, ring, true)
    }

    fn new(
        file: &OwnedFd,
        offset: u64,
        size: u64,
        ring: u64,
        weak: bool,
    ) -> Result<Arc<Self>, Error> {
        if size < SMALLEST
            || !ring.is_power_of_two()
            || !(1 << 16..=1 << 30).contains(&ring)
            || Self::data_start(ring) >= size
        {
            return Err(Error::Layout { window: size, ring });
        }
        let failed = |what, source| Error::System { what, size, source };
        let actual = file
            .try_clone()
            .and_then(|file| File::from(file).metadata())
            .map_err(|source| failed("look at", source))?
            .len();
        let at = libc::off_t::try_from(offset).ok();
        let end = offset.checked_add(size);
        let (Some(at), Some(end)) = (at, end) else {
            return Err(Error::Layout { window: size, ring });
        };
        if actual < end {
            return Err(Error::Truncated {
                actual,
                claimed: end,
            });
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                at,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(failed("map", io::Error::last_os_error()));
        }
        Ok(Arc::new(Self {
            base: base.cast(),
            size,
            ring,
            weak,
        }))
    }

    fn data_start(ring: u64) -> u64 {
        // Rings have at most 1 GiB: no overflow.
        (2 * CONTROL + 2 * ring).next_multiple_of(ALIGNMENT)
    }

    /// Size in bytes, rings included.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The first byte of the data, from the start of the window.
    pub fn data(&self) -> u64 {
        Self::data_start(self.ring)
    }

    /// Where a stretch of the data is in this process, if it lies within the window's data.
    pub fn at(&self, offset: u64, length: u64) -> Option<*mut u8> {
        let end = offset.checked_add(length)?;
        (offset >= self.data() && end <= self.size).then(|| {
            // SAFETY: the offset is within the mapping.
            unsafe { self.base.add(offset as usize) }
        })
    }

    /// Maps the pages of a stretch of the data at once, where the kernel can: a sixth of the time
    /// that faults take, one page after the other.
    pub fn populate(&self, offset: u64, length: u64) {
        if let Some(start) = self.at(offset, length) {
            let inside = start as usize % 4096;
            // SAFETY: the pages are within the mapping (whose start is a page's), and populating
            // them changes nothing that can be seen.
            unsafe {
                libc::madvise(
                    start.wrapping_sub(inside).cast(),
                    length as usize + inside,
                    libc::MADV_POPULATE_WRITE,
                );
            }
        }
    }

    /// The offset of a stretch of this process's memory, if it lies within the window's data.
    pub fn offset_of(&self, pointer: *const u8, length: u64) -> Option<u64> {
        let offset = (pointer as u64).checked_sub(self.base as u64)?;
        self.at(offset, length).map(|_| offset)
    }

    /// A copy of the application's hello.
    pub fn greeting(&self) -> [u8; hello::SIZE] {
        let mut bytes = [0; hello::SIZE];
        // SAFETY: within the first page, which every window has; the copy is private.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.base.add(GREETING as usize),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
        bytes
    }

    /// Leaves the answer to the application's hello.
    pub fn reply(&self, bytes: &[u8; hello::SIZE]) {
        // SAFETY: as for `greeting`.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.base.add(REPLY as usize),
                bytes.len(),
            );
        }
    }

    /// Puts private memory in the window's place, for who may still look there after the device
    /// behind it has gone.
    pub fn retire(&self) {
        cover(self.base, self.size as usize);
    }

    /// The ring of calls.
    pub fn calls(self: &Arc<Self>) -> Slice {
        self.slice(0, 2 * CONTROL)
    }

    /// The ring of answers.
    pub fn answers(self: &Arc<Self>) -> Slice {
        self.slice(CONTROL, 2 * CONTROL + self.ring)
    }

    fn slice(self: &Arc<Self>, control: u64, bytes: u64) -> Slice {
        // SAFETY: both lie before `data_start`, which is within the mapping; a page boundary is
        // aligned for `Control`; every bit pattern is a valid `Control`; the `Arc` in the slice
        // keeps the mapping.
        unsafe {
            Slice {
                control: self.base.add(control as usize).cast(),
                bytes: self.base.add(bytes as usize),
                size: self.ring as u32,
                weak: self.weak,
                _window: Arc::clone(self),
            }
        }
    }
}

/// One ring of a window.
#[derive(Debug)]
pub struct Slice {
    control: *const Control,
    bytes: *mut u8,
    size: u32,
    weak: bool,
    _window: Arc<Window>,
}

// SAFETY: as for `Window`, which the slice keeps alive.
unsafe impl Send for Slice {}

impl Bytes for Slice {
    fn size(&self) -> u32 {
        self.size
    }

    fn control(&self) -> &Control {
        // SAFETY: see `Window::slice`.
        unsafe { &*self.control }
    }

    unsafe fn read(&self, at: u32, into: &mut [u8]) {
        debug_assert!(at as usize + into.len() <= self.size as usize);
        if self.weak {
            // The index was read before the bytes are.
            load_fence();
        }
        // SAFETY: the caller keeps the range within the ring; `into` is private memory.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.bytes.add(at as usize),
                into.as_mut_ptr(),
                into.len(),
            );
        }
    }

    fn expect(&self, at: u32) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            debug_assert!(at < self.size);
            // SAFETY: `at` is below the size; and a prefetch faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.bytes.add(at as usize).cast()) };
        }
    }

    unsafe fn write(&self, at: u32, from: &[u8]) {
        debug_assert!(at as usize + from.len() <= self.size as usize);
        // SAFETY: as for `read`.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), self.bytes.add(at as usize), from.len());
        }
        if self.weak {
            // The bytes, and whatever the application wrote to the window before, are written out
            // before the index is.
            store_fence();
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn load_fence() {
    // SAFETY: every x86-64 processor has it.
    unsafe { std::arch::x86_64::_mm_lfence() };
}

#[cfg(target_arch = "x86_64")]
fn store_fence() {
    // SAFETY: every x86-64 processor has it.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_outside_of_the_data_are_no_places() {
        let window = Window::map(&create(SMALLEST).unwrap(), SMALLEST, 1 << 16).unwrap();
        assert!(window.at(window.data(), 16).is_some());
        assert!(window.at(window.data() - 1, 16).is_none());
        assert!(window.at(SMALLEST - 15, 16).is_none());
        assert!(window.at(u64::MAX - 3, 16).is_none());
    }

    #[test]
    fn a_window_whose_file_is_too_short_is_refused() {
        let file = create(SMALLEST).unwrap();
        assert!(matches!(
            Window::map(&file, 2 * SMALLEST, 1 << 16),
            Err(Error::Truncated { .. })
        ));
    }

    #[test]
    fn a_slice_has_its_place_in_the_file_and_ends_with_it() {
        let file = create(2 * SMALLEST).unwrap();
        let second = Window::map_slice(&file, SMALLEST, SMALLEST, 1 << 16).unwrap();
        second.reply(&[7; hello::SIZE]);
        let whole = Window::map(&file, 2 * SMALLEST, 1 << 16).unwrap();
        let at = whole.at(SMALLEST + REPLY, 1).unwrap();
        // SAFETY: within the mapping.
        assert_eq!(unsafe { at.read() }, 7);
        for offset in [SMALLEST + 4096, u64::MAX - 4095] {
            assert!(Window::map_slice(&file, offset, SMALLEST, 1 << 16).is_err());
        }
    }

    #[test]
    fn the_file_cannot_be_shortened_by_a_peer() {
        let file = create(SMALLEST).unwrap();
        assert!(File::from(file).set_len(4096).is_err());
    }
}
