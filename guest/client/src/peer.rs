//! The other end of a connection, and how the worker's end is noticed.

use std::{
    net::Shutdown,
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::Mutex,
    time::{Duration, Instant},
};

use base::{Unpoisoned, event::Event};
use remoting_proto::port;
use remoting_stream::channel::Closer;
use remoting_transport::port_bell::Doorbell;

/// The socket's peer.
pub(crate) enum Peer {
    /// A worker on this machine, which sends a byte when there is something to read.
    Worker,
    /// This guest's agent. The worker is outside the guest and cannot send anything here. The
    /// listener polls while callbacks are pending, and the event is signalled when the first one is
    /// registered.
    Agent(Event, Agent),
    /// A worker behind a gate, which runs when this process enters it. Callbacks work as for an
    /// agent.
    Gate(Event),
    /// A worker with its own window, to which a bridge copies the contents of this one. The bridge
    /// sends a byte when there is something to read.
    Stream(Closer),
    /// No worker: the window's memory is this process's own.
    Nobody,
}

/// How long a waiting call polls before it sleeps, and how long while the worker stays awake for
/// it.
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

/// The worker that serves this process and how to reach it. Dropping it leaves the worker.
pub(crate) struct Seat {
    pub(crate) bell: Doorbell,
    pub(crate) peer: Peer,
    pub(crate) spins: Spins,
    /// The connection beside the rings, if there is one.
    pub(crate) stream: Option<UnixStream>,
}

impl Seat {
    /// Whether the other end of the connection is gone. For use where no listener watches.
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
    /// Ends the worker, even if another process holds a copy of the connection.
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
    /// Whether the worker sees this process's window rather than one of its own.
    pub(crate) fn is_shared(&self) -> bool {
        !matches!(self, Self::Stream(_))
    }

    /// Whether the window is a file that a worker on this machine has mapped.
    pub(crate) fn is_file(&self) -> bool {
        matches!(self, Self::Worker)
    }

    /// The event that wakes the thread that polls for callbacks, if this peer needs polling.
    pub(crate) fn poll_event(&self) -> Option<&Event> {
        match self {
            Self::Worker | Self::Stream(_) | Self::Nobody => None,
            Self::Agent(event, _) | Self::Gate(event) => Some(event),
        }
    }
}

/// The agent, which checks on request whether the worker outside this guest is still alive.
pub(crate) struct Agent {
    stream: UnixStream,
    asked: Mutex<Instant>,
    /// The minimum interval between two requests.
    interval: Duration,
}

impl Agent {
    /// The agent at the other end of `stream`, asked at most once per `interval`.
    pub(crate) fn new(stream: UnixStream, interval: Duration) -> Self {
        Self {
            stream,
            asked: Mutex::new(Instant::now()),
            interval,
        }
    }

    /// Asks the agent to check the worker, unless it was asked recently. The agent closes the
    /// connection of an application whose worker has ended.
    pub(crate) fn check_worker(&self) {
        let mut asked = self.asked.lock_unpoisoned();
        if asked.elapsed() < self.interval {
            return;
        }
        *asked = Instant::now();
        drop(asked);
        let (word, flags) = ([port::LOOK], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // SAFETY: one byte of a local. Fails if the agent has been asked too often or is gone.
        unsafe { libc::send(self.stream.as_raw_fd(), word.as_ptr().cast(), 1, flags) };
    }
}
