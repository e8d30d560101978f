//! The window: memory that both sides see. First the rings, then the data.
//!
//! | from | what |
//! |---|---|
//! | 0 | control words of the ring of calls |
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

impl Window {
    /// Maps a window whose rings have `ring` bytes each.
    pub fn map(file: OwnedFd, size: u64, ring: u64) -> Result<Arc<Self>, Error> {
        if size < SMALLEST
            || !ring.is_power_of_two()
            || !(1 << 16..=1 << 30).contains(&ring)
            || Self::data_start(ring) >= size
        {
            return Err(Error::Layout { window: size, ring });
        }
        let failed = |what, source| Error::System { what, size, source };
        let file = File::from(file);
        let actual = file
            .metadata()
            .map_err(|source| failed("look at", source))?
            .len();
        if actual < size {
            return Err(Error::Truncated {
                actual,
                claimed: size,
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
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(failed("map", io::Error::last_os_error()));
        }
        Ok(Arc::new(Self {
            base: base.cast(),
            size,
            ring,
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
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_outside_of_the_data_are_no_places() {
        let window = Window::map(create(SMALLEST).unwrap(), SMALLEST, 1 << 16).unwrap();
        assert!(window.at(window.data(), 16).is_some());
        assert!(window.at(window.data() - 1, 16).is_none());
        assert!(window.at(SMALLEST - 15, 16).is_none());
        assert!(window.at(u64::MAX - 3, 16).is_none());
    }

    #[test]
    fn a_window_whose_file_is_too_short_is_refused() {
        let file = create(SMALLEST).unwrap();
        assert!(matches!(
            Window::map(file, 2 * SMALLEST, 1 << 16),
            Err(Error::Truncated { .. })
        ));
    }

    #[test]
    fn the_file_cannot_be_shortened_by_a_peer() {
        let file = create(SMALLEST).unwrap();
        assert!(File::from(file).set_len(4096).is_err());
    }
}
