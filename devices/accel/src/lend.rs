//! Workers that another thread than the port's borrows: to save their application's state, or to
//! replace them.
//!
//! The borrower gives back the worker, or another one in its place, whatever happens. The slice
//! stays open meanwhile, and the guest notices only calls that take longer. A worker that was
//! stopped is given back when it has confirmed that it continues, for which nobody has to wait.

use std::{
    collections::VecDeque,
    io, mem,
    net::Shutdown,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex,
        mpsc::{self, SyncSender},
    },
    time::Duration,
};

use base::{Patience, Unpoisoned};
use device_model::thread::{ThreadRole, ThreadSpawner};
use remoting_relocation::source::SourcePort;
use remoting_transport::{
    control::{self, Command, Failure, Fetch, LONG, Peer, Reply, Worker},
    worker_control::Source,
};

use super::{closing::Closing, slices::Slices};

/// Timeout for a reply of the port's thread.
const SOON: Duration = Duration::from_secs(5);
/// A request to the port's thread.
pub enum Order {
    /// Lend the workers of all open slices, or of one, that are not borrowed.
    Lend(Option<u32>, SyncSender<Vec<Borrowed>>),
    /// Take back a slice's worker, or another one in its place.
    Back(usize, UnixStream),
    /// Give up a slice's borrowed worker: it stays when the port ends. Confirmed when done.
    Forget(usize, SyncSender<()>),
}

/// The queue of requests to the port's thread.
pub struct Desk {
    /// `None` when no thread serves it any more.
    orders: Mutex<Option<VecDeque<Order>>>,
    slices: Arc<Slices>,
    spawner: Arc<dyn ThreadSpawner>,
    thread_name: String,
    /// Closes files of workers.
    pub closing: Closing,
}

/// The connection to a borrowed worker.
pub struct Borrowed {
    /// Its slice.
    pub slice: usize,
    /// `None` if the worker was given back or replaced.
    worker: Option<Source>,
    desk: Arc<Desk>,
}

/// A worker's connection that is being returned to the port's thread.
struct Return {
    slice: usize,
    worker: Option<Source>,
    /// Whether the worker serves.
    serves: bool,
    desk: Arc<Desk>,
}

impl Drop for Return {
    fn drop(&mut self) {
        let Some(stream) = self.worker.take().map(Source::into_channel) else {
            return;
        };
        if !self.serves {
            // Otherwise it would stay stopped forever.
            let _ = stream.shutdown(Shutdown::Write);
        }
        self.desk.serve(self.slice, stream);
    }
}

impl Desk {
    /// Creates a desk on which requests wait until a thread serves it.
    pub fn new(slices: Arc<Slices>, spawner: Arc<dyn ThreadSpawner>, thread_name: &str) -> Self {
        Self {
            orders: Mutex::new(Some(VecDeque::new())),
            slices,
            closing: Closing::new(Arc::clone(&spawner), thread_name),
            spawner,
            thread_name: thread_name.to_owned(),
        }
    }

    fn leave(&self, order: Order) {
        // If no thread takes the request, its connections close, and thereby the workers end.
        if let Some(orders) = &mut *self.orders.lock_unpoisoned() {
            orders.push_back(order);
        }
        self.slices.wake();
    }

    /// Takes all requests.
    pub fn orders(&self) -> VecDeque<Order> {
        let mut orders = self.orders.lock_unpoisoned();
        orders.as_mut().map(mem::take).unwrap_or_default()
    }

    /// Requests are served from now on.
    pub fn open(&self) {
        self.orders.lock_unpoisoned().get_or_insert_default();
    }

    /// Requests are not served any more.
    pub fn close(&self) {
        *self.orders.lock_unpoisoned() = None;
    }

    /// Lets this worker serve a slice from now on.
    pub fn serve(&self, slice: usize, stream: UnixStream) {
        self.leave(Order::Back(slice, stream));
    }

    /// Makes the port's thread give up a borrowed worker for good, and waits until it has. False if
    /// it does not reply.
    fn forget(&self, slice: usize) -> bool {
        let (to, forgotten) = mpsc::sync_channel(1);
        self.leave(Order::Forget(slice, to));
        forgotten.recv_timeout(SOON).is_ok()
    }

    /// Borrows the workers of all open slices, or of one. `None` if the port is not plugged in, or
    /// does not reply in time.
    pub fn lend(&self, of: Option<u32>) -> Option<Vec<Borrowed>> {
        let (to, borrowed) = mpsc::sync_channel(1);
        self.leave(Order::Lend(of, to));
        borrowed.recv_timeout(SOON).ok()
    }
}

