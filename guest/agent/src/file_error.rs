//! Errors of file operations.

use std::{
    io,
    path::{Path, PathBuf},
};

/// What was tried, on which file, and why it failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", path.display())]
pub struct FileError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// For `map_err`.
pub fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError { what, path, source }
}
