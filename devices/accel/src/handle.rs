//! A port as those see it who save and move its applications.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use base::{Patience, Unpoisoned};
use device_model::thread::ThreadSpawner;
use remoting_proto::port::State;
use remoting_relocation::archive::Piece;
use remoting_transport::control::{self, Command, Failure, SOON, Worker};

use super::{
    attach::{Attach, Pool},
    lend::{Borrowed, Desk},
    saved_slice::SavedSlice,
    slices::{Followed, Slices},
    wish::Mailbox,
};

/// Interval of the attempts to reach a worker.
pub(super) const AGAIN: Duration = Duration::from_millis(10);

/// Maximum time to wait while the backlog of a pool's socket is full.
const FULL: Duration = Duration::from_secs(5);

/// A handle on a port to move its applications.
#[derive(Clone)]
pub struct Handle {
    pub(super) attach: Arc<Attach>,
    pub(super) slices: Arc<Slices>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) desk: Arc<Desk>,
    pub(super) spawner: Arc<dyn ThreadSpawner>,
    pub(super) thread_name: String,
    /// The saved applications, while a snapshot is being written.
    pub(super) saved: Arc<Mutex<Option<Vec<SavedSlice>>>>,
    /// The applications of a snapshot that is being restored, until the guest runs.
    pub(super) coming: Arc<Mutex<Coming>>,
}

/// Saved applications that are being restored.
#[derive(Debug, Default)]
pub(super) struct Coming {
    /// Saved state that no worker has received yet, by slice.
    pub images: Vec<(usize, File)>,
    /// Workers that have received their state, and do not serve yet.
    pub workers: Vec<Waiting>,
    /// Workers that have received a part of it, by slice.
    pub standby: BTreeMap<usize, Standby>,
    /// Workers with a part that is no longer needed, by slice; they must end.
    pub unwanted: BTreeMap<usize, Standby>,
}

/// A worker that has received a part of an application.
#[derive(Debug)]
pub(super) struct Standby {
    pub stream: UnixStream,
    /// Number of rounds that it has received.
    pub rounds: u32,
}

impl Handle {
    /// The pool that provides the workers of new applications.
    pub fn pool(&self) -> Pool {
        self.attach.pool()
    }

    pub(super) fn saved(&self) -> MutexGuard<'_, Option<Vec<SavedSlice>>> {
        self.saved.lock_unpoisoned()
    }

    /// Whether the port is for native contexts.
    pub fn is_native(&self) -> bool {
        self.attach.is_native()
    }

    /// Whether programs use native contexts through the port.
    pub fn has_native_programs(&self) -> bool {
        self.is_native() && self.slices.in_use() > 0
    }

    /// Borrows the workers of all applications that move by them, as those of native contexts do not.
    pub(super) fn lend_all(&self) -> Vec<Borrowed> {
        match self.is_native() {
            true => Vec::new(),
            false => self.desk.lend(None).unwrap_or_default(),
        }
    }

    /// Connects another worker to a slice. The worker waits for the state of its application.
    pub(super) fn connect(
        &self,
        slice: usize,
        to: &Pool,
        patience: &Patience,
    ) -> Result<UnixStream, Failure> {
        let patience = patience.at_most(FULL);
        loop {
            match self.attach.take_up(slice, to) {
                Err(_) if patience.is_cancelled() => return Err(Failure::Cancelled),
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && patience.check().is_ok() =>
                {
                    std::thread::sleep(AGAIN);
                }
                other => {
                    return other.map_err(|source| Failure::Gone {
                        who: Worker::Destination,
                        source,
                    });
                }
            }
        }
    }

    /// Whether workers have yet to take over applications of a snapshot, or workers that are no
    /// longer needed have yet to end.
    pub fn has_images(&self) -> bool {
        let coming = self.coming();
        !coming.images.is_empty() || !coming.unwanted.is_empty()
    }

    pub(super) fn coming(&self) -> MutexGuard<'_, Coming> {
        self.coming.lock_unpoisoned()
    }

    /// Counter of the buffers and images whose contents have followed their application.
    pub fn followed(&self) -> Followed {
        Arc::clone(&self.slices.followed)
    }

    /// Ends a worker that takes over no application, and waits until its pool has seen that: then
    /// its device memory is free.
    pub(super) fn end(
        &self,
        slice: usize,
        stream: &UnixStream,
        patience: &Patience,
    ) -> Result<(), Failure> {
        control::end(stream, Worker::Destination, &patience.at_most(SOON))?;
        self.attach.account.0.clear(slice as u32);
        Ok(())
    }

    /// Describes a slice in a state, with its contents.
    pub(super) fn described(&self, slice: usize, state: State, window: Piece) -> SavedSlice {
        SavedSlice {
            slice: slice as u32,
            state: state as u32,
            claim: self.attach.slices.claim(slice),
            window,
            kept: Vec::new(),
            image: None,
            rounds: 0,
        }
    }

    /// The file with a slice's contents.
    pub(super) fn window(&self, slice: usize) -> io::Result<File> {
        let file = self
            .attach
            .window
            .with_file(slice, |file| file.try_clone_to_owned());
        Ok(File::from(file.ok_or(io::ErrorKind::NotFound)??))
    }
}

/// A worker that has received the state of a slice's application, and does not serve it yet.
#[derive(Debug)]
pub struct Waiting {
    pub(super) slice: usize,
    pub(super) stream: UnixStream,
    /// Socket on which it will request the contents that follow.
    pub(super) asks: Option<UnixStream>,
}

impl Waiting {
    /// The slice of its application.
    pub fn slice(&self) -> usize {
        self.slice
    }

    /// Starts to serve.
    ///
    /// # Errors
    /// It has ended.
    pub fn go(self, port: &Handle) -> io::Result<()> {
        let files: Vec<_> = self.asks.iter().map(AsFd::as_fd).collect();
        control::send(&self.stream, &Command::Go(), &files)?;
        port.desk.serve(self.slice, self.stream);
        Ok(())
    }
}

/// Why a port's applications cannot be saved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One or more applications cannot be saved; the reasons.
    #[error("{}", .0.join("; "))]
    Stays(Vec<String>),
    /// The operation was cancelled.
    #[error("it was cancelled")]
    Cancelled,
    /// The archive cannot be written.
    #[error("cannot write the applications' state")]
    Archive(#[from] io::Error),
}

pub(super) fn named(port: &str, slice: u32) -> String {
    format!("{port}: the application of slice {slice}")
}

/// Why native contexts are neither saved nor moved as they are.
pub(super) const NATIVE: &str = "programs of the guest use native contexts, and have to be suspended first, while the \
     guest runs: save the VM without pausing it (accel=save), or suspend them (vm.move-accel, seat=Parked), take the \
     accelerator from them (detach), or end them";
