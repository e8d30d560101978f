//! Memory of the host that the GPU reads and writes: anonymous pages, which also the kernel's
//! io_uring can hold, registered with the GPU's driver by [`crate::cuda::Gpu::register`].

use std::{io, ptr::NonNull};

use crate::{layout::Rings, ring::Entry};

/// Pages, all zero at first, shared with a device or another thread: reached by atomics, by the
/// kernel, and by copies alone.
#[derive(Debug)]
pub struct Memory {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory; who may access which part when is the users' matter, who do it by
// atomics and raw copies.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many bytes, at least one page.
    ///
    /// # Errors
    /// There is not as much memory.
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

    /// Where it begins.
    pub fn at(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The word with this number, of four bytes.
    ///
    /// # Panics
    /// There is no such word.
    pub fn word(&self, number: usize) -> &std::sync::atomic::AtomicU32 {
        assert!(number < self.bytes / 4);
        // SAFETY: within the mapping, aligned, and accessed by atomics alone.
        unsafe { &*self.at().cast::<std::sync::atomic::AtomicU32>().add(number) }
    }

    /// The rings of a block: those that it writes, and those that it reads.
    ///
    /// # Panics
    /// The memory has no rings for this block.
    pub fn rings(&self, block: usize) -> (&[Entry<16>], &[Entry<4>]) {
        const RINGS: usize = size_of::<Rings>();
        const REQUESTS: usize = std::mem::offset_of!(Rings, completions);
        assert!(block < self.bytes / RINGS);
        let entries = crate::layout::ENTRIES;
        // SAFETY: within the mapping, aligned; rings are accessed by atomics alone.
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
        // SAFETY: it was mapped by `new`, and nobody has a reference.
        unsafe { libc::munmap(self.at().cast(), self.bytes) };
    }
}
