//! An event that wakes a thread which also waits for other descriptors (`eventfd(2)`).

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// An event, which is readable from when it is signalled until it is taken. Never blocks.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// Creates an event that is not signalled.
    ///
    /// # Errors
    /// There are no descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a call without pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Signals it.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight bytes of a local.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes the signals until now. Returns whether there were any.
    pub fn take(&self) -> bool {
        let mut count = 0u64;
        // SAFETY: eight bytes of a local.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) > 0 }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Event> for OwnedFd {
    fn from(event: Event) -> Self {
        event.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_taken_once() {
        let event = Event::new().unwrap();
        assert!(!event.take());
        event.signal();
        event.signal();
        assert!(event.take());
        assert!(!event.take());
    }
}
