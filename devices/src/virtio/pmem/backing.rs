//! The file under a persistent memory device, mapped into the VMM.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::PathBuf,
    ptr::NonNull,
    sync::Arc,
};

use crate::{
    disk::{LockGranularity, geometry, lock},
    memory::HostMemory,
};

/// Sizes and guest addresses are multiples of this: the guest maps persistent memory in pages of
/// 2 MiB.
pub const ALIGNMENT: u64 = 2 << 20;

/// A persistent memory device cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not found, no permission ...
    #[error("cannot open the persistent memory file {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A socket, a terminal ...
    #[error("{path} cannot be persistent memory; give a file, a block device or a directory")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A directory, but no size.
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
        /// Its size, or the size asked for, in bytes.
        size: u64,
    },
    /// The file is smaller than was asked for.
    #[error(
        "{path} has {available} bytes, which is less than the {size} asked for; \
         `truncate --size={size} {path}` extends it"
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        available: u64,
        /// The size asked for in bytes.
        size: u64,
    },
    /// Another process uses it.
    #[error("{path} is in use elsewhere; stop the other user, or use discard_writes=on in both")]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("cannot {action} {path}")]
    Host {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// An open, locked, mapped file.
pub struct Backing {
    address: NonNull<u8>,
    len: usize,
    file: Arc<File>,
    path: PathBuf,
}

// SAFETY: the mapping belongs to no thread; this process never looks into it.
unsafe impl Send for Backing {}

impl Backing {
    /// Opens `path`, or makes an unnamed file in the directory `path`. With `discard_writes`,
    /// what the guest writes stays in memory of its own and is forgotten in the end.
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
        let address = map(&file, len, discard_writes).map_err(host("map"))?;
        Ok(Self {
            address,
            len,
            file: Arc::new(file),
            path,
        })
    }

    /// Size in bytes, a multiple of [`ALIGNMENT`].
    pub fn size(&self) -> u64 {
        self.len as u64
    }

    /// The mapping; valid as long as self.
    pub fn memory(&self) -> HostMemory {
        HostMemory {
            address: self.address.as_ptr(),
            len: self.size(),
            read_only: false,
        }
    }

    /// The file, for flushing.
    pub fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// What was opened, for messages.
    pub fn path(&self) -> &PathBuf {
        &self.path
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this length. The device drops the guest's mapping first.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

fn map(file: &File, len: usize, private: bool) -> io::Result<NonNull<u8>> {
    let kind = if private {
        libc::MAP_PRIVATE
    } else {
        libc::MAP_SHARED
    };
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            kind | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}
