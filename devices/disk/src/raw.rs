//! Raw images: files and block devices with the plain content of the disk.

use std::{fs::File, io, os::fd::AsRawFd, sync::Arc};

use super::{
    io::{Io, MAX_VECTORS, Operation, Path, Step, step},
    pool::Blocking,
};

/// `fallocate` mode that frees a range's storage.
pub fn discard_mode() -> i32 {
    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE
}

/// `fallocate` mode that makes a range read as zeroes.
pub fn zero_mode(may_unmap: bool) -> i32 {
    if may_unmap {
        discard_mode()
    } else {
        libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE
    }
}

/// Whether the file system of `file` supports `mode`. Tested beyond the end of the file, where it
/// has no visible effect. Block devices are assumed to support it (or report an error per request).
pub fn can_fallocate(file: &File, size: u64, mode: i32, block_device: bool) -> bool {
    block_device || {
        let supported = fallocate(file, mode, size, 4096).is_ok();
        if supported && mode & libc::FALLOC_FL_ZERO_RANGE != 0 {
            // Zeroing allocates storage: free it. If this fails, it does no harm.
            let _ = fallocate(file, discard_mode(), size, 4096);
        }
        supported
    }
}

/// Performs `fallocate(2)` with this mode on a range of bytes.
pub fn fallocate(file: &File, mode: i32, offset: u64, len: u64) -> io::Result<usize> {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: no memory is involved.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) } as isize)
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// A raw image with blocking operations.
pub struct BlockingRaw {
    /// The image.
    pub file: Arc<File>,
    /// Constraints on transfers.
    pub path: Path,
}

impl BlockingRaw {
    fn step(&self, io: &mut Io) -> io::Result<usize> {
        let fd = self.file.as_raw_fd();
        let Ok(offset) = libc::off_t::try_from(io.offset) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        match io.operation {
            Operation::Read => {
                let vectors = io.vectors(&self.path)?;
                let count = vectors.len().min(MAX_VECTORS) as i32;
                // SAFETY: the vectors describe memory that `io` keeps alive.
                check(unsafe { libc::preadv(fd, vectors.as_ptr(), count, offset) })
            }
            Operation::Write { .. } => {
                let vectors = io.vectors(&self.path)?;
                let count = vectors.len().min(MAX_VECTORS) as i32;
                // SAFETY: as above.
                check(unsafe { libc::pwritev(fd, vectors.as_ptr(), count, offset) })
            }
            Operation::Flush => self.file.sync_data().map(|()| 0),
            Operation::Discard => fallocate(&self.file, discard_mode(), io.offset, io.len),
            Operation::WriteZeroes { may_unmap, .. } => {
                fallocate(&self.file, zero_mode(may_unmap), io.offset, io.len)
            }
        }
    }
}

impl Blocking for BlockingRaw {
    fn perform(&self, io: &mut Io) -> io::Result<()> {
        loop {
            let outcome = self.step(io);
            match step(io, outcome) {
                Step::Done(Ok(())) if io.operation == (Operation::Write { durable: true }) => {
                    return self.file.sync_data();
                }
                Step::Done(result) => return result,
                Step::Again => {}
            }
        }
    }
}
