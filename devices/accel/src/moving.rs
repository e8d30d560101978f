//! Applications that change their workers while the guest runs: to another pool, or to another device.
//!
//! ```text
//!   port to        | command                        | then
//!   ---------------|--------------------------------|------------------------------------------
//!   new worker     | attachment, which takes it up  | its driver is open
//!   old worker     | Precopy                        | what is new is in a file; it serves meanwhile
//!   new worker     | Prepare                        | that is made; further rounds follow
//!   old worker     | Quiesce                        | calls wait in the ring, or further rounds follow
//!   old worker     | SaveRest                       | what is new since is in a file
//!   new worker     | Restore                        | all is made again
//!   old worker     | Leave                          | it does not look at the ring any more
//!   new worker     | Go                             | it serves the ring where it was left
//!   old worker     | (its connection is shut down)  | its pool has seen it end
//! ```
//!
//! By postcopy `SaveRest` leaves large contents out. The old worker stays until these have come, then: `Go` goes with a
//! socket on which the new one asks for them, and the old one writes each to the file that came with the question.
//!
//! Rings, doorbell and interrupt stay what they are. Whatever fails before the old worker leaves leaves
//! the application with it. Applications move one after the other, so that each stands still for its own
//! move only; each has its own deadline. Until its turn comes, and as soon as it has moved, it is the port's.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{
        fd::AsFd,
        unix::{fs::MetadataExt, net::UnixStream},
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use base::{Cancel, Chain, Patience, Unpoisoned};
use gantry_remoting::{
    apis::{self, spoken},
    link::{
        control::{self, Command, LONG, NotMoved, Peer, SILENT, SOON},
        rounds, socket,
    },
    wire::{
        api::ApiId,
        hello::{Form, Hello},
    },
};

use gantry_remoting::port::State;
pub use gantry_remoting::port::{Outcome, OutcomeKind};

pub use super::wish::{Address, Answer, NoAddress, Seat, Unknown};
use device_model::thread::{ThreadRole, ThreadSpawner};

use super::{
    attach::{Attach, Pool},
    lend::{Borrowed, Desk, OLD, Replaced},
    saved::SavedSlice,
    slices::{Followed, Slices},
    standby::Standby,
    wish::Mailbox,
};

/// How long the queue of a pool's socket may be full.
const FULL: Duration = Duration::from_secs(5);
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
    /// Whether they go on before large contents of their memory have come.
    pub postcopy: bool,
    /// Ends it: what has not moved by then stays.
    pub cancel: Cancel,
    /// Set when the last one has moved, and contents may follow: there is nothing to end.
    pub all_gone: Arc<AtomicBool>,
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

/// What has become of a wish.
#[derive(Debug)]
pub struct Seated {
    /// By whom applications were to be served.
    pub by: Seat,
    /// What the guest says, or why it has said nothing.
    pub outcome: Result<Answer, Unknown>,
}

/// Reaches a port to move its applications.
#[derive(Clone)]
pub struct Handle {
    pub(super) attach: Arc<Attach>,
    pub(super) slices: Arc<Slices>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) desk: Arc<Desk>,
    pub(super) spawner: Arc<dyn ThreadSpawner>,
    pub(super) thread_name: String,
    /// The applications that a snapshot has, while it is written.
    pub(super) saved: Arc<Mutex<Option<Vec<SavedSlice>>>>,
    /// The applications of a snapshot that is restored, until the guest runs.
    pub(super) coming: Arc<Mutex<Coming>>,
}

/// Saved applications on their way back.
#[derive(Debug, Default)]
pub(super) struct Coming {
    /// What was saved of them, by slice: no worker has it yet.
    pub images: Vec<(usize, File)>,
    /// Workers that have it, and do not serve yet.
    pub workers: Vec<Waiting>,
    /// Workers that have a part of it, by slice.
    pub standby: BTreeMap<usize, Standby>,
    /// Workers that had, by slice, and are to end.
    pub unwanted: BTreeMap<usize, Standby>,
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

