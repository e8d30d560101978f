//! Prevents conflicting use of a snapshot directory by several processes.
//!
//! A writer has exclusive access to the directory; readers share it. The lock is the kernel's
//! (`flock` on the directory): it ends with the process, however the process ends, and leaves
//! nothing behind.

use std::{
    fs::{File, TryLockError},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// A snapshot directory cannot be used at the moment.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process is using it.
    #[error(
        "another process is writing or reading the snapshot {}: wait for it, or use another \
         directory",
        .0.display()
    )]
    InUse(PathBuf),
    /// The directory cannot be opened.
    #[error("cannot open the snapshot directory {}", path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Holds the lock on a snapshot directory until it is dropped.
#[derive(Debug)]
pub struct DirectoryLock(#[expect(dead_code, reason = "held for its lock")] File);

impl DirectoryLock {
    /// Locks a directory for writing. Does not wait.
    pub fn exclusive(directory: &Path) -> Result<Self, LockError> {
        Self::take(directory, File::try_lock)
    }

    /// Locks a directory for reading. Does not wait.
    pub fn shared(directory: &Path) -> Result<Self, LockError> {
        Self::take(directory, File::try_lock_shared)
    }

    fn take(
        directory: &Path,
        lock: fn(&File) -> Result<(), TryLockError>,
    ) -> Result<Self, LockError> {
        // Opening a FIFO would wait for a writer.
        let mut options = File::options();
        let opened = options
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK)
            .open(directory);
        let file = opened.map_err(|source| LockError::Open {
            path: directory.to_owned(),
            source,
        })?;
        match lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LockError::InUse(directory.to_owned())),
            // Some network file systems do not support locks. Without a lock, access is no less
            // safe than before locks were used.
            Err(TryLockError::Error(error)) => log::warn!(
                "the snapshot directory {} cannot be locked ({error}): see to it that no other \
                 process uses it",
                directory.display()
            ),
        }
        Ok(Self(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_is_alone_and_readers_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let writer = DirectoryLock::exclusive(dir.path()).unwrap();
        for refused in [
            DirectoryLock::exclusive(dir.path()),
            DirectoryLock::shared(dir.path()),
        ] {
            let text = refused.unwrap_err().to_string();
            assert!(text.contains(dir.path().to_str().unwrap()), "{text}");
        }
        drop(writer);
        let readers = [(); 2].map(|()| DirectoryLock::shared(dir.path()).unwrap());
        assert!(matches!(
            DirectoryLock::exclusive(dir.path()),
            Err(LockError::InUse(_))
        ));
        drop(readers);
        DirectoryLock::exclusive(dir.path()).unwrap();
    }

    #[test]
    fn what_is_no_directory_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: a terminated string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for path in [&*fifo, Path::new("/dev/zero")] {
            let error = DirectoryLock::shared(path).unwrap_err();
            assert!(matches!(error, LockError::Open { .. }), "{error}");
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = DirectoryLock::shared(Path::new("/nowhere/snapshot")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/snapshot"), "{error}");
    }
}
