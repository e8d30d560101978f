//! The rings without a second CPU: the application's own one carries its calls out.
//!
//! An exitless gate between two virtual machines (`vmfunc-gate`) lets a client's vCPU step into a
//! server's process, execute a handler there, and step back: a delegation. The rings and the data
//! are in memory that both share. What is different is the bell: ringing for the worker is a
//! delegation that serves what the ring holds, and waiting for it is one after the other.
//!
//! ```text
//!   application        [ ring of calls ]        worker, which stands still otherwise
//!   push, publish ----------------------------> drain: poll, serve, push
//!   poll          <---------------------------- return
//!                      [ ring of answers ]
//! ```
//!
//! The worker says with each return that it sleeps ([`Consumer::leave`](super::ring::Consumer)),
//! so that the next published message rings. A delegation's work is bounded by what the ring has
//! room for; if there is more, the worker says so and the application delegates again.

use std::{
    fmt,
    os::fd::OwnedFd,
    ptr::NonNull,
    sync::{Arc, Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use base::Unpoisoned;

use super::{
    port_bell::nap,
    window::{Impossible, RING, SMALLEST, Window},
};
use crate::wire::{
    Api,
    hello::{Hello, Refused},
};

/// Index of the handler that answers the application's hello, which is in the window; no
/// arguments. Returns [`EMPTY`] if the worker's hello is there, too.
pub const HANDSHAKE: usize = 0;
/// Index of the handler that serves what the ring of calls holds; no arguments.
pub const DRAIN: usize = 1;

/// A handler's result: it has done all.
pub const EMPTY: u64 = 0;
/// A handler's result: there is more to do.
pub const MORE: u64 = 1;
/// A handler's result: the worker serves no more, and has said why in its log.
pub const ENDED: u64 = 2;

/// Bytes of each ring in so much shared memory: as in other windows where there is room, so that an
/// application can go from one to the other.
#[must_use]
pub fn ring(shared: u64) -> u64 {
    if shared < SMALLEST { 64 << 10 } else { RING }
}

/// How long an application that waits delegates without a pause.
const SPIN: Duration = Duration::from_micros(200);

/// Executes handlers of one server on the calling thread's CPU.
pub trait Delegate: fmt::Debug + Send {
    /// Executes the handler of this index with two arguments; its result.
    fn delegate(&self, handler: usize, first: u64, second: u64) -> Result<u64, Failed>;
    /// The memory that both sides see, page-aligned, for as long as this value.
    fn shared(&self) -> NonNull<[u8]>;
    /// A file that has this memory, and where in it it begins: for a further mapping, at whose
    /// addresses other memory can be put. None if there is none.
    fn memory(&self) -> Option<(OwnedFd, u64)> {
        None
    }
}

/// Why a handler was not executed, or not to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    /// Another thread is in the server, or the server is at work by itself.
    #[error("the server is busy")]
    Busy,
    /// It never will be.
    #[error("{0}")]
    Ended(String),
}

/// Why there is no worker behind a gate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The first handler failed.
    #[error("the gate's server did not answer: {0}")]
    Failed(#[from] Failed),
    /// The worker ended instead of answering.
    #[error("the gate's server refused this application: its log says why")]
    Ended,
    /// Its versions differ.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The shared memory is too small.
    #[error("the gate shares too little memory (see shared= of the client's --accel)")]
    Impossible(#[from] Impossible),
}

/// An application's way through a gate. One thread at a time takes it.
pub struct Gate {
    way: Mutex<Box<dyn Delegate>>,
    /// Why nobody is at the other end any more.
    ended: OnceLock<String>,
    patience: Duration,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.ended.get();
        f.debug_struct("Gate").field("ended", &ended).finish()
    }
}

impl Gate {
    /// Performs the handshake with the worker behind a gate; returns the window in the memory that is
    /// shared with it.
    /// `patience` is the longest that somebody waits at a time.
    pub fn open<A: Api>(
        way: Box<dyn Delegate>,
        patience: Duration,
    ) -> Result<(Arc<Self>, Arc<Window>), Error> {
        let shared = way.shared();
        let size = shared.len() as u64;
        let own = way.memory();
        let own =
            own.and_then(|(file, at)| Window::map_at_offset(&file, at, size, ring(size)).ok());
        let window = match own {
            Some(window) => window,
            // SAFETY: the trait's promise. The window lives as long as its users, who have the gate.
            None => unsafe { Window::over(shared.as_ptr().cast(), size, ring(size), false) }?,
        };
        let gate = Arc::new(Self {
            way: Mutex::new(way),
            ended: OnceLock::new(),
            patience,
        });
        window.write_client_hello(&Hello::client::<A>().to_bytes());
        match gate.delegate(HANDSHAKE)? {
            // Also a worker of another version has left its hello.
            EMPTY => Hello::check_for::<A>(&window.answer())?,
            _ => return Err(Error::Ended),
        };
        Ok((gate, window))
    }

    /// See [`Delegate::memory`].
    pub fn memory(&self) -> Option<(OwnedFd, u64)> {
        self.way.lock_unpoisoned().memory()
    }

    /// One delegation; waits while the server is busy.
    fn delegate(&self, handler: usize) -> Result<u64, Failed> {
        let since = Instant::now();
        loop {
            let way = self.way.lock_unpoisoned();
            let result = way.delegate(handler, 0, 0);
            drop(way);
            if result != Err(Failed::Busy) {
                return result;
            }
            thread::sleep(nap(since.elapsed()));
        }
    }

    /// Has the worker serve all that the ring of calls holds.
    pub fn drain(&self) {
        while self.ended.get().is_none() {
            match self.delegate(DRAIN) {
                Ok(EMPTY) => return,
                Ok(MORE) => {}
                Ok(_) => self.end("the server has ended: its log says why".to_owned()),
                Err(failed) => self.end(failed.to_string()),
            }
        }
    }

    fn end(&self, why: String) {
        // Who comes second has the same to say.
        let _ = self.ended.set(why);
    }

    /// Why the worker can no longer be reached, if that is so.
    pub fn ended(&self) -> Option<&str> {
        self.ended.get().map(String::as_str)
    }

    /// Delegates until `done`, at most for the gate's patience: again and again at first, then
    /// with naps between.
    pub fn wait(&self, done: impl Fn() -> bool) {
        let since = Instant::now();
        loop {
            self.drain();
            let waited = since.elapsed();
            if done() || self.ended.get().is_some() || waited >= self.patience {
                return;
            }
            if waited > SPIN {
                thread::sleep(nap(waited));
            }
        }
    }
}
