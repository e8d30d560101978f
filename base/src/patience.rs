//! Waiting for others until a deadline, across any number of waits, or until the wait is cancelled.

use std::{
    io::{self, Read},
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::poll::poll;

/// Polling interval for cancellation.
const LOOK: Duration = Duration::from_millis(50);

/// Cancels work of another thread. All clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Requests cancellation.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A deadline that can be cancelled.
#[derive(Clone, Debug)]
pub struct Patience {
    until: Instant,
    cancel: Cancel,
}

impl Patience {
    /// Ends after this time, or when `cancel` is used.
    pub fn new(time: Duration, cancel: Cancel) -> Self {
        let now = Instant::now();
        Self {
            // A time beyond the range of the clock ends at once; no real caller asks for it.
            until: now.checked_add(time).unwrap_or(now),
            cancel,
        }
    }

    /// Ends after this time; cannot be cancelled.
    pub fn within(time: Duration) -> Self {
        Self::new(time, Cancel::default())
    }

    /// Returns the same with a deadline of at most this time from now.
    #[must_use]
    pub fn at_most(&self, time: Duration) -> Self {
        let other = Self::new(time, self.cancel.clone());
        Self {
            until: self.until.min(other.until),
            ..other
        }
    }

    /// The time until the deadline; zero after it.
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// What cancels it.
    pub fn cancellation(&self) -> &Cancel {
        &self.cancel
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Checks the deadline and cancellation, for work that does not wait.
    ///
    /// # Errors
    /// As for [`Patience::readable`].
    pub fn check(&self) -> io::Result<()> {
        if self.is_cancelled() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        match Instant::now() < self.until {
            true => Ok(()),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Waits until a descriptor is readable or its peer has closed.
    ///
    /// # Errors
    /// The deadline has passed (`TimedOut`), it was cancelled (`ConnectionAborted`), or the system
    /// call fails.
    pub fn readable(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            if self.is_cancelled() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            let left = self.left();
            let mut entries = [libc::pollfd {
                fd: fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            }];
            if poll(&mut entries, Some(left.min(LOOK)))? > 0 {
                return Ok(());
            }
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

/// Reads from a stream, blocking or non-blocking, until the deadline.
#[derive(Debug)]
pub struct Patient<'a>(pub &'a UnixStream, pub &'a Patience);

impl Read for Patient<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        use std::os::fd::AsFd;
        let Self(mut stream, patience) = *self;
        loop {
            patience.readable(stream.as_fd())?;
            match stream.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, thread};

    use super::*;

    #[test]
    fn bytes_one_by_one_do_not_make_it_longer() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let writer = thread::spawn(move || while there.write_all(&[0]).is_ok() {});
        let patience = Patience::within(Duration::from_millis(50));
        let mut read = Patient(&here, &patience);
        let error = loop {
            if let Err(error) = read.read(&mut [0]) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(here);
        writer.join().unwrap();
    }

    #[test]
    fn a_wait_ends_when_somebody_gives_it_up() {
        let (here, _there) = UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        let cancel = Cancel::default();
        let patience = Patience::new(Duration::from_secs(3600), cancel.clone());
        let patience = patience.at_most(Duration::from_secs(1800));
        let waits = thread::spawn(move || Patient(&here, &patience).read(&mut [0]));
        cancel.cancel();
        let error = waits.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }
}
