//! Files of `/proc` as text.

use std::{fs, io, path::Path};

/// Reads a file in which others choose names (of processes, mapped files, control groups, mounts). The kernel shows the
/// bytes of these as they are, and cuts a process's name anywhere: what is not UTF-8 is replaced, and the rest is there.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let bytes = fs::read(path)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Whether reading a process's file failed because the process has ended, and not for want of anything.
#[must_use]
pub fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}
