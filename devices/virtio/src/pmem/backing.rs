//! The file behind a persistent memory device, mapped into the VMM.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::PathBuf,
    sync::Arc,
};

use base::{Access, Mapping};
use device_model::memory::HostMemory;
use disk::{LockGranularity, geometry, lock};

/// Alignment of sizes and guest addresses: the guest maps persistent memory in pages of 2 MiB.
pub const ALIGNMENT: u64 = 2 << 20;

/// Why a persistent memory device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened: not found, no permission ...
    #[error("cannot open the persistent memory file {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Neither a file nor a block device, but a socket, a terminal ...
    #[error("{path} cannot be persistent memory; give a file, a block device or a directory")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A directory without a size.
    #[error("{path} is a directory: state the size of the file that shall be made in it")]
    SizeMissing {
        /// The directory.
        path: PathBuf,
    },
    /// A size that the guest could not map.
    #[error(
        "the size of persistent memory must be a multiple of 2 MiB and not 0; {path} has {size} \
         bytes, `truncate --size=%2M {path}` rounds it up"
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size, or the requested size, in bytes.
        size: u64,
    },
    /// The file is smaller than the requested size.
    #[error(
        "{path} has {available} bytes, which is less than the {size} asked for; \
         `truncate --size={size} {path}` extends it"
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        available: u64,
        /// The requested size in bytes.
        size: u64,
    },
    /// Another process has locked the file.
    #[error("{path} is in use elsewhere; stop the other user, or use discard_writes=on in both")]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("cannot {action} {path}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// An open, locked and mapped file.
pub struct Backing {
    /// The device removes the guest's mapping of it first.
    memory: Mapping,
    file: Arc<File>,
    path: PathBuf,
}

impl Backing {
    /// Opens `path`, or creates an unnamed file in the directory `path`. With `discard_writes`, the
    /// guest's writes go to private memory and are lost when the device goes away.
    pub fn open(path: PathBuf, size: Option<u64>, discard_writes: bool) -> Result<Self, Error> {
        let host = |action| {
            let path = path.clone();
            move |source| Error::Host {
                action,
                path,
                source,
            }
        };
        let is_directory = path.is_dir();
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        if is_directory {
            options.write(true).custom_flags(libc::O_TMPFILE);
        } else {
            options.write(!discard_writes);
        }
        let mut file = options.open(&path).map_err(|source| Error::Open {
            path: path.clone(),
            source,
        })?;
        let file_type = file.metadata().map_err(host("examine"))?.file_type();
        if !file_type.is_file() && !file_type.is_block_device() {
            return Err(Error::NotAFile { path });
        }
        if is_directory {
            let size = size.ok_or(Error::SizeMissing { path: path.clone() })?;
            file.set_len(size).map_err(host("extend a file in"))?;
        }
        let available = geometry::size(&mut file).map_err(host("measure"))?;
        let size = size.unwrap_or(available);
        if size == 0 || !size.is_multiple_of(ALIGNMENT) {
            return Err(Error::Size { path, size });
        }
        if size > available {
            return Err(Error::TooSmall {
                path,
                available,
                size,
            });
        }
        lock::lock(&file, available, discard_writes, LockGranularity::ByteRange).map_err(
            |source| match source.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => Error::Locked { path: path.clone() },
                _ => host("lock")(source),
            },
        )?;
        let len = usize::try_from(size).map_err(|_| Error::Size {
            path: path.clone(),
            size,
        })?;
        let map = if discard_writes {
            Mapping::private
        } else {
            Mapping::shared
        };
        let memory = map(&file, 0, len, Access::ReadWrite).map_err(host("map"))?;
        Ok(Self {
            memory,
            file: Arc::new(file),
            path,
        })
    }

    /// Size in bytes, a multiple of [`ALIGNMENT`].
    pub fn size(&self) -> u64 {
        self.memory.len() as u64
    }

    /// The mapping; valid as long as `self`.
    pub fn memory(&self) -> HostMemory {
        HostMemory {
            address: self.memory.start(),
            len: self.size(),
            read_only: false,
        }
    }

    /// The file, for flushing.
    pub fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// The path that was opened, for messages.
    pub fn path(&self) -> &PathBuf {
        &self.path
    }
}
