//! Applications that change their workers while the guest runs: to another pool, or to another device.
//!
//! ```text
//!   port to        | command                        | then
//!   ---------------|--------------------------------|------------------------------------------
//!   new worker     | attachment, which takes it up  | its driver is open
//!   old worker     | Quiesce                        | calls wait in the ring
//!   old worker     | Save                           | its state is in a file in memory
//!   new worker     | Restore                        | all is made again
//!   old worker     | (its connection is shut down)  | its pool has seen it end
//!   new worker     | Go                             | it serves the ring where it was left
//! ```
//!
//! Rings, doorbell and interrupt stay what they are. Whatever fails before the old worker ends leaves
//! the application with it.

use std::{
    fs::File,
    io::{self, Read},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use base::{Chain, Unpoisoned};
use gantry_remoting::link::{
    control::{self, AFTER_DRAIN, Command, LONG, NotMoved, Peer, SOON},
    socket,
};

use super::{
    attach::{Attach, Pool},
    lend::{Desk, Lent},
    saved::SavedSlice,
};
use crate::thread::{ThreadRole, ThreadSpawner};

/// How long the queue of a pool's socket may be full.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked at meanwhile.
const AGAIN: Duration = Duration::from_millis(10);

/// Which applications move, and where to.
#[derive(Clone, Debug)]
pub struct Move {
    /// That of this slice; all of the port, and those that come, if it is none.
    pub slice: Option<u32>,
    /// Their new pool.
    pub to: Pool,
    /// How long each may go on with what its device is at.
    pub drain: Duration,
}

/// What became of a move.
#[derive(Debug)]
pub struct Moved {
    /// What was asked for.
    pub asked: Move,
    /// The slices whose applications have moved.
    pub slices: Vec<u32>,
    /// Why others stay, or are gone.
    pub reasons: Vec<String>,
}

/// Reaches a port to move its applications.
#[derive(Clone)]
pub struct Handle {
    pub(super) attach: Arc<Attach>,
    pub(super) desk: Arc<Desk>,
    pub(super) spawner: Arc<dyn ThreadSpawner>,
    pub(super) thread_name: String,
    /// The applications that a snapshot has, while it is written.
    pub(super) saved: Arc<Mutex<Option<Vec<SavedSlice>>>>,
}

impl Handle {
    /// Moves applications in a thread of its own, which tells `done` what became of it.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(&self, asked: Move, done: impl FnOnce(Moved) + Send + 'static) -> io::Result<()> {
        let port = self.clone();
        let work = Box::new(move || done(port.carry_out(asked)));
        let name = format!("{}_mv", self.thread_name);
        self.spawner.spawn(ThreadRole::Accel, &name, work).map(drop)
    }

    /// Where workers of new applications come from.
    pub fn pool(&self) -> Pool {
        self.attach.pool()
    }

    pub(super) fn saved(&self) -> MutexGuard<'_, Option<Vec<SavedSlice>>> {
        self.saved.lock_unpoisoned()
    }

    fn carry_out(&self, asked: Move) -> Moved {
        let mut moved = Moved {
            asked,
            slices: Vec::new(),
            reasons: Vec::new(),
        };
        let Move { slice, to, drain } = moved.asked.clone();
        let before = self.attach.pool();
        if slice.is_none() {
            // What comes from now on has nothing to move.
            self.attach.set_pool(to.clone());
        }
        let Some(lent) = self.desk.lend(slice) else {
            moved.reasons.push("the port is not plugged in".to_owned());
            return moved;
        };
        if lent.is_empty() {
            match slice {
                Some(slice) => moved.reasons.push(format!(
                    "slice {slice} has no application, or it is being moved or saved already"
                )),
                None => moved.reasons.extend(reachable(&to).err().map(|error| {
                    let place = to.socket.display();
                    format!(
                        "cannot reach the pool at {place}: {error}; is gantry-accel serving there?"
                    )
                })),
            }
        }
        for lent in lent {
            let slice = lent.slice as u32;
            match self.carry_over(lent, &to, drain) {
                Ok(()) => moved.slices.push(slice),
                Err(error) => {
                    let why = format!("the application of slice {slice} stays: {}", Chain(&error));
                    moved.reasons.push(why);
                }
            }
        }
        if slice.is_none() && moved.slices.is_empty() && !moved.reasons.is_empty() {
            self.attach.set_pool(before);
        }
        moved
    }

    fn carry_over(&self, lent: Lent, to: &Pool, drain: Duration) -> Result<(), NotMoved> {
        let gone = |who| move |source| NotMoved::Gone { who, source };
        let old = OLD;
        let stream = lent.stream().ok_or_else(|| {
            let source = io::ErrorKind::NotConnected.into();
            NotMoved::Gone { who: old, source }
        })?;
        let new = self.connect(lent.slice, to).map_err(gone(NEW))?;
        socket::set_blocking(stream, true).map_err(gone(OLD))?;
        let outcome = hand_over(stream, &new, drain);
        let _ = socket::set_blocking(stream, false);
        outcome?;
        let gone = gone(NEW);
        // The answer is that it serves.
        control::send(&new, &Command::Go(), &[]).map_err(&gone)?;
        socket::set_blocking(&new, false).map_err(&gone)?;
        lent.replace(new);
        Ok(())
    }

    /// Another worker for a slice, which waits for the state of its application.
    fn connect(&self, slice: usize, to: &Pool) -> io::Result<UnixStream> {
        let until = Instant::now() + PATIENCE;
        let stream = loop {
            match self.attach.take_up(slice, to) {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until =>
                {
                    std::thread::sleep(AGAIN);
                }
                other => break other?,
            }
        };
        socket::set_blocking(&stream, true)?;
        Ok(stream)
    }

    /// A slice whose application was saved is served by another worker, which has the state by then.
    /// Nothing is called before [`Waiting::go`].
    ///
    /// # Errors
    /// It is refused, or there is no such pool.
    pub fn take_up(&self, slice: usize, image: &File, to: &Pool) -> Result<Waiting, NotMoved> {
        let gone = |source| NotMoved::Gone { who: NEW, source };
        let stream = self.connect(slice, to).map_err(gone)?;
        let new = Peer {
            channel: &stream,
            who: NEW,
        };
        new.answer(SOON)?;
        new.ask(&Command::Restore(false), &[image.as_fd()], LONG)?;
        Ok(Waiting { slice, stream })
    }
}

