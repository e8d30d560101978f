//! Keeps two processes from using one snapshot directory at the same time.
//!
//! Whoever writes a snapshot has its directory alone, whoever reads one has it together with other
//! readers. The lock is the kernel's (`flock` on the directory): it ends with the process, however
//! that ends, and leaves nothing behind.

use std::{
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
};

/// A snapshot directory cannot be used now.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else is at it.
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
        /// Why.
        source: io::Error,
    },
}

/// A snapshot directory that is in use until this is dropped.
#[derive(Debug)]
pub struct DirectoryLock(#[expect(dead_code, reason = "held for its lock")] File);

impl DirectoryLock {
    /// For writing. Does not wait.
    pub fn exclusive(directory: &Path) -> Result<Self, LockError> {
        Self::take(directory, File::try_lock)
    }

    /// For reading. Does not wait.
    pub fn shared(directory: &Path) -> Result<Self, LockError> {
        Self::take(directory, File::try_lock_shared)
    }

    fn take(
        directory: &Path,
        lock: fn(&File) -> Result<(), TryLockError>,
    ) -> Result<Self, LockError> {
        let file = File::open(directory).map_err(|source| LockError::Open {
            path: directory.to_owned(),
            source,
        })?;
        match lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LockError::InUse(directory.to_owned())),
            // Some network file systems have no locks. Without them it is as safe as it was.
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
    fn a_directory_that_is_not_there_is_named() {
        let error = DirectoryLock::shared(Path::new("/nowhere/snapshot")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/snapshot"), "{error}");
    }
}