    /// Has the guest's agent see to it that applications are served by this one, in a thread of its own,
    /// which tells `done` what became of it.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start_seats(
        &self,
        by: Seat,
        patience: Duration,
        cancel: Cancel,
        done: impl FnOnce(Seated) + Send + 'static,
    ) -> io::Result<()> {
        let port = self.clone();
        let work = Box::new(move || {
            let outcome = port.ask_seats(&by, patience, &cancel);
            done(Seated { by, outcome });
        });
        let name = format!("{}_mv", self.thread_name);
        self.spawner.spawn(ThreadRole::Accel, &name, work).map(drop)
    }

    /// As [`start_seats`](Self::start_seats), in this thread.
    ///
    /// # Errors
    /// Nobody knows what has come of it.
    pub fn ask_seats(
        &self,
        by: &Seat,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Answer, Unknown> {
        self.mailbox.ask(&self.slices, by, patience, cancel)
    }

    /// Takes back what was asked for last, whether it was carried out or not: an agent that starts later
    /// does not do it.
    pub fn withdraw_seats(&self) {
        self.mailbox.withdraw();
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
        let Move { slice, to, .. } = moved.asked.clone();
        let before = self.attach.pool();
        if slice.is_none()
            && to.socket != before.socket
            && let Err(why) = self.is_served_by(&to, &moved.asked.cancel)
        {
            moved.reasons.push(why);
            return moved;
        }
        if slice.is_none() {
            // What comes from now on has nothing to move.
            self.attach.set_pool(to.clone());
        }
        let Some(borrowed) = self.desk.lend(slice) else {
            moved.reasons.push("the port is not plugged in".to_owned());
            return moved;
        };
        if borrowed.is_empty() {
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
        // Until an application's turn comes the port notices the end of its worker, and closes its slice.
        let slices = borrowed.into_iter().map(|borrowed| {
            let slice = borrowed.slice;
            borrowed.keep();
            slice
        });
        self.carry_each(&slices.collect::<Vec<_>>(), &mut moved);
        if slice.is_none() && moved.slices.is_empty() && !moved.reasons.is_empty() {
            self.attach.set_pool(before);
        }
        moved
    }

    /// Whether a pool serves all APIs of the port, as far as it says so: those that come would be refused. The one of a
    /// port that has one alone is known from the applications that move.
    fn is_served_by(&self, to: &Pool, cancel: &Cancel) -> Result<(), String> {
        let apis = self.attach.apis;
        if !apis.has_several() {
            return Ok(());
        }
        let patience = Patience::new(SOON, cancel.clone());
        let is_refused = |api: &ApiId| is_served(&to.socket, *api, &patience) == Some(false);
        let refused: Vec<_> = apis.known().filter(is_refused).map(ApiId::name).collect();
        if refused.is_empty() {
            return Ok(());
        }
        let (refused, pool) = (refused.join(" and "), to.socket.display());
        let all: Vec<_> = apis.known().map(ApiId::name).collect();
        Err(format!(
            "the pool at {pool} does not serve {refused}, which programs of the port may call: start it with --api {}, or \
             move applications one by one (--slice)",
            all.join(",")
        ))
    }

    /// Moves the applications of these slices, those that are still there.
    fn carry_each(&self, slices: &[usize], moved: &mut Moved) {
        let Move {
            to,
            drain,
            postcopy,
            cancel,
            all_gone,
            ..
        } = moved.asked.clone();
        for (at, slice) in slices.iter().enumerate() {
            let borrowed = self.desk.lend(Some(*slice as u32)).unwrap_or_default();
            let Some(borrowed) = borrowed.into_iter().next() else {
                if self.slices.get(*slice) == State::Open {
                    moved.reasons.push(format!(
                        "the application of slice {slice} stays: it is being moved or saved already"
                    ));
                }
                continue;
            };
            // What one does not come to an end with costs the others nothing of theirs.
            let patience = Patience::new(drain.saturating_add(LONG), cancel.clone());
            match self.carry_over(borrowed, &to, (drain, postcopy), &patience) {
                Ok(old) => {
                    moved.slices.push(*slice as u32);
                    let is_last = at + 1 == slices.len();
                    all_gone.store(is_last, Ordering::SeqCst);
                    let is_over = || cancel.is_cancelled() && !is_last;
                    let why = old.and_then(|old| self.wait_for_contents(old, is_over));
                    moved.reasons.extend(why);
                }
                Err(error) => {
                    let why = format!("the application of slice {slice} stays: {}", Chain(&error));
                    moved.reasons.push(why);
                }
            }
        }
    }

    /// Moves an application: the worker that it has left, from where contents may follow. An error says why it stays.
    fn carry_over(
        &self,
        mut borrowed: Borrowed,
        to: &Pool,
        (drain, postcopy): (Duration, bool),
        patience: &Patience,
    ) -> Result<Option<OldWorker>, NotMoved> {
        if patience.is_cancelled() {
            return Err(NotMoved::Cancelled);
        }
        let fetches = postcopy.then(UnixStream::pair).transpose();
        let (asked, asks) = fetches.map_err(NotMoved::Socket)?.unzip();
        let stream = self.connect(borrowed.slice, to, patience)?;
        let new = Peer {
            channel: &stream,
            who: NEW,
        };
        new.answer(&patience.at_most(SOON))?;
        let rounds = rounds::stop(
            &mut |command, files, patience| {
                borrowed.send(command, files)?;
                borrowed.answer(patience)
            },
            &new,
            (drain, postcopy),
            patience,
        )?;
        let image = save(
            &mut borrowed,
            &Command::SaveRest(rounds, postcopy),
            patience,
        )?;
        new.make(&Command::Restore(true), image.as_fd(), patience)?;
        drop(image);
        // From here on it does not stop half-way. Who has left need not have ended before another one
        // serves; with any other answer its end is waited for.
        let soon = Patience::within(SOON);
        let left = borrowed.send(&Command::Leave(), &[]);
        let left = left.and_then(|()| borrowed.answer(&soon));
        if postcopy && left.as_ref().is_err_and(NotMoved::is_refusal) {
            // It has what would follow, and can go on.
            return left.map(|_| None);
        }
        let has_left = left.is_ok();
        if !has_left {
            borrowed.end(&Patience::within(SOON))?;
        }
        // The answer is that it serves.
        let files: Vec<_> = asks.iter().map(AsFd::as_fd).collect();
        if let Err(error) = new.send(&Command::Go(), &files) {
            borrowed.leave();
            return Err(error);
        }
        // The new one's end is the end of the questions.
        drop(asks);
        let slice = borrowed.slice;
        let old = borrowed.replace(stream);
        Ok(old.map(|worker| OldWorker {
            slice,
            worker,
            has_left,
            asked,
        }))
    }

    /// Waits until all contents of an application have come, and its old worker has ended, or until nobody waits for
    /// that any more: they follow in a thread of their own. What is to be said of it, if anything is.
    fn wait_for_contents(&self, old: OldWorker, is_over: impl Fn() -> bool) -> Option<String> {
        let slice = old.slice;
        if old.asked.is_none() {
            return self.bring(old);
        }
        let old = Arc::new(Mutex::new(Some(old)));
        let (port, aside) = (self.clone(), Arc::clone(&old));
        let (tells, told) = mpsc::channel();
        let work = move || {
            let old = aside.lock_unpoisoned().take();
            let why = old.and_then(|old| port.bring(old));
            if let Err(mpsc::SendError(Some(why))) = tells.send(why) {
                log::warn!("{}: {why}", port.thread_name);
            }
        };
        let name = format!("{}_mv", self.thread_name);
        let thread = self.spawner.spawn(ThreadRole::Accel, &name, Box::new(work));
        if thread.is_err() {
            // All that can wait for it is this one, then.
            let old = old.lock_unpoisoned().take();
            return old.and_then(|old| self.bring(old));
        }
        loop {
            match told.recv_timeout(AGAIN) {
                Err(RecvTimeoutError::Timeout) if is_over() => {
                    return Some(format!(
                        "the application of slice {slice} has moved, and contents of its memory still follow (its old \
                         worker ends when all have come)"
                    ));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(why) => return why,
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Brings contents of an application until all have come, and its old worker has ended. Why some are lost, if
    /// some are.
    fn bring(&self, old: OldWorker) -> Option<String> {
        let OldWorker {
            slice,
            worker,
            has_left,
            asked,
        } = old;
        let brought = asked.map_or(Ok(()), |asked| {
            worker.bring(&asked, |_| {
                self.slices.followed.fetch_add(1, Ordering::Relaxed);
            })
        });
        if has_left && let Err(error) = worker.end(&Patience::within(SOON)) {
            let name = &self.thread_name;
            log::warn!("{name}: the worker that slice {slice} had does not end: {error}");
        }
        brought.err().map(|error| {
            format!(
                "the application of slice {slice} has moved, and has lost contents of its memory: {}",
                Chain(&error)
            )
        })
    }

    /// Another worker for a slice, which waits for the state of its application.
    pub(super) fn connect(
        &self,
        slice: usize,
        to: &Pool,
        patience: &Patience,
    ) -> Result<UnixStream, NotMoved> {
        let patience = patience.at_most(FULL);
        loop {
            match self.attach.take_up(slice, to) {
                Err(_) if patience.is_cancelled() => return Err(NotMoved::Cancelled),
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && patience.check().is_ok() =>
                {
                    std::thread::sleep(AGAIN);
                }
                other => return other.map_err(|source| NotMoved::Gone { who: NEW, source }),
            }
        }
    }

    /// Whether there are applications of a snapshot that workers have yet to take up, or workers that have
    /// taken some up that are not wanted any more.
    pub fn has_images(&self) -> bool {
        let coming = self.coming();
        !coming.images.is_empty() || !coming.unwanted.is_empty()
    }

    pub(super) fn coming(&self) -> MutexGuard<'_, Coming> {
        self.coming.lock_unpoisoned()
    }

    /// How many buffers and images have had their contents follow.
    pub fn followed(&self) -> Followed {
        Arc::clone(&self.slices.followed)
    }

    /// Where workers that have taken applications up will ask for contents that follow, when the port goes on: by
    /// slice.
    ///
    /// # Errors
    /// The system has no more sockets.
    pub fn asking(&self) -> io::Result<Vec<(u32, UnixStream)>> {
        let mut coming = self.coming();
        let pair = |worker: &mut Waiting| {
            let (asked, asks) = UnixStream::pair()?;
            worker.asks = Some(asks);
            Ok((worker.slice as u32, asked))
        };
        coming.workers.iter_mut().map(pair).collect()
    }

    /// Has workers of the port's pool take up the applications of a snapshot, all at the same time, those first
    /// that have a part of them. None
    /// of them serves before the port goes on.
    ///
    /// # Errors
    /// All reasons why some cannot.
    pub fn take_up(&self, patience: &Patience) -> Result<(), String> {
        let Coming {
            images,
            mut standby,
            unwanted,
            ..
        } = std::mem::take(&mut *self.coming());
        let pool = self.attach.pool();
        let mut reasons = Vec::new();
        let mut asked = Vec::new();
        let mut keep = |slice: usize, step: Result<UnixStream, NotMoved>| match step {
            Ok(stream) => Some(stream),
            Err(error) => {
                reasons.push(format!("slice {slice}: {}", Chain(&error)));
                None
            }
        };
        for (slice, Standby { stream, .. }) in unwanted {
            let ended = self.end(slice, &stream, patience);
            keep(slice, ended.map(|()| stream));
        }
        for (slice, image) in images {
            let (stream, is_ready) = match standby.remove(&slice) {
                Some(Standby { stream, .. }) => (Ok(stream), true),
                None => (self.connect(slice, &pool, patience), false),
            };
            if let Some(stream) = keep(slice, stream) {
                asked.push((slice, image, stream, is_ready));
            }
        }
        let soon = patience.at_most(SOON);
        let mut restoring = Vec::new();
        for (slice, image, stream, is_ready) in asked {
            let new = Peer {
                channel: &stream,
                who: NEW,
            };
            let ready = match is_ready {
                true => Ok(()),
                false => new.answer(&soon).map(drop),
            };
            let step = ready.and_then(|()| new.send(&Command::Restore(false), &[image.as_fd()]));
            if let Some(stream) = keep(slice, step.map(|()| stream)) {
                restoring.push((slice, stream));
            }
        }
        let mut workers = Vec::new();
        for (slice, stream) in restoring {
            let new = Peer {
                channel: &stream,
                who: NEW,
            };
            let restored = new.made(patience);
            if let Some(stream) = keep(slice, restored.map(|()| stream)) {
                let asks = None;
                workers.push(Waiting {
                    slice,
                    stream,
                    asks,
                });
            }
        }
        if !reasons.is_empty() {
            let (reasons, pool) = (reasons.join("; "), pool.socket.display());
            return Err(format!("{reasons} (the pool is at {pool})"));
        }
        self.coming().workers = workers;
        Ok(())
    }
}

/// The worker that an application has left.
struct OldWorker {
    slice: usize,
    worker: Replaced,
    /// Whether it has said so: its end was not waited for.
    has_left: bool,
    /// Where the new one asks for contents.
    asked: Option<UnixStream>,
}

/// A worker that has the state of a slice's application, and does not serve it yet.
#[derive(Debug)]
pub struct Waiting {
    slice: usize,
    stream: UnixStream,
    /// Where it is to ask for contents that follow.
    asks: Option<UnixStream>,
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
        let files: Vec<_> = self.asks.iter().map(AsFd::as_fd).collect();
        control::send(&self.stream, &Command::Go(), &files)?;
        port.desk.serve(self.slice, self.stream);
        Ok(())
    }
}

pub(super) const NEW: &str = "the worker that was to serve it";

/// Asks a worker to stop, however much its application has made lately, and goes on without its answer.
pub(super) fn quiesce(worker: &mut Borrowed, drain: Duration) -> Result<(), NotMoved> {
    let drain = u64::try_from(drain.as_millis()).unwrap_or(u64::MAX);
    worker.send(&Command::Quiesce(drain, u64::MAX), &[])
}

/// Has a worker that has stopped save its application's state, or the rest of it, by this command. Its application
/// stands still meanwhile, and perhaps its machine: it is waited for as long as it writes.
pub(super) fn save(
    worker: &mut Borrowed,
    command: &Command,
    patience: &Patience,
) -> Result<File, NotMoved> {
    save_within(worker, command, patience, SILENT)
}

pub(super) fn save_within(
    worker: &mut Borrowed,
    command: &Command,
    patience: &Patience,
    silent: Duration,
) -> Result<File, NotMoved> {
    let image = control::image().map_err(NotMoved::File)?;
    worker.send(command, &[image.as_fd()])?;
    let mut written = 0;
    loop {
        match worker.answer(&patience.at_most(silent)) {
            Err(NotMoved::Gone { source, .. })
                if source.kind() == io::ErrorKind::TimedOut && patience.check().is_ok() =>
            {
                let before = written;
                written = image.metadata().map_err(NotMoved::File)?.blocks();
                if written <= before {
                    return Err(NotMoved::Silent {
                        who: OLD,
                        seconds: silent.as_secs(),
                    });
                }
            }
            answer => return answer.map(|_| image),
        }
    }
}

/// Whether a pool serves an API; none if it does not say so.
fn is_served(pool: &Path, api: ApiId, patience: &Patience) -> Option<bool> {
    let stream = socket::connect(pool).ok()?;
    socket::refuse_files(&stream);
    socket::send_hello(&stream, Hello::asks(spoken(api)), &[]).ok()?;
    patience.readable(stream.as_fd()).ok()?;
    let (bytes, _) = socket::receive_hello(&stream).ok()?;
    let heard = Hello::check(&bytes, &apis::ALL).ok()?;
    (heard.form == Form::Asks).then_some(heard.api == api)
}

/// Whether somebody listens there.
fn reachable(to: &Pool) -> io::Result<()> {
    match socket::connect(&to.socket) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}
