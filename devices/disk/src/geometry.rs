//! Sizes and alignments of the storage behind an image.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
};

use super::SECTOR;

/// Preferences and requirements of the storage.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Geometry {
    /// Logical block size in bytes, as the guest sees it: a power of two, at least 512.
    pub logical_block: u32,
    /// Block size with which the storage works internally, in bytes; at least `logical_block`.
    pub physical_block: u32,
    /// Memory alignment in bytes that transfers require; 1 without `O_DIRECT`.
    pub memory_alignment: usize,
}

impl Geometry {
    /// Sets the logical block size, a power of two of at least 512 bytes.
    pub fn set_logical_block(&mut self, size: u32) {
        self.logical_block = size;
        self.physical_block = self.physical_block.max(size);
    }
}

/// `BLKSSZGET` and `BLKPBSZGET` of linux/fs.h: `_IO(0x12, 104)` and `_IO(0x12, 123)`.
const BLKSSZGET: libc::Ioctl = 0x1268;
const BLKPBSZGET: libc::Ioctl = 0x127b;

/// Size in bytes of a file or block device.
pub fn size(file: &mut File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// Determines the geometry of `file`.
pub fn probe(file: &File, direct: bool) -> io::Result<Geometry> {
    let metadata = file.metadata()?;
    let (mut logical, physical) = if metadata.file_type().is_block_device() {
        (ioctl(file, BLKSSZGET), ioctl(file, BLKPBSZGET))
    } else {
        (None, u32::try_from(metadata.blksize()).ok())
    };
    if direct {
        let found = direct_alignment(file)?;
        logical = Some(logical.unwrap_or(found).max(found));
    }
    let logical_block = sane(logical);
    Ok(Geometry {
        logical_block,
        physical_block: sane(physical).max(logical_block),
        memory_alignment: if direct { logical_block as usize } else { 1 },
    })
}

/// A block size that is valid for a guest; replaces invalid ones by one sector.
fn sane(size: Option<u32>) -> u32 {
    size.filter(|size| size.is_power_of_two() && (512..=65536).contains(size))
        .unwrap_or(SECTOR as u32)
}

fn ioctl(file: &File, request: libc::Ioctl) -> Option<u32> {
    let mut value: libc::c_int = 0;
    // SAFETY: both requests write an int (or unsigned int) to the given address.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, &mut value) };
    u32::try_from(value).ok().filter(|_| result == 0)
}

/// Minimum size of an `O_DIRECT` transfer, determined by trying: unlike a query, this works on
/// every kernel and file system.
fn direct_alignment(file: &File) -> io::Result<u32> {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    let mut error = None;
    for size in [512, 1024, 2048, 4096] {
        // Memory that is aligned to exactly `size`, if that is less than a page.
        let memory = &mut page.0[size % 4096..];
        let len = size.min(memory.len());
        // SAFETY: `memory` holds `len` bytes.
        let result = unsafe { libc::pread(file.as_raw_fd(), memory.as_mut_ptr().cast(), len, 0) };
        if result >= 0 {
            return Ok(size as u32);
        }
        error = Some(io::Error::last_os_error());
    }
    Err(error.unwrap_or_else(|| io::ErrorKind::InvalidInput.into()))
}
