//! What is at the other end of a connection, and how the end of the worker is noticed.

use std::{
    net::Shutdown,
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::Mutex,
    time::{Duration, Instant},
};

use base::Unpoisoned;
use gantry_remoting::{
    link::{port_bell::Doorbell, stream::channel::Closer},
    port,
};

use crate::event_fd::EventFd;

/// What the socket's other end is.
pub(crate) enum Peer {
    /// A worker of this machine, which sends a byte when there is something to read.
    Worker,
    /// The agent of this guest. The worker is outside and cannot send anything here; the listener
    /// polls while callbacks are pending, and the event is signalled when there is a first one.
    Agent(EventFd, Agent),
    /// A worker behind a gate, which runs when this process enters it. Callbacks as above.
    Gate(EventFd),
    /// A worker with a window of its own, to which a bridge copies this one's contents. The bridge
    /// sends the bytes that say that there is something to read.
    Stream(Closer),
    /// No worker: the window's memory is this process's own.
    Nobody,
}

/// How long a waiting call polls before it sleeps, and how long while the worker stays awake for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spins {
    pub(crate) spin: Duration,
    pub(crate) attended: Duration,
}

impl Spins {
    /// How long a waiting call polls.
    pub(crate) fn nanoseconds(self) -> u64 {
        u64::try_from(self.spin.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Who serves this process, and how to reach it: until it is dropped.
pub(crate) struct Seat {
    pub(crate) bell: Doorbell,
    pub(crate) peer: Peer,
    pub(crate) spins: Spins,
    /// The connection beside the rings, if there is one.
    pub(crate) stream: Option<UnixStream>,
}

impl Seat {
    /// Whether the connection's other end has gone. For who does not listen.
    pub(crate) fn has_ended(&self) -> bool {
        let Some(stream) = &self.stream else {
            return false;
        };
        let mut polled = libc::pollfd {
            fd: stream.as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one entry that outlives the call, which does not wait.
        unsafe { libc::poll(&raw mut polled, 1, 0) > 0 }
    }
}

impl Drop for Seat {
    /// Has the worker end, whoever else has a copy of the connection.
    fn drop(&mut self) {
        if let Some(stream) = &self.stream {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Peer::Stream(closer) = &self.peer {
            closer.close();
        }
    }
}

impl Peer {
    /// Whether the worker sees this process's window, and not one of its own.
    pub(crate) fn is_shared(&self) -> bool {
        !matches!(self, Self::Stream(_))
    }

    /// Whether the window is a file that a worker of this machine has mapped.
    pub(crate) fn is_file(&self) -> bool {
        matches!(self, Self::Worker)
    }

    /// The event that wakes the thread that polls for callbacks, if one polls.
    pub(crate) fn poll_event(&self) -> Option<&EventFd> {
        match self {
            Self::Worker | Self::Stream(_) | Self::Nobody => None,
            Self::Agent(event, _) | Self::Gate(event) => Some(event),
        }
    }
}

/// The agent, which finds out on request whether the worker outside of this guest still lives.
pub(crate) struct Agent {
    stream: UnixStream,
    asked: Mutex<Instant>,
    /// The least time between two requests.
    interval: Duration,
}

impl Agent {
    /// At the other end of `stream`, asked at most once in `interval`.
    pub(crate) fn new(stream: UnixStream, interval: Duration) -> Self {
        Self {
            stream,
            asked: Mutex::new(Instant::now()),
            interval,
        }
    }

    /// Has the agent check, if it has not been asked for a while: it closes the connection of an
    /// application whose worker has ended.
    pub(crate) fn check_worker(&self) {
        let mut asked = self.asked.lock_unpoisoned();
        if asked.elapsed() < self.interval {
            return;
        }
        *asked = Instant::now();
        drop(asked);
        let (word, flags) = ([port::LOOK], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // SAFETY: a byte of a local. Fails if it has been asked often, or is gone.
        unsafe { libc::send(self.stream.as_raw_fd(), word.as_ptr().cast(), 1, flags) };
    }
}
