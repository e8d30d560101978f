//! Workers that somebody else than the port's thread speaks to for a while: to save their application's
//! state, or to replace them.
//!
//! Whoever has one gives it back, or another one in its place, whatever happens; the slice stays open
//! meanwhile, and the guest notices nothing but calls that take longer. A worker that was stopped is
//! given back when it has said that it goes on, for which nobody has to wait.

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
use gantry_remoting::link::control::{Command, Fetch, LONG, NotMoved, Peer, Reply};

use super::slices::Slices;

/// How long the port's thread may take to answer.
const SOON: Duration = Duration::from_secs(5);
/// What a worker is called that is borrowed.
pub const OLD: &str = "the worker that serves it";
/// The same when another one serves its application.
const LEFT: &str = "the worker that it has left";

/// What the port's thread is asked for.
pub enum Order {
    /// The workers of all open slices, or of one, that nobody has borrowed.
    Lend(Option<u32>, SyncSender<Vec<Borrowed>>),
    /// A slice's worker comes back, or another one comes in its place.
    Back(usize, UnixStream),
    /// The worker of a slice, which is borrowed, is the port's no more: it stays when that ends. Answered once it is so.
    Forget(usize, SyncSender<()>),
}

/// Where orders are left.
pub struct Desk {
    /// None once nobody carries them out.
    orders: Mutex<Option<VecDeque<Order>>>,
    slices: Arc<Slices>,
    spawner: Arc<dyn ThreadSpawner>,
    thread_name: String,
}

/// The connection to a slice's worker.
pub struct Borrowed {
    /// Which slice.
    pub slice: usize,
    /// None if the worker has ended.
    stream: Option<UnixStream>,
    /// Whether it was asked to stop.
    stops: bool,
    /// How many of its answers have not come.
    due: u32,
    desk: Arc<Desk>,
}

/// A worker's connection on its way back to the port's thread.
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
            // It would stand still for ever.
            let _ = stream.shutdown(Shutdown::Write);
        }
        self.desk.serve(self.slice, stream);
    }
}

impl Desk {
    /// Nobody carries out orders yet; they wait.
    pub fn new(slices: Arc<Slices>, spawner: Arc<dyn ThreadSpawner>, thread_name: &str) -> Self {
        Self {
            orders: Mutex::new(Some(VecDeque::new())),
            slices,
            spawner,
            thread_name: thread_name.to_owned(),
        }
    }

    fn leave(&self, order: Order) {
        // The connections in an order that nobody takes close, and with that the workers end.
        if let Some(orders) = &mut *self.orders.lock_unpoisoned() {
            orders.push_back(order);
        }
        self.slices.wake();
    }

    /// All orders.
    pub fn orders(&self) -> VecDeque<Order> {
        let mut orders = self.orders.lock_unpoisoned();
        orders.as_mut().map(mem::take).unwrap_or_default()
    }

    /// Somebody carries out orders from now on.
    pub fn open(&self) {
        self.orders.lock_unpoisoned().get_or_insert_default();
    }

    /// Nobody carries out orders any more.
    pub fn close(&self) {
        *self.orders.lock_unpoisoned() = None;
    }

    /// A slice is served by this worker from now on.
    pub fn serve(&self, slice: usize, stream: UnixStream) {
        self.leave(Order::Back(slice, stream));
    }

    /// Has the port's thread leave a borrowed worker alone for good, and waits until it does. False if it does not.
    fn forget(&self, slice: usize) -> bool {
        let (to, forgotten) = mpsc::sync_channel(1);
        self.leave(Order::Forget(slice, to));
        forgotten.recv_timeout(SOON).is_ok()
    }

    /// The workers of all open slices, or of one. None if the port is not plugged in, or has no time.
    pub fn lend(&self, of: Option<u32>) -> Option<Vec<Borrowed>> {
        let (to, borrowed) = mpsc::sync_channel(1);
        self.leave(Order::Lend(of, to));
        borrowed.recv_timeout(SOON).ok()
    }
}

impl Borrowed {
    /// A slice's worker, which is given back to this desk.
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

    /// Asks the worker to stop, or for what one that has stopped can do.
    pub fn send(&mut self, command: &Command, files: &[BorrowedFd<'_>]) -> Result<(), NotMoved> {
        self.stops = true;
        self.peer()?.send(command, files)?;
        self.due += 1;
        Ok(())
    }

    /// Waits for its answer.
    pub fn answer(&mut self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), NotMoved> {
        let answer = self.peer()?.answer(patience);
        if matches!(answer, Ok(_) | Err(NotMoved::Refused(_))) {
            self.due = self.due.saturating_sub(1);
        }
        answer
    }

    /// Ends a worker that stands still, and waits until its pool has seen it end: from then on nobody
    /// else has the rings.
    pub fn end(&mut self, patience: &Patience) -> Result<(), NotMoved> {
        end(self.peer()?.channel, patience)
    }

    /// Gives back another worker's connection in place of this one, whose worker has left the application alone for
    /// good, or has ended.
    pub fn replace(mut self, stream: UnixStream) -> Option<Replaced> {
        let old = self.stream.take().map(Replaced);
        self.desk.serve(self.slice, stream);
        old
    }

    /// A worker that was asked to leave its application alone for good, which goes on in another machine: its port may
    /// end when it has.
    ///
    /// # Errors
    /// It has not: it ends.
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

    /// Gives the worker back to end: its application goes on elsewhere.
    pub fn leave(mut self) {
        self.give_back(false);
    }

    /// Gives back a worker that serves and has answered all that it was asked.
    pub fn keep(mut self) {
        self.give_back(true);
    }

    /// Has a worker that serves give up what it keeps of rounds.
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

/// Ends a worker, and waits until its pool has seen it end.
fn end(channel: &UnixStream, patience: &Patience) -> Result<(), NotMoved> {
    use std::io::Read;

    use base::patience::Patient;
    let gone = |source| NotMoved::Gone { who: OLD, source };
    channel.shutdown(Shutdown::Write).map_err(gone)?;
    match Patient(channel, patience).read(&mut [0; 1]) {
        Ok(0) => Ok(()),
        Ok(_) => Err(gone(io::ErrorKind::InvalidData.into())),
        // Killed with what it was sent unread.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
        Err(error) => Err(gone(error)),
    }
}

/// A worker that another one serves in the place of. It ends with this.
#[derive(Debug)]
pub struct Replaced(UnixStream);

impl Replaced {
    /// Has it save the contents that the other one asks for by this socket, as long as that asks. `came` hears of what
    /// has come.
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

    /// Has it save contents that were left out.
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
        // What it was asked last may take as long as it takes.
        let work = move || {
            if let Some(channel) = &back.stream {
                let worker = Peer { channel, who: OLD };
                back.serves = worker.go_on(due, &Patience::within(LONG)).is_ok();
            }
        };
        let desk = &self.desk;
        let name = format!("{}_go", desk.thread_name);
        // Without a thread the worker ends, as it does when nobody hears it.
        if let Err(error) = desk.spawner.spawn(ThreadRole::Accel, &name, Box::new(work)) {
            let (name, slice) = (&desk.thread_name, self.slice);
            log::warn!("{name}: the application of slice {slice} cannot go on: {error}");
        }
    }
}
