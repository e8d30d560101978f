//! What was suspended, in files: another call of this program, after a crash too, knows what to undo.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use base::proc::has_ended;
use serde::{Deserialize, Serialize};

use crate::{memory::DataLimit, process::Process};

/// A program that is being suspended, or is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When it started, in clock ticks since boot.
    pub start: u64,
    /// The devices of this machine when it was suspended.
    pub gpus: Vec<Had>,
    /// Its limit of data memory before, if that is raised.
    pub limit: Option<DataLimit>,
    /// Whether the driver has begun to resume it. If it is still suspended, that was interrupted.
    pub is_resuming: bool,
    /// Whether it could not be resumed. The driver cannot try twice.
    pub is_lost: bool,
}

/// A device that there was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Had {
    /// Its UUID.
    pub uuid: String,
    /// Its type, as NVML names it.
    pub model: String,
    /// How many bytes the program had on it.
    pub bytes: u64,
}

impl Entry {
    /// That of a program of which nothing else is known.
    pub fn of(process: &Process) -> Self {
        Self {
            start: process.start,
            gpus: Vec::new(),
            limit: None,
            is_resuming: false,
            is_lost: false,
        }
    }
}

/// The journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another call is at work.
    #[error("another gantry-checkpoint is at work ({} is locked): wait for it", .0.display())]
    Busy(PathBuf),
    /// The folder is another user's.
    #[error("{} belongs to another user: choose another folder with --journal", .0.display())]
    Foreign(PathBuf),
    /// A file cannot be read or written.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The folder, which no other call uses meanwhile.
pub struct Journal {
    folder: PathBuf,
    _lock: File,
}

impl Journal {
    /// The folder of this user.
    pub fn usual() -> PathBuf {
        // SAFETY: a call without arguments.
        let user = unsafe { libc::geteuid() };
        if user == 0 {
            return PathBuf::from("/run/gantry-checkpoint");
        }
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(folder) => Path::new(&folder).join("gantry-checkpoint"),
            None => std::env::temp_dir().join(format!("gantry-checkpoint-{user}")),
        }
    }

    /// Opens the folder, which is created if it is missing.
    ///
    /// # Errors
    /// It is another user's or in use, or the system refuses.
    pub fn open(folder: &Path) -> Result<Self, JournalError> {
        let failed = |source| JournalError::File {
            path: folder.to_owned(),
            source,
        };
        match fs::DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let found = fs::symlink_metadata(folder).map_err(failed)?;
        // SAFETY: a call without arguments.
        let user = unsafe { libc::geteuid() };
        if !found.is_dir() || found.uid() != user || found.mode() & 0o022 != 0 {
            return Err(JournalError::Foreign(folder.to_owned()));
        }
        let path = folder.join("lock");
        let lock = File::create(&path).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::Busy(path)),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(Self {
            folder: folder.to_owned(),
            _lock: lock,
        })
    }

    /// A program's entry. One of a program that has ended is removed.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn entry(&self, process: &Process) -> Result<Option<Entry>, JournalError> {
        let path = self.path(process.number);
        let failed = |source| JournalError::File {
            path: path.clone(),
            source,
        };
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(failed)?,
        };
        let entry: Entry = serde_json::from_slice(&text).map_err(|error| failed(error.into()))?;
        if entry.start == process.start {
            return Ok(Some(entry));
        }
        self.remove(process)?;
        Ok(None)
    }

    /// The programs with an entry that still run.
    ///
    /// # Errors
    /// The folder cannot be read, or it is not known whether one still runs.
    pub fn programs(&self) -> Result<Vec<Process>, JournalError> {
        let failed = |source| JournalError::File {
            path: self.folder.clone(),
            source,
        };
        let mut programs = Vec::new();
        for file in fs::read_dir(&self.folder).map_err(failed)? {
            let name = file.map_err(failed)?.file_name();
            let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match Process::find(number) {
                // One that cannot be read is that of a program, too.
                Ok(process) if !matches!(self.entry(&process), Ok(None)) => programs.push(process),
                Ok(_) => {}
                Err(error) if has_ended(&error) => self.remove_file(number)?,
                Err(source) => {
                    let path = Path::new("/proc").join(number.to_string());
                    return Err(JournalError::File { path, source });
                }
            }
        }
        programs.sort_by_key(|process| process.number);
        Ok(programs)
    }

    /// Writes a program's entry: another call reads it as a whole, or the one before.
    ///
    /// # Errors
    /// The system refuses.
    pub fn write(&self, process: &Process, entry: &Entry) -> Result<(), JournalError> {
        let path = self.path(process.number);
        let new = path.with_extension("new");
        let write = || {
            fs::write(&new, serde_json::to_vec(entry)?)?;
            fs::rename(&new, &path)
        };
        write().map_err(|source| JournalError::File {
            path: path.clone(),
            source,
        })
    }

    /// Removes a program's entry.
    ///
    /// # Errors
    /// The system refuses.
    pub fn remove(&self, process: &Process) -> Result<(), JournalError> {
        self.remove_file(process.number)
    }

    fn remove_file(&self, number: u32) -> Result<(), JournalError> {
        let path = self.path(number);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(JournalError::File { path, source })
            }
            _ => Ok(()),
        }
    }

    fn path(&self, number: u32) -> PathBuf {
        self.folder.join(number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(start: u64) -> Entry {
        Entry {
            start,
            gpus: vec![Had {
                uuid: "GPU-1".to_owned(),
                model: "model".to_owned(),
                bytes: 5,
            }],
            limit: Some([1, u64::MAX]),
            is_resuming: false,
            is_lost: false,
        }
    }

    #[test]
    fn an_entry_is_read_as_it_was_written_and_that_of_an_ended_program_goes() {
        let folder = tempfile::tempdir().expect("there is room");
        let folder = folder.path().join("journal");
        let journal = Journal::open(&folder).expect("it is new");
        let own = Process::find(std::process::id()).expect("it runs");
        assert_eq!(journal.entry(&own).expect("it is readable"), None);
        journal
            .write(&own, &entry(own.start))
            .expect("there is room");
        assert_eq!(
            journal.entry(&own).expect("it is readable"),
            Some(entry(own.start))
        );
        assert_eq!(
            journal.programs().expect("it is readable"),
            std::slice::from_ref(&own)
        );
        journal
            .write(&own, &entry(own.start + 1))
            .expect("there is room");
        assert_eq!(journal.programs().expect("it is readable"), []);
        assert!(!folder.join(own.number.to_string()).exists());
    }

    #[test]
    fn two_calls_do_not_use_a_journal_at_the_same_time() {
        let folder = tempfile::tempdir().expect("there is room");
        let folder = folder.path().join("journal");
        let first = Journal::open(&folder).expect("it is new");
        let second = Journal::open(&folder).err().expect("it is in use");
        assert!(second.to_string().contains("is at work"), "{second}");
        drop(first);
        // A process that another test starts has the lock until it executes its program.
        while let Err(error) = Journal::open(&folder) {
            assert!(matches!(error, JournalError::Busy(_)), "{error}");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn a_folder_that_others_may_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("there is room");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
        assert!(matches!(
            Journal::open(folder.path()),
            Err(JournalError::Foreign(_))
        ));
    }
}