impl Borrowed {
    /// A slice's worker, which is returned to this desk.
    pub fn new(slice: usize, stream: UnixStream, desk: Arc<Desk>) -> Self {
        Self {
            slice,
            worker: Some(Source::new(stream)),
            desk,
        }
    }

    /// The worker, as the source of a move.
    ///
    /// # Errors
    /// It was given back or replaced.
    pub fn source(&mut self) -> Result<&mut Source, Failure> {
        self.worker.as_mut().ok_or_else(gone)
    }

    /// Sends a command: to stop, or one for a worker that has stopped.
    pub fn send(&mut self, command: &Command, files: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        self.source()?.send(command, files)
    }

    /// Waits for its reply.
    pub fn answer(&mut self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        self.source()?.answer(patience)
    }

    /// Returns another worker's connection in place of this one, whose worker has left the
    /// application for good, or has ended.
    pub fn replace(mut self, stream: UnixStream) -> Option<Replaced> {
        let old = self.worker.take().map(Replaced::new);
        self.desk.serve(self.slice, stream);
        old
    }

    /// Takes a worker that was asked to leave its application for good, because that continues on
    /// another VM. The port may end before this worker does.
    ///
    /// # Errors
    /// It has not left: it ends.
    pub fn left_for_good(
        mut self,
        asked: Result<(), Failure>,
        patience: &Patience,
    ) -> Result<Replaced, Failure> {
        let left = asked.and_then(|()| self.answer(patience));
        match left {
            Ok(_) if self.desk.forget(self.slice) => {
                self.worker.take().map(Replaced::new).ok_or_else(gone)
            }
            left => {
                self.give_back(false);
                Err(left.err().unwrap_or_else(gone))
            }
        }
    }

    /// Returns the worker in order to end it: its application continues elsewhere.
    pub fn leave(mut self) {
        self.give_back(false);
    }

    /// Returns a worker that serves and has replied to all commands.
    pub fn keep(mut self) {
        self.give_back(true);
    }

    /// Makes a serving worker discard its state of the rounds. Returns it when it has answered to everything.
    pub fn forget(mut self) {
        if let Some(worker) = &mut self.worker {
            worker.resume();
        }
    }

    fn give_back(&mut self, serves: bool) -> Return {
        Return {
            slice: self.slice,
            worker: self.worker.take(),
            serves,
            desk: Arc::clone(&self.desk),
        }
    }
}

fn gone() -> Failure {
    Failure::Gone {
        who: Worker::Serving,
        source: io::ErrorKind::NotConnected.into(),
    }
}

/// A worker that has been replaced. It ends when this is dropped.
#[derive(Debug)]
pub struct Replaced(UnixStream);

impl Replaced {
    fn new(worker: Source) -> Self {
        Self(worker.into_channel())
    }

    /// Lets it save the contents that the new worker requests on this socket, until the socket is
    /// closed. Calls `came` for each that has arrived.
    ///
    /// # Errors
    /// The first reason why some are lost.
    pub fn bring(&self, to: &UnixStream, came: impl FnMut(&Fetch)) -> Result<(), Failure> {
        let old = Peer {
            channel: &self.0,
            who: Worker::Left,
        };
        old.bring(to, came)
    }

    /// Lets it save contents that were omitted.
    ///
    /// # Errors
    /// They are lost.
    pub fn fetch(&self, what: &Fetch, to: BorrowedFd<'_>) -> Result<(), Failure> {
        let old = Peer {
            channel: &self.0,
            who: Worker::Left,
        };
        let command = Command::Fetch(what.clone());
        let saved = old.ask(&command, &[to], &Patience::within(LONG));
        saved.map(drop)
    }

    /// Ends it, and waits until its pool has seen that.
    pub fn end(self, patience: &Patience) -> Result<(), Failure> {
        control::end(&self.0, Worker::Left, patience)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let is_settled = self.worker.as_ref().is_none_or(Source::is_settled);
        let mut back = self.give_back(is_settled);
        if is_settled {
            return;
        }
        // The last command may take as long as it needs.
        let work = move || {
            if let Some(worker) = &mut back.worker {
                back.serves = worker.settle(&Patience::within(LONG)).is_ok();
            }
        };
        let desk = &self.desk;
        let name = format!("{}_go", desk.thread_name);
        // Without a thread the worker ends, as it does when nobody reads its replies.
        if let Err(error) = desk.spawner.spawn(ThreadRole::Accel, &name, Box::new(work)) {
            let (name, slice) = (&desk.thread_name, self.slice);
            log::warn!("{name}: the application of slice {slice} cannot go on: {error}");
        }
    }
}
