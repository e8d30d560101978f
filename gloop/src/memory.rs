//! Host memory that the GPU reads and writes: anonymous pages, which the kernel's io_uring can pin
//! as well, registered with the GPU's driver by [`crate::cuda::Gpu::register`].

use std::{io, ptr::NonNull};

use crate::{layout::Rings, ring::Entry};

/// Pages, initially all zero, that are shared with a device or another thread. They are accessed
/// only by atomics, by the kernel, and by raw copies.
#[derive(Debug)]
pub struct Memory {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory. Its users decide who may access which part when, and access it by atomics
// and raw copies.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates this many bytes, at least one page.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(4096);
        // SAFETY: a new anonymous mapping anywhere.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, bytes })
    }

    /// The start of the memory.
    pub fn at(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The four-byte word with this number.
    ///
    /// # Panics
    /// There is no such word.
    pub fn word(&self, number: usize) -> &std::sync::atomic::AtomicU32 {
        assert!(number < self.bytes / 4);
        // SAFETY: within the mapping, aligned, and only accessed by atomics.
        unsafe { &*self.at().cast::<std::sync::atomic::AtomicU32>().add(number) }
    }

    /// The rings of a block: the one that it writes, and the one that it reads.
    ///
    /// # Panics
    /// The memory has no rings for this block.
    pub fn rings(&self, block: usize) -> (&[Entry<16>], &[Entry<4>]) {
        const RINGS: usize = size_of::<Rings>();
        const REQUESTS: usize = std::mem::offset_of!(Rings, completions);
        assert!(block < self.bytes / RINGS);
        let entries = crate::layout::ENTRIES;
        // SAFETY: within the mapping and aligned; rings are only accessed by atomics.
        unsafe {
            let at = self.at().add(block * RINGS);
            (
                std::slice::from_raw_parts(at.cast(), entries),
                std::slice::from_raw_parts(at.add(REQUESTS).cast(), entries),
            )
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `new`, and there are no references to it.
        unsafe { libc::munmap(self.at().cast(), self.bytes) };
    }
}
