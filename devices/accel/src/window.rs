//! The window's memory: one address range, with a separate file behind each slice.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Mutex,
};

use base::{Access, Mapping, Unpoisoned};
use remoting_transport::mapping;

use super::Error;

/// The window's memory. It costs the host only what guest and workers touch.
pub struct Window {
    /// The address range. The guest's mapping of it must be removed before it is dropped.
    range: Mapping,
    slice_size: u64,
    files: Mutex<Vec<OwnedFd>>,
}

impl Window {
    /// Creates memory for `slices` slices of `slice_size` bytes; the caller has checked both.
    pub fn new(slices: u32, slice_size: u64) -> Result<Self, Error> {
        let size = u64::from(slices) * slice_size;
        let range =
            Mapping::anonymous(size as usize, Access::None).map_err(|source| Error::Memory {
                what: "reserve",
                size,
                source,
            })?;
        let window = Self {
            range,
            slice_size,
            files: Mutex::new(Vec::new()),
        };
        for slice in 0..slices {
            let file = window.fill(u64::from(slice))?;
            window.lock().push(file);
        }
        Ok(window)
    }

    /// Address of its first byte in this process.
    pub fn base(&self) -> *mut u8 {
        self.range.start()
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.range.len() as u64
    }

    /// Maps a new file in place of a slice. A guest that accesses the slice meanwhile sees either
    /// file.
    fn fill(&self, slice: u64) -> Result<OwnedFd, Error> {
        let file = mapping::create(self.slice_size)?;
        let at = slice * self.slice_size;
        // Only the guest accesses what was mapped there; it reads zeroes from now on.
        self.range
            .replace(
                at as usize,
                &file,
                self.slice_size as usize,
                Access::ReadWrite,
            )
            .map_err(|source| Error::Memory {
                what: "map",
                size: self.slice_size,
                source,
            })?;
        Ok(file)
    }

    /// Replaces a slice's contents by zeroes: processes that still have the old memory share it
    /// with nobody.
    pub fn renew(&self, slice: usize) -> Result<(), Error> {
        let file = self.fill(slice as u64)?;
        if let Some(old) = self.lock().get_mut(slice) {
            *old = file;
        }
        Ok(())
    }

    /// Calls `work` with a slice's file.
    pub fn with_file<T>(&self, slice: usize, work: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        self.lock().get(slice).map(|file| work(file.as_fd()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<OwnedFd>> {
        self.files.lock_unpoisoned()
    }
}
