//! The end of a program's process.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use base::socket;

use crate::{children::end_of, holders::Files};

/// `SO_PEERPIDFD` of Linux 6.5, which `libc` does not name.
const PEER_PIDFD: libc::c_int = 77;

/// The process that has made a connection.
pub struct Process {
    /// Its ID. 0: the system does not know it.
    pub number: u32,
    /// Readable when it has ended, where the system can tell.
    pub end: Option<OwnedFd>,
}

impl Process {
    /// The peer of a connection.
    pub fn of(connection: impl AsFd) -> Self {
        let number = socket::process(&connection).unwrap_or_default();
        Self {
            number: number.cast_unsigned(),
            end: of_peer(&connection).or_else(|| end_of(number)),
        }
    }

    /// Whether it has one of these files mapped. This process, which has no program's memory, has not.
    pub fn maps(number: u32, files: &Files) -> io::Result<bool> {
        match number {
            0 => Err(io::ErrorKind::NotFound.into()),
            own if own == std::process::id() => Ok(false),
            number => files.are_mapped_by(number),
        }
    }
}

fn of_peer(connection: impl AsFd) -> Option<OwnedFd> {
    let mut file: libc::c_int = -1;
    let mut size = mem::size_of_val(&file) as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes of a local; then a new descriptor without another owner.
    unsafe {
        let got = libc::getsockopt(
            connection.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            PEER_PIDFD,
            (&raw mut file).cast(),
            &raw mut size,
        );
        (got == 0 && file >= 0).then(|| OwnedFd::from_raw_fd(file))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_end_of_a_process_is_not_yet() {
        let (here, _there) = UnixStream::pair().unwrap();
        let own = Process::of(&here);
        assert_eq!(own.number, std::process::id());
        for end in [own.end, end_of(own.number.cast_signed())] {
            let end = end.unwrap();
            let mut polled = libc::pollfd {
                fd: end.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry.
            assert_eq!(unsafe { libc::poll(&raw mut polled, 1, 0) }, 0);
        }
        assert!(end_of(0).is_none());
    }
}
