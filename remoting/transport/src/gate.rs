//! Rings without a second CPU: the application's own CPU executes its calls.
//!
//! An exitless gate between two virtual machines (`vmfunc-gate`) lets a client's vCPU step into a server's process,
//! execute a handler there, and step back: a delegation. The rings and the data are in memory that both sides share.
//! Only the bell differs: ringing for the worker is a delegation that serves the contents of the ring, and waiting for
//! the worker is one delegation after another.
//!
//! ```text
//!   application        [ ring of calls ]        worker, which stands still otherwise
//!   push, publish ----------------------------> drain: poll, serve, push
//!   poll          <---------------------------- return
//!                      [ ring of answers ]
//! ```
//!
//! With each return the worker says that it sleeps ([`Consumer::leave`](super::ring::Consumer)), so the next published
//! message rings. The ring's capacity bounds the work of one delegation; if there is more to do, the worker says so and
//! the application delegates again.

use std::{
    fmt,
    os::fd::OwnedFd,
    ptr::NonNull,
    sync::{Arc, Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use base::Unpoisoned;
use remoting_proto::wire::{
    Api,
    hello::{Hello, Refused},
};

use super::{
    naps::nap,
    window::{Impossible, RING, SMALLEST, Window},
};

/// Index of the handler that answers the application's hello, which is in the window; it takes no arguments. Returns
/// [`EMPTY`] if the worker has put its hello in the window.
pub const HANDSHAKE: usize = 0;
/// Index of the handler that serves the contents of the ring of calls; it takes no arguments.
pub const DRAIN: usize = 1;

/// A handler's result: everything is done.
pub const EMPTY: u64 = 0;
/// A handler's result: there is more to do.
pub const MORE: u64 = 1;
/// A handler's result: the worker serves no more, and has logged why.
pub const ENDED: u64 = 2;

/// Size in bytes of each ring in shared memory of this size. Where there is room, it is the size used in other windows,
/// so that an application can move from one to the other.
#[must_use]
pub fn ring(shared: u64) -> u64 {
    if shared < SMALLEST { 64 << 10 } else { RING }
}

/// How long a waiting application delegates without a pause.
const SPIN: Duration = Duration::from_micros(200);

/// Executes handlers of one server on the calling thread's CPU.
pub trait Delegate: fmt::Debug + Send {
    /// Executes the handler with this index and two arguments, and returns its result.
    fn delegate(&self, handler: usize, first: u64, second: u64) -> Result<u64, Failed>;
    /// The memory shared by both sides, page-aligned, valid as long as this value.
    fn shared(&self) -> NonNull<[u8]>;
    /// A file with this memory, and the memory's offset in it. The caller creates a further mapping of it, at whose
    /// addresses other memory can be put. None if there is no such file.
    fn memory(&self) -> Option<(OwnedFd, u64)> {
        None
    }
}

/// Why a handler was not executed, or not completed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    /// Another thread is in the server, or the server itself is running.
    #[error("the server is busy")]
    Busy,
    /// The server has ended for good.
    #[error("{0}")]
    Ended(String),
}

/// Why no worker serves behind a gate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The first handler failed.
    #[error("the gate's server did not answer: {0}")]
    Failed(#[from] Failed),
    /// The worker ended instead of answering.
    #[error("the gate's server refused this application: its log says why")]
    Ended,
    /// The worker and this side speak different versions or APIs.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The shared memory is too small.
    #[error("the gate shares too little memory (see shared= of the client's --accel)")]
    Impossible(#[from] Impossible),
}

/// An application's connection through a gate. One thread at a time uses it.
pub struct Gate {
    way: Mutex<Box<dyn Delegate>>,
    /// Why the worker can no longer be reached.
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
    /// Performs the handshake with the worker behind a gate. Returns the window in the memory that is shared with it.
    /// `patience` is the maximum time of a single wait.
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
            // SAFETY: the trait's promise. The window lives as long as its users, which hold the gate.
            None => unsafe { Window::over(shared.as_ptr().cast(), size, ring(size), false) }?,
        };
        let gate = Arc::new(Self {
            way: Mutex::new(way),
            ended: OnceLock::new(),
            patience,
        });
        window.write_client_hello(&Hello::client::<A>().to_bytes());
        match gate.delegate(HANDSHAKE)? {
            // A worker of another version has left its hello too.
            EMPTY => Hello::check_for::<A>(&window.answer())?,
            _ => return Err(Error::Ended),
        };
        Ok((gate, window))
    }

    /// See [`Delegate::memory`].
    pub fn memory(&self) -> Option<(OwnedFd, u64)> {
        self.way.lock_unpoisoned().memory()
    }

    /// Performs one delegation; waits while the server is busy.
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

    /// Has the worker serve the whole contents of the ring of calls.
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
        // A second caller has the same reason.
        let _ = self.ended.set(why);
    }

    /// Why the worker can no longer be reached, if it has ended.
    pub fn ended(&self) -> Option<&str> {
        self.ended.get().map(String::as_str)
    }

    /// Delegates until `done`, at most for the gate's patience: without pauses at first, then with naps in between.
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
