//! The VM's part of VRAM, shared by front, guest and GPU.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use base::{Access, Mapping};
use gf100::format::PAGE;
use rustix::fs::SealFlags;
use vm_memory::VolatileSlice;

/// The partition.
pub struct Vram {
    file: File,
    mapping: Mapping,
    /// Pages that were written here, or that could be written by someone whose writes are no longer
    /// logged: one bit each, until taken.
    touched: Vec<AtomicU64>,
}

impl Vram {
    /// Maps the first `len` bytes of the file that the mediator provided.
    ///
    /// # Errors
    /// The file is shorter or can shrink, or cannot be mapped.
    pub fn new(file: File, len: u64) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK) || file.metadata()?.len() < len {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the partition's file is too short, or can become so",
            ));
        }
        let bytes = usize::try_from(len).map_err(io::Error::other)?;
        let mapping = Mapping::shared(&file, 0, bytes, Access::ReadWrite)?;
        let words = bytes.div_ceil(PAGE as usize * 64);
        Ok(Self {
            file,
            mapping,
            touched: (0..words).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Duplicates the file descriptor.
    pub fn keep(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn slice(&self, at: u64, len: usize) -> Option<VolatileSlice<'_>> {
        let end = at.checked_add(len as u64)?;
        if end > self.len() {
            return None;
        }
        let start = self.mapping.start().wrapping_add(at as usize);
        // SAFETY: within the mapping, which lives as long as the borrow; it is accessed only by
        // volatile accesses.
        Some(unsafe { VolatileSlice::new(start, len) })
    }

    /// Copies bytes out; false if the range is not completely within VRAM.
    pub fn read(&self, at: u64, data: &mut [u8]) -> bool {
        self.slice(at, data.len())
            .is_some_and(|slice| slice.copy_to(data) == data.len())
    }

    /// Copies bytes in; false if the range is not completely within VRAM.
    pub fn write(&self, at: u64, data: &[u8]) -> bool {
        let Some(slice) = self.slice(at, data.len()) else {
            return false;
        };
        slice.copy_from(data);
        if !data.is_empty() {
            // Within the mapping, so page numbers have 28 bits.
            let (first, last) = (at / PAGE, (at + data.len() as u64 - 1) / PAGE);
            (first..=last).for_each(|page| self.touch(page as u32));
        }
        true
    }

    /// Records that a page may have been written.
    pub fn touch(&self, page: u32) {
        if let Some(word) = self.touched.get(page as usize / 64) {
            word.fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
    }

    /// Which of the pages from `nth * 64` on that are set in `mask` were touched since the last
    /// call for them.
    pub fn take_touched(&self, nth: usize, mask: u64) -> u64 {
        let word = self.touched.get(nth);
        word.map_or(0, |word| word.fetch_and(!mask, Ordering::Relaxed) & mask)
    }

    /// Reads eight bytes; `None` if they are not within VRAM.
    pub fn word(&self, at: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes).then(|| u64::from_le_bytes(bytes))
    }

    /// Reads `count` words of eight bytes; `None` if they are not completely within VRAM.
    pub fn words(&self, at: u64, count: usize) -> Option<Vec<u64>> {
        let len = count.checked_mul(8)?;
        self.slice(at, len)?;
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes);
        let words = bytes.chunks_exact(8).map(|chunk| {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        Some(words.collect())
    }
}
