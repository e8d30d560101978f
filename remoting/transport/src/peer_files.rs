//! Which files of a port, as a machine sends them, may be used and kept: shared memory, and event counters.
//!
//! Whatever is done with a file of another file system may wait for ever for the process that serves it: `fstat`, a read, an
//! access to a mapping, and also the close, by which any program that is executed gives up what it was forked with. So files
//! are checked before their first use, without a call to their file system.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use base::memfd;

/// What the kernel calls an event counter.
const EVENT: &str = "anon_inode:[eventfd]";

/// A file that is neither shared memory nor an event counter.
#[derive(Debug, thiserror::Error)]
#[error("file {0} of {1} is neither shared memory (tmpfs, hugetlbfs) nor an eventfd")]
pub struct WrongFile(usize, usize);

/// Checks files that others have sent.
///
/// # Errors
/// The first that must not be kept.
pub fn check(files: &[OwnedFd]) -> Result<(), WrongFile> {
    let wrong = files
        .iter()
        .position(|file| !memfd::is_shared_memory(file) && !is_event(file));
    wrong.map_or(Ok(()), |place| Err(WrongFile(place + 1, files.len())))
}

fn is_event(file: &impl AsFd) -> bool {
    let name = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    // Names of files in a file system begin with a slash.
    let target: io::Result<_> = fs::read_link(name);
    target.is_ok_and(|target| target.as_os_str() == EVENT)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{fs::File, net::TcpListener, os::fd::FromRawFd, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn only_shared_memory_and_event_counters_are_kept() {
        let memory = base::memfd::create(c"kept").unwrap();
        // SAFETY: a fresh descriptor that nobody else owns.
        let event = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) };
        let both = [memory.into(), event];
        check(&both).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let odd = folder.path().join("anon_inode:[eventfd]");
        let others: [OwnedFd; 6] = [
            File::open("/proc/version").unwrap().into(),
            File::open("/dev/null").unwrap().into(),
            std::env::current_exe().and_then(File::open).unwrap().into(),
            UnixStream::pair().unwrap().0.into(),
            TcpListener::bind("127.0.0.1:0").unwrap().into(),
            io::pipe().unwrap().0.into(),
        ];
        for other in others {
            assert!(check(&[other]).is_err());
        }
        File::create(&odd).unwrap();
        assert!(!is_event(&File::open(&odd).unwrap()));
    }
}