/// A worker that has the state of a slice's application, and does not serve it yet.
#[derive(Debug)]
pub struct Waiting {
    slice: usize,
    stream: UnixStream,
}

impl Waiting {
    /// Whose application it has.
    pub fn slice(&self) -> usize {
        self.slice
    }

    /// Has it serve.
    ///
    /// # Errors
    /// It has ended.
    pub fn go(self, port: &Handle) -> io::Result<()> {
        control::send(&self.stream, &Command::Go(), &[])?;
        socket::set_blocking(&self.stream, false)?;
        port.desk.serve(self.slice, self.stream);
        Ok(())
    }
}

pub(super) const OLD: &str = "the worker that serves it";
const NEW: &str = "the worker that was to serve it";

/// Brings the state from one worker to another. When it returns, the first has ended; with an error it
/// goes on, if it can.
fn hand_over(old: &UnixStream, new: &UnixStream, drain: Duration) -> Result<(), NotMoved> {
    let old = Peer {
        channel: old,
        who: OLD,
    };
    let new = Peer {
        channel: new,
        who: NEW,
    };
    new.answer(SOON)?;
    stopped(&old, drain, |image| {
        new.ask(&Command::Restore(true), &[image.as_fd()], LONG)
            .map(drop)
    })?;
    end(&old)
}

/// Stops a worker and saves its application's state, and does something with that. With an error the
/// worker goes on.
pub(super) fn stopped<T>(
    worker: &Peer<'_>,
    drain: Duration,
    then: impl FnOnce(File) -> Result<T, NotMoved>,
) -> Result<T, NotMoved> {
    let patience = u64::try_from(drain.as_millis()).unwrap_or(u64::MAX);
    let wait = drain.saturating_add(AFTER_DRAIN);
    let quiesced = worker.ask(&Command::Quiesce(patience), &[], wait);
    if let Err(NotMoved::Gone { .. }) = quiesced {
        // Its answer may still come, and would be taken for that to the next command.
        let _ = worker.channel.shutdown(Shutdown::Write);
    }
    quiesced?;
    let outcome = (|| {
        let image = control::image().map_err(NotMoved::File)?;
        worker.ask(&Command::Save(), &[image.as_fd()], LONG)?;
        then(image)
    })();
    if outcome.is_err() && worker.ask(&Command::Resume(), &[], SOON).is_err() {
        // It would stand still for ever.
        let _ = worker.channel.shutdown(Shutdown::Write);
    }
    outcome
}

/// Ends a worker that stands still, and waits until its pool has seen it end: from then on nobody
/// else has the rings.
fn end(old: &Peer<'_>) -> Result<(), NotMoved> {
    let gone = |source| NotMoved::Gone {
        who: old.who,
        source,
    };
    old.channel.shutdown(Shutdown::Write).map_err(gone)?;
    old.channel.set_read_timeout(Some(SOON)).map_err(gone)?;
    match (&mut &*old.channel).read(&mut [0; 1]) {
        Ok(0) => Ok(()),
        Ok(_) => Err(gone(io::ErrorKind::InvalidData.into())),
        // Killed with what it was sent unread.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
        Err(error) => Err(gone(error)),
    }
}

/// Whether somebody listens there.
fn reachable(to: &Pool) -> io::Result<()> {
    match socket::connect(&to.socket) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}
