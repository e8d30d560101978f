//! The VM's part of VRAM, which front, guest and GPU share.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
};

use base::{Access, Mapping};
use rustix::fs::SealFlags;
use vm_memory::VolatileSlice;

/// The partition.
pub struct Vram {
    file: File,
    mapping: Mapping,
}

impl Vram {
    /// Maps the file that the mediator gave for so many bytes.
    ///
    /// # Errors
    /// It is shorter or can become so, or cannot be mapped.
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
        Ok(Self { file, mapping })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
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
        // SAFETY: within the mapping, which lives as long as the borrow; it is looked at by volatile
        // accesses only.
        Some(unsafe { VolatileSlice::new(start, len) })
    }

    /// Copies bytes out, if all of them are there.
    pub fn read(&self, at: u64, data: &mut [u8]) -> bool {
        self.slice(at, data.len())
            .is_some_and(|slice| slice.copy_to(data) == data.len())
    }

    /// Copies bytes in, if there is room for all of them.
    pub fn write(&self, at: u64, data: &[u8]) -> bool {
        self.slice(at, data.len())
            .map(|slice| slice.copy_from(data))
            .is_some()
    }

    /// Eight bytes, if they are there.
    pub fn word(&self, at: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes).then(|| u64::from_le_bytes(bytes))
    }

    /// So many words of eight bytes, if all of them are there.
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
