//! Atomic replacement: a snapshot replaces an older one only when all of it is on stable storage.
//!
//! The files are first written under temporary names beside those of the older snapshot. If the disk is full or the
//! process is killed, only the new snapshot is lost. [`Staged::commit`] then renames the files, the state last. A
//! directory without a state is not a snapshot. So a state is never combined with another snapshot's memory, even after
//! a power loss of the host.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::{APPLICATIONS, CONFIG, MEMORY, STATE, lock::DirectoryLock};

/// All files; the state is last.
const FILES: [&str; 4] = [MEMORY, APPLICATIONS, CONFIG, STATE];
/// Optional files.
const OPTIONAL: [&str; 1] = [APPLICATIONS];

/// The files of a snapshot that is being written. They are removed unless it is committed.
#[derive(Debug)]
pub struct Staged {
    directory: PathBuf,
    /// Here, so that it ends after the files are removed ([`Drop`] comes before the fields): otherwise
    /// the removal could take those of the next snapshot to this directory.
    _alone: DirectoryLock,
}

impl Staged {
    /// Prepares a directory, which is locked for writing as long as the result exists. Removes files that a killed
    /// process left there.
    pub fn new(directory: &Path, alone: DirectoryLock) -> io::Result<Self> {
        let staged = Self {
            directory: directory.to_owned(),
            _alone: alone,
        };
        for file in FILES {
            remove(&staged.path(file))?;
        }
        Ok(staged)
    }

    /// The path to which one of the files is written.
    pub fn path(&self, file: &str) -> PathBuf {
        self.directory.join(format!("{file}.new"))
    }

    /// Replaces the files of an older snapshot with the new ones, whose contents must be on stable storage. The result
    /// is durable when this returns.
    pub fn commit(self) -> io::Result<()> {
        let directory = File::open(&self.directory)?;
        remove(&self.directory.join(STATE))?;
        // The old state is gone before any new file gets its final name.
        directory.sync_all()?;
        for file in FILES {
            if file == STATE {
                directory.sync_all()?;
            }
            match fs::rename(self.path(file), self.directory.join(file)) {
                // The older snapshot's file does not belong to this one.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && OPTIONAL.contains(&file) =>
                {
                    remove(&self.directory.join(file))?;
                }
                renamed => renamed?,
            }
        }
        directory.sync_all()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        for file in FILES {
            if let Err(error) = remove(&self.path(file)) {
                let path = self.path(file);
                log::warn!("cannot remove {}: {error}", path.display());
            }
        }
    }
}

/// Removes a file if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(directory: &Path) -> Staged {
        let alone = DirectoryLock::exclusive(directory).unwrap();
        Staged::new(directory, alone).unwrap()
    }

    fn write(to: &Staged, text: &str) {
        for file in FILES {
            fs::write(to.path(file), text).unwrap();
        }
    }

    /// The contents of the directory, by file name.
    fn found(directory: &Path) -> Vec<(String, String)> {
        let entries = fs::read_dir(directory).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            (name.to_owned(), fs::read_to_string(&path).unwrap())
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort();
        entries
    }

    fn all(text: &str) -> Vec<(String, String)> {
        let mut all = FILES.map(|file| (file.to_owned(), text.to_owned()));
        all.sort();
        all.into()
    }

    #[test]
    fn an_older_snapshot_is_there_until_the_new_one_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let first = stage(dir.path());
        write(&first, "first");
        first.commit().unwrap();
        assert_eq!(found(dir.path()), all("first"));
        // The disk becomes full when half of it has been written.
        let failed = stage(dir.path());
        fs::write(failed.path(MEMORY), "half").unwrap();
        drop(failed);
        assert_eq!(found(dir.path()), all("first"));
        // The process is killed.
        for file in FILES {
            fs::write(dir.path().join(format!("{file}.new")), "second").unwrap();
        }
        for file in FILES {
            assert_eq!(fs::read_to_string(dir.path().join(file)).unwrap(), "first");
        }
        let third = stage(dir.path());
        write(&third, "third");
        third.commit().unwrap();
        assert_eq!(found(dir.path()), all("third"));
    }

    #[test]
    fn what_only_the_older_snapshot_has_is_not_the_new_ones() {
        let dir = tempfile::tempdir().unwrap();
        let first = stage(dir.path());
        write(&first, "first");
        first.commit().unwrap();
        let second = stage(dir.path());
        for file in [MEMORY, CONFIG, STATE] {
            fs::write(second.path(file), "second").unwrap();
        }
        second.commit().unwrap();
        assert!(!dir.path().join(APPLICATIONS).exists());
        assert_eq!(found(dir.path()).len(), 3);
    }

    #[test]
    fn no_other_can_write_while_there_may_be_files_to_remove() {
        let dir = tempfile::tempdir().unwrap();
        for is_committed in [false, true] {
            let staged = stage(dir.path());
            write(&staged, "text");
            DirectoryLock::exclusive(dir.path()).unwrap_err();
            match is_committed {
                false => drop(staged),
                true => staged.commit().unwrap(),
            }
            let next = stage(dir.path());
            assert!(FILES.iter().all(|file| !next.path(file).exists()));
        }
    }

    #[test]
    fn a_snapshot_that_is_not_complete_takes_nothings_place() {
        let dir = tempfile::tempdir().unwrap();
        let staged = stage(dir.path());
        fs::write(staged.path(MEMORY), "memory").unwrap();
        assert!(staged.commit().is_err());
        assert!(!dir.path().join(STATE).exists());
    }
}
