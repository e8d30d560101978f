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
use remoting_transport::control::{Command, Fetch, LONG, NotMoved, Peer, Reply};

use super::{closing::Closing, slices::Slices};

/// Timeout for a reply of the port's thread.
const SOON: Duration = Duration::from_secs(5);
/// Name of a borrowed worker in messages.
pub const OLD: &str = "the worker that serves it";
/// Name of a worker in messages after another one has taken over its application.
const LEFT: &str = "the worker that it has left";

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
    stream: Option<UnixStream>,
    /// Whether it was asked to stop.
    stops: bool,
    /// Number of its replies that have not arrived.
    due: u32,
    desk: Arc<Desk>,
}

/// A worker's connection that is being returned to the port's thread.
struct Return {
    slice: usize,
    stream: Option<UnixStream>,
    /// Whether the worker serves.
    serves: bool,
    desk: Arc<Desk>,
}

impl Drop for Return {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else {
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
            stream: Some(stream),
            stops: false,
            due: 0,
            desk,
        }
    }

    fn peer(&self) -> Result<Peer<'_>, NotMoved> {
        match &self.stream {
            Some(channel) => Ok(Peer { channel, who: OLD }),
            None => Err(NotMoved::Gone {
                who: OLD,
                source: io::ErrorKind::NotConnected.into(),
            }),
        }
    }

    /// Sends a command: to stop, or one for a worker that has stopped.
    pub fn send(&mut self, command: &Command, files: &[BorrowedFd<'_>]) -> Result<(), NotMoved> {
        self.stops = true;
        self.peer()?.send(command, files)?;
        self.due += 1;
        Ok(())
    }

    /// Waits for its reply.
    pub fn answer(&mut self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), NotMoved> {
        let answer = self.peer()?.answer(patience);
        if matches!(answer, Ok(_) | Err(NotMoved::Refused(_))) {
            self.due = self.due.saturating_sub(1);
        }
        answer
    }

    /// Ends a stopped worker, and waits until its pool has seen the process end: from then on no
    /// other process has the rings.
    pub fn end(&mut self, patience: &Patience) -> Result<(), NotMoved> {
        end(self.peer()?.channel, patience)
    }

    /// Returns another worker's connection in place of this one, whose worker has left the
    /// application for good, or has ended.
    pub fn replace(mut self, stream: UnixStream) -> Option<Replaced> {
        let old = self.stream.take().map(Replaced);
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
        asked: Result<(), NotMoved>,
        patience: &Patience,
    ) -> Result<Replaced, NotMoved> {
        let left = asked.and_then(|()| self.answer(patience));
        let gone = || NotMoved::Gone {
            who: OLD,
            source: io::ErrorKind::NotConnected.into(),
        };
        match left {
            Ok(_) if self.desk.forget(self.slice) => {
                self.stream.take().map(Replaced).ok_or_else(gone)
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

    /// Makes a serving worker discard its state of the rounds.
    pub fn forget(mut self) {
        self.stops = true;
    }

    fn give_back(&mut self, serves: bool) -> Return {
        Return {
            slice: self.slice,
            stream: self.stream.take(),
            serves,
            desk: Arc::clone(&self.desk),
        }
    }
}

/// Ends a worker, and waits until its pool has seen the process end.
fn end(channel: &UnixStream, patience: &Patience) -> Result<(), NotMoved> {
    use std::io::Read;

    use base::patience::Patient;
    let gone = |source| NotMoved::Gone { who: OLD, source };
    channel.shutdown(Shutdown::Write).map_err(gone)?;
    match Patient(channel, patience).read(&mut [0; 1]) {
        Ok(0) => Ok(()),
        Ok(_) => Err(gone(io::ErrorKind::InvalidData.into())),
        // Killed while it had unread messages.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
        Err(error) => Err(gone(error)),
    }
}

/// A worker that has been replaced. It ends when this is dropped.
#[derive(Debug)]
pub struct Replaced(UnixStream);

impl Replaced {
    /// Lets it save the contents that the new worker requests on this socket, until the socket is
    /// closed. Calls `came` for each that has arrived.
    ///
    /// # Errors
    /// The first reason why some are lost.
    pub fn bring(&self, to: &UnixStream, came: impl FnMut(&Fetch)) -> Result<(), NotMoved> {
        let old = Peer {
            channel: &self.0,
            who: LEFT,
        };
        old.bring(to, came)
    }

    /// Lets it save contents that were omitted.
    ///
    /// # Errors
    /// They are lost.
    pub fn fetch(&self, what: &Fetch, to: BorrowedFd<'_>) -> Result<(), NotMoved> {
        let old = Peer {
            channel: &self.0,
            who: LEFT,
        };
        let command = Command::Fetch(what.clone());
        let saved = old.ask(&command, &[to], &Patience::within(LONG));
        saved.map(drop)
    }

    /// Ends it, and waits until its pool has seen that.
    pub fn end(self, patience: &Patience) -> Result<(), NotMoved> {
        end(&self.0, patience)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if self.stream.is_none() {
            return;
        }
        let due = self.due;
        let mut back = self.give_back(!self.stops);
        if back.serves {
            return;
        }
        // The last command may take as long as it needs.
        let work = move || {
            if let Some(channel) = &back.stream {
                let worker = Peer { channel, who: OLD };
                back.serves = worker.go_on(due, &Patience::within(LONG)).is_ok();
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
