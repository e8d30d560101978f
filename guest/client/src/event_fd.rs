//! Waking a thread that waits for a connection's end.

use std::{
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

/// An event that a thread can wait for beside a connection.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// An event that is not signalled.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Wakes who waits.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight bytes from a local.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Waits for a signal or for the end of a connection, if there is one, for at most `patience`,
    /// or for ever. Whether the connection has ended; nobody is expected to send anything over it.
    pub fn wait_beside(
        &self,
        stream: Option<&UnixStream>,
        patience: Option<Duration>,
    ) -> io::Result<bool> {
        let poll = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // A negative descriptor is passed over.
        let stream = stream.map_or(-1, AsRawFd::as_raw_fd);
        let mut polled = [poll(stream), poll(self.0.as_raw_fd())];
        let patience = patience.map(|patience| libc::timespec {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(patience.subsec_nanos()),
        });
        let timeout = patience
            .as_ref()
            .map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the array has two entries, and the time outlives the call.
        let ready = unsafe { libc::ppoll(polled.as_mut_ptr(), 2, timeout, std::ptr::null()) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(false),
                _ => Err(error),
            };
        }
        let mut count = 0u64;
        // SAFETY: eight bytes into a local; the event does not block.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        Ok(polled[0].revents != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_and_the_end_of_the_connection_are_told_apart() {
        let (here, there) = UnixStream::pair().unwrap();
        let event = EventFd::new().unwrap();
        event.signal();
        assert!(!event.wait_beside(Some(&here), None).unwrap());
        assert!(
            !event
                .wait_beside(Some(&here), Some(Duration::ZERO))
                .unwrap()
        );
        event.signal();
        assert!(!event.wait_beside(None, None).unwrap());
        drop(there);
        assert!(event.wait_beside(Some(&here), None).unwrap());
    }
}
