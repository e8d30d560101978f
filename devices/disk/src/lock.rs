//! Advisory locks that prevent two VMMs from using one image.
//!
//! They are open-file-description locks: the kernel releases them with the descriptor, however the
//! process ends, and they also work between two disks of one process.

use std::{
    fs::File,
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::Path,
    sync::OnceLock,
};

use serde::{Deserialize, Serialize};

use super::error::DiskError;

/// The range of the image that a lock covers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum LockGranularity {
    /// The bytes that the image currently has. The default of Cloud Hypervisor and Gantry: some
    /// network storage grants it but refuses a whole-file lock.
    #[default]
    ByteRange,
    /// The whole file, including later growth.
    Full,
}

/// Where a lock is visible.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Scope {
    /// To processes of this kernel: the lock of a block device, or of a file on a file system that
    /// keeps locks local, even if other hosts write to the same storage.
    Host,
    /// To every host that accesses the file, because its file system shares the locks.
    Hosts,
}

/// The lock of an image, held until it is closed or unlocked.
pub(super) struct Lock {
    /// Also used for reads that must go through the page cache.
    pub file: File,
    /// Device and inode of the file.
    pub inode: (u64, u64),
    /// Number of bytes that it covers, unless it covers the whole file.
    pub size: u64,
    /// It is shared with others that only read.
    pub read_only: bool,
    /// The range that it covers.
    pub granularity: LockGranularity,
    /// Where it is visible.
    pub scope: Scope,
}

impl Lock {
    /// Whether it is of the same file as another one.
    pub(super) fn is_of(&self, other: &Self) -> bool {
        self.inode == other.inode
    }

    pub(super) fn take(&self, path: &Path) -> Result<(), DiskError> {
        lock(&self.file, self.size, self.read_only, self.granularity).map_err(|source| {
            let path = path.to_owned();
            match source.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => DiskError::Locked {
                    path,
                    read_only: self.read_only,
                },
                _ => DiskError::Lock { path, source },
            }
        })
    }

    pub(super) fn release(&self) -> io::Result<()> {
        unlock(&self.file, self.size, self.granularity)
    }
}

/// What is mounted, opened before Landlock may hide it.
static MOUNTS: OnceLock<File> = OnceLock::new();

const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Opens the list of what is mounted, for the time when this process may not open it any more.
pub fn open_mounts() {
    if MOUNTS.get().is_none()
        && let Ok(file) = File::open(MOUNTINFO)
    {
        // Another thread may have opened it.
        let _ = MOUNTS.set(file);
    }
}

/// Whether that list can be read, whatever this process may open.
pub fn knows_mounts() -> bool {
    MOUNTS.get().is_some()
}

/// What is mounted now.
fn mounts() -> io::Result<String> {
    let Some(file) = MOUNTS.get() else {
        return base::proc::read(MOUNTINFO);
    };
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    loop {
        match file.read_at(&mut part, text.len() as u64)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            count => text.extend_from_slice(&part[..count]),
        }
    }
}

impl Scope {
    /// The scope of locks on a file.
    pub fn of(file: &File) -> Self {
        let device = match file.metadata() {
            Ok(metadata) if metadata.is_file() => metadata.dev(),
            _ => return Self::Host,
        };
        let mounts = mounts().unwrap_or_default();
        let (major, minor) = (libc::major(device), libc::minor(device));
        match mounts.lines().any(|line| shares(line, major, minor)) {
            true => Self::Hosts,
            false => Self::Host,
        }
    }
}

/// Whether a line of `mountinfo` (proc(5)) describes that device, and its file system shares locks
/// between hosts. Unknown file systems do not count: with FUSE and 9p it depends on a daemon's
/// options.
fn shares(line: &str, major: u32, minor: u32) -> bool {
    let Some((mount, superblock)) = line.split_once(" - ") else {
        return false;
    };
    let mut superblock = superblock.split(' ');
    let kind = superblock.next().unwrap_or_default();
    let mut options = superblock.nth(1).unwrap_or_default().split(',');
    mount.split(' ').nth(2) == Some(&format!("{major}:{minor}"))
        && match kind {
            "nfs" | "nfs4" => {
                !options.any(|one| ["nolock", "local_lock=all", "local_lock=posix"].contains(&one))
            }
            "gfs2" => !options.any(|one| ["localflocks", "lockproto=lock_nolock"].contains(&one)),
            "ceph" => true,
            _ => false,
        }
}

/// Takes an exclusive lock, or a shared one if `read_only`; does not block.
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

/// Releases a lock taken by [`lock`] with the same arguments.
pub fn unlock(file: &File, size: u64, granularity: LockGranularity) -> io::Result<()> {
    set(file, libc::F_UNLCK, size, granularity)
}

fn set(file: &File, kind: libc::c_int, size: u64, granularity: LockGranularity) -> io::Result<()> {
    // SAFETY: flock is plain data, for which all zeroes are valid.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as i16;
    request.l_whence = libc::SEEK_SET as i16;
    // A length of zero covers everything up to the end, wherever that is.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_heard_of_by_other_hosts_only_where_the_file_system_asks_them() {
        let line = |kind: &str, options: &str| {
            format!(
                "61 25 0:52 / /srv/images rw,relatime shared:31 - {kind} a:/images rw,{options}"
            )
        };
        for (kind, options, expected) in [
            ("nfs4", "vers=4.2,local_lock=none,addr=10.0.0.1", true),
            ("nfs", "vers=3,local_lock=none", true),
            ("nfs", "vers=3,nolock,local_lock=all", false),
            ("nfs", "vers=3,local_lock=posix", false),
            ("nfs", "vers=3,local_lock=flock", true),
            ("ceph", "acl", true),
            ("gfs2", "relatime", true),
            ("gfs2", "localflocks", false),
            ("xfs", "attr2", false),
            ("fuse.sshfs", "user_id=0", false),
        ] {
            let line = line(kind, options);
            assert_eq!(shares(&line, 0, 52), expected, "{line}");
            assert!(!shares(&line, 0, 53) && !shares(&line, 52, 0), "{line}");
        }
        assert!(!shares("61 25 0:52 / /srv", 0, 52) && !shares("", 0, 0));
    }

    #[test]
    fn what_is_mounted_is_read_from_the_file_that_was_opened_before() {
        open_mounts();
        assert!(knows_mounts());
        for _ in 0..2 {
            assert_eq!(
                mounts().unwrap(),
                std::fs::read_to_string(MOUNTINFO).unwrap()
            );
        }
    }

    #[test]
    fn files_of_this_host_and_devices_have_locks_that_no_other_host_hears_of() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Scope::of(&file), Scope::Host);
        let device = File::open("/dev/null").unwrap();
        assert_eq!(Scope::of(&device), Scope::Host);
    }
}
