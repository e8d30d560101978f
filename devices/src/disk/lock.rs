//! Advisory locks that keep two VMMs from one image.
//!
//! They are open-file-description locks: the kernel drops them with the descriptor, however the
//! process ends, and they work between two disks of one process.

use std::{fs::File, io, os::fd::AsRawFd};

use serde::{Deserialize, Serialize};

/// How much of the image a lock covers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum LockGranularity {
    /// The bytes that the image has now. What CH and Gantry do by default: some network storage
    /// grants it where it refuses a whole-file lock.
    #[default]
    ByteRange,
    /// The whole file, however it grows.
    Full,
}

/// Takes an exclusive lock, or a shared one if `read_only`; does not wait.
pub fn lock(
    file: &File,
    size: u64,
    read_only: bool,
    granularity: LockGranularity,
) -> io::Result<()> {
    let kind = if read_only {
        libc::F_RDLCK
    } else {
        libc::F_WRLCK
    };
    set(file, kind, size, granularity)
}

/// Gives a lock of [`lock`] up, whose arguments it gets again.
pub fn unlock(file: &File, size: u64, granularity: LockGranularity) -> io::Result<()> {
    set(file, libc::F_UNLCK, size, granularity)
}

fn set(file: &File, kind: libc::c_int, size: u64, granularity: LockGranularity) -> io::Result<()> {
    // SAFETY: flock is plain data, for which zeroes are valid.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as i16;
    request.l_whence = libc::SEEK_SET as i16;
    // A length of zero means up to the end, wherever it is.
    request.l_len = match granularity {
        LockGranularity::ByteRange => i64::try_from(size).map_err(io::Error::other)?,
        LockGranularity::Full => 0,
    };
    // SAFETY: `request` is a valid flock for the duration of the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
