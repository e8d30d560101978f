//! Files that somebody else may have prepared: opening and reading them neither blocks nor goes on
//! without end.
//!
//! Opening a FIFO waits for a writer, a device may do anything when it is opened, and some devices
//! can be read for ever although their length is 0. Only regular files are opened here.

use std::{
    fs::{self, File, FileType, OpenOptions},
    io::{self, Read},
    mem,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::Path,
};

/// Whether the name may be a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// The link's target is opened.
    Follow,
    /// A link is refused: the directory comes from somebody who could name any file by it.
    Refuse,
}

/// Opens a regular file for reading.
///
/// # Errors
/// Those of open(2), or it is not a regular file.
pub fn open(path: &Path, links: Links) -> io::Result<File> {
    open_as(path, links, OpenOptions::new().read(true))
}

/// The type of an open file (a part of `S_IFMT`), and the major number of its device if it is a device file.
///
/// Asks no file system: one that another process serves might not answer.
///
/// # Errors
/// Those of statx(2).
pub fn type_of(file: impl AsFd) -> io::Result<(libc::mode_t, u32)> {
    // SAFETY: an all-zero structure is valid.
    let mut found: libc::statx = unsafe { mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: an empty string, and a local to which the kernel writes one structure.
    match unsafe { libc::statx(fd, c"".as_ptr(), flags, libc::STATX_TYPE, &raw mut found) } {
        0 => Ok((
            libc::mode_t::from(found.stx_mode) & libc::S_IFMT,
            found.stx_rdev_major,
        )),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Creates a regular file or empties an existing one.
///
/// # Errors
/// Those of open(2), or there is something else by this name.
pub fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = open_as(path, Links::Follow, options.write(true).create(true))?;
    file.set_len(0)?;
    Ok(file)
}

/// Reads a whole regular file.
///
/// # Errors
/// Those of [`open`] and read(2), or it has more than `limit` bytes ([`io::ErrorKind::FileTooLarge`]).
pub fn read(path: &Path, links: Links, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path, links)?;
    let too_large = |len: u64| {
        let message = format!("it has {len} bytes, at most {limit} are read");
        io::Error::new(io::ErrorKind::FileTooLarge, message)
    };
    let len = file.metadata()?.len();
    if len > limit {
        return Err(too_large(len));
    }
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    let len = bytes.len() as u64;
    if len > limit {
        return Err(too_large(len));
    }
    Ok(bytes)
}

fn open_as(path: &Path, links: Links, options: &mut OpenOptions) -> io::Result<File> {
    let (found, no_link) = match links {
        Links::Follow => (fs::metadata(path), 0),
        Links::Refuse => (fs::symlink_metadata(path), libc::O_NOFOLLOW),
    };
    // Opening a device can have effects, so look first.
    match found {
        Ok(found) => check(found.file_type())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    // For what has taken its place since then.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | no_link;
    let file = options.custom_flags(flags).open(path)?;
    check(file.metadata()?.file_type())?;
    // Asynchronous I/O would obey O_NONBLOCK.
    // SAFETY: calls without pointers on an open descriptor.
    let cleared = unsafe {
        match libc::fcntl(file.as_raw_fd(), libc::F_GETFL) {
            -1 => -1,
            flags => libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK),
        }
    };
    if cleared < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

fn check(kind: FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    let kind = if kind.is_dir() {
        "a directory"
    } else if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    let message = format!("it is {kind}, not a regular file");
    Err(io::Error::new(io::ErrorKind::InvalidInput, message))
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::CString,
        os::unix::{ffi::OsStrExt, fs::symlink},
    };

    use super::*;

    fn fifo(path: &Path) {
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: a terminated string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    }

    #[test]
    fn what_is_no_regular_file_is_refused_by_its_kind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        fifo(&path);
        for (path, kind) in [
            (path.as_path(), "a FIFO"),
            (Path::new("/dev/zero"), "a device"),
            (dir.path(), "a directory"),
        ] {
            for links in [Links::Follow, Links::Refuse] {
                let error = read(path, links, 10).unwrap_err().to_string();
                assert_eq!(error, format!("it is {kind}, not a regular file"));
            }
            assert!(create(path).is_err());
        }
    }

    #[test]
    fn links_are_followed_only_if_they_may_be() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "text").unwrap();
        symlink(&file, &link).unwrap();
        assert_eq!(read(&link, Links::Follow, 4).unwrap(), b"text");
        let error = read(&link, Links::Refuse, 4).unwrap_err().to_string();
        assert!(error.contains("a symbolic link"), "{error}");
        // A device by a link is as bad as the device.
        let device = dir.path().join("device");
        symlink("/dev/zero", &device).unwrap();
        let error = read(&device, Links::Follow, 4).unwrap_err().to_string();
        assert!(error.contains("a device"), "{error}");
        assert!(!is_nonblocking(&open(&file, Links::Refuse).unwrap()));
    }

    fn is_nonblocking(file: &File) -> bool {
        // SAFETY: a call without pointers on an open descriptor.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        flags & libc::O_NONBLOCK != 0
    }

    #[test]
    fn no_more_is_read_than_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, [7; 100]).unwrap();
        assert_eq!(read(&path, Links::Refuse, 100).unwrap(), [7; 100]);
        let error = read(&path, Links::Refuse, 99).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("100 bytes"), "{error}");
        // Files of /proc have the length 0.
        let maps = Path::new("/proc/self/maps");
        let error = read(maps, Links::Refuse, 10).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let missing = read(&dir.path().join("none"), Links::Follow, 1).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn an_existing_file_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        drop(create(&path).unwrap());
        fs::write(&path, "text").unwrap();
        drop(create(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"");
    }
}
