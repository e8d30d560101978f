//! The window's memory: one range of addresses, a file of its own behind each slice.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr::null_mut,
    sync::{Mutex, PoisonError},
};

use gantry_remoting::transport::window as slice_file;

use super::Error;

/// The memory. It costs the host what guest and workers touch.
pub struct Window {
    base: *mut u8,
    /// Bytes of the range.
    size: u64,
    slice_size: u64,
    files: Mutex<Vec<OwnedFd>>,
}

// SAFETY: the mapping belongs to the value; nobody in this process looks into it.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Memory for so many slices of so many bytes, both checked by the caller.
    pub fn new(slices: u32, slice_size: u64) -> Result<Self, Error> {
        let size = u64::from(slices) * slice_size;
        let failed = |what| Error::Memory {
            what,
            size,
            source: io::Error::last_os_error(),
        };
        // SAFETY: a fresh range of addresses of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                null_mut(),
                size as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(failed("reserve"));
        }
        let window = Self {
            base: base.cast(),
            size,
            slice_size,
            files: Mutex::new(Vec::new()),
        };
        for slice in 0..slices {
            let file = window.fill(u64::from(slice))?;
            window.lock().push(file);
        }
        Ok(window)
    }

    /// First byte in this process.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Puts a new file in a slice's place. A guest that looks at the slice meanwhile sees either.
    fn fill(&self, slice: u64) -> Result<OwnedFd, Error> {
        let file = slice_file::create(self.slice_size)?;
        let at = slice * self.slice_size;
        // SAFETY: the slice's part of the range, which belongs to this value; what was mapped
        // there is only looked at by the guest, which gets zeroes from now on.
        let mapped = unsafe {
            libc::mmap(
                self.base.add(at as usize).cast(),
                self.slice_size as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(Error::Memory {
                what: "map",
                size: self.slice_size,
                source: io::Error::last_os_error(),
            });
        }
        Ok(file)
    }

    /// Takes a slice's contents away: whoever still has the old memory shares it with nobody.
    pub fn renew(&self, slice: usize) -> Result<(), Error> {
        let file = self.fill(slice as u64)?;
        if let Some(old) = self.lock().get_mut(slice) {
            *old = file;
        }
        Ok(())
    }

    /// Does something with a slice's file.
    pub fn with_file<T>(&self, slice: usize, work: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        self.lock().get(slice).map(|file| work(file.as_fd()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<OwnedFd>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the range was made in `new`, and the guest's view of it was removed before.
        unsafe { libc::munmap(self.base.cast(), self.size as usize) };
    }
}
