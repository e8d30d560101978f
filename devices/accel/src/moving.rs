//! Moves applications to other workers while the guest runs: to another pool, or to another device.
//!
//! The new worker gets the attachment, to take it over, and is ready when its driver is open. All
//! further steps are those of [every move](remoting_transport::worker_control). In the end the old
//! worker's connection is shut down, and its pool has seen it end.
//!
//! With postcopy, `SaveRest` omits large contents. The old worker stays until they have been
//! transferred: `Go` carries a socket on which the new worker requests them, and the old one writes
//! each to the file that came with the request.
//!
//! Rings, doorbell and interrupt stay the same. If anything fails before the old worker was to
//! leave, the application stays with it. If that worker then ends and only it had contents, or
//! hangs as it ends, or if the new one has ended when it is to go on, the application is lost. Applications move one by one, so that each is stopped only for
//! its own move; each has its own deadline. Before and after its own move, an application belongs
//! to the port's thread.

use std::{
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use base::{Cancel, Chain, Patience, Unpoisoned};
use device_model::thread::ThreadRole;
use remoting_proto::{
    apis::{self, spoken},
    port::State,
    wire::{
        api::ApiId,
        hello::{Form, Hello},
    },
};
use remoting_relocation::{
    failure::NotMoved,
    transfer::{self, Plan},
};
use remoting_transport::{
    control::{Command, Failure, LONG, Peer, SOON, Worker},
    socket,
    worker_control::Destination,
};

use super::{
    attach::Pool,
    handle::{AGAIN, Coming, NATIVE, Standby, Waiting},
    lend::{Borrowed, Replaced},
};

pub use super::{
    handle::Handle,
    wish::{Address, Answer, NoAddress, Seat, Unknown},
};
pub use remoting_proto::port::{Outcome, OutcomeKind};

/// A request to move applications.
#[derive(Clone, Debug)]
pub struct Move {
    /// The slice whose application moves; if absent, all applications of the port and all future
    /// ones.
    pub slice: Option<u32>,
    /// Their new pool.
    pub to: Pool,
    /// How long each may continue the work that its device is executing.
    pub drain: Duration,
    /// Whether they continue before large contents of their memory have been transferred
    /// (postcopy).
    pub postcopy: bool,
    /// Cancels the move: applications that have not moved by then stay.
    pub cancel: Cancel,
    /// Set when the last application has moved, although contents may still follow: from then on
    /// there is nothing to cancel.
    pub all_gone: Arc<AtomicBool>,
}

/// Result of a move.
#[derive(Debug)]
pub struct Moved {
    /// The request.
    pub asked: Move,
    /// The slices whose applications have moved.
    pub slices: Vec<u32>,
    /// Why other applications stay, or are lost.
    pub reasons: Vec<String>,
}

/// Result of a request to the agent.
#[derive(Debug)]
pub struct Seated {
    /// The requested server of applications.
    pub by: Seat,
    /// The agent's reply, or why there is none.
    pub outcome: Result<Answer, Unknown>,
}

impl Handle {
    /// Moves applications on a separate thread, which passes the result to `done`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(&self, asked: Move, done: impl FnOnce(Moved) + Send + 'static) -> io::Result<()> {
        let port = self.clone();
        let work = Box::new(move || done(port.carry_out(asked)));
        let name = format!("{}_mv", self.thread_name);
        self.spawner.spawn(ThreadRole::Accel, &name, work).map(drop)
    }

    /// Asks the guest's agent to let this server serve its applications, on a separate thread,
    /// which passes the result to `done`.
    ///
    /// # Errors
    /// No thread can be started.
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

    /// Like [`start_seats`](Self::start_seats), on the calling thread.
    ///
    /// # Errors
    /// The result is unknown.
    pub fn ask_seats(
        &self,
        by: &Seat,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Answer, Unknown> {
        self.mailbox.ask(&self.slices, by, patience, cancel)
    }

    /// Withdraws the last request, whether or not it was carried out: an agent that starts later
    /// does not execute it.
    pub fn withdraw_seats(&self) {
        self.mailbox.withdraw();
    }

    /// Withdraws the request with this number, unless another one has taken its place.
    pub fn withdraw_own_seats(&self, number: u8) {
        self.mailbox.withdraw_own(number);
    }

    fn carry_out(&self, asked: Move) -> Moved {
        let mut moved = Moved {
            asked,
            slices: Vec::new(),
            reasons: Vec::new(),
        };
        if self.is_native() {
            moved.reasons.push(NATIVE.to_owned());
            return moved;
        }
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
            // Applications that start from now on need not move.
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
        // Until an application's turn comes, the port must notice the end of its worker and close
        // its slice.
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

    /// Checks that the pool serves all APIs of the port, as far as it tells: future applications
    /// would be refused. For a port with a single API, the move of its applications shows this.
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

    /// Moves the applications of these slices, as far as they still exist.
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
            // Each application has its own deadline, so that one that times out costs the others
            // nothing.
            let patience = Patience::new(drain.saturating_add(LONG), cancel.clone());
            match self.carry_over(borrowed, &to, &Plan { drain, postcopy }, &patience) {
                Ok(old) => {
                    moved.slices.push(*slice as u32);
                    let is_last = at + 1 == slices.len();
                    all_gone.store(is_last, Ordering::SeqCst);
                    let is_over = || cancel.is_cancelled() && !is_last;
                    let why = old.and_then(|old| self.wait_for_contents(old, is_over));
                    moved.reasons.extend(why);
                }
                Err(error) => {
                    let why = format!("the application of slice {slice} {}", Chain(&error));
                    moved.reasons.push(why);
                }
            }
        }
    }

    /// Moves an application. Returns the worker that it has left, from which contents may follow.
    /// An error is the reason why it stays, or is lost.
    fn carry_over(
        &self,
        mut borrowed: Borrowed,
        to: &Pool,
        plan: &Plan,
        patience: &Patience,
    ) -> Result<Option<OldWorker>, NotMoved> {
        if patience.is_cancelled() {
            return Err(Failure::Cancelled.into());
        }
        let fetches = plan.postcopy.then(UnixStream::pair).transpose();
        let (asked, asks) = fetches.map_err(Failure::Socket)?.unzip();
        let stream = self.connect(borrowed.slice, to, patience)?;
        let destination = Destination::new(stream, 1, asks);
        let arrival = transfer::relocate(borrowed.source()?, destination, plan, patience)?;
        let new = match arrival.go() {
            Ok(new) => new.into_channel(),
            Err(error) => {
                borrowed.leave();
                return Err(NotMoved::Lost(error));
            }
        };
        let slice = borrowed.slice;
        let old = borrowed.replace(new);
        Ok(old.map(|worker| OldWorker {
            slice,
            worker,
            asked,
        }))
    }

    /// Waits until all contents of an application have been transferred and its old worker has
    /// ended, or until `is_over`. In the latter case the transfer continues on a separate thread.
    /// Returns a message for the result, if there is one.
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
            // Without a thread, wait for it here.
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

    /// Transfers contents of an application until all have arrived and its old worker has ended.
    /// Returns why some are lost, if any are.
    fn bring(&self, old: OldWorker) -> Option<String> {
        let OldWorker {
            slice,
            worker,
            asked,
        } = old;
        let brought = asked.map_or(Ok(()), |asked| {
            worker.bring(&asked, |_| {
                self.slices.followed.fetch_add(1, Ordering::Relaxed);
            })
        });
        if let Err(error) = worker.end(&Patience::within(SOON)) {
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

    /// Sockets on which workers that have taken over applications will request the contents that
    /// follow, when the port resumes; by slice.
    ///
    /// # Errors
    /// No socket can be created.
    pub fn asking(&self) -> io::Result<Vec<(u32, UnixStream)>> {
        let mut coming = self.coming();
        let pair = |worker: &mut Waiting| {
            let (asked, asks) = UnixStream::pair()?;
            worker.asks = Some(asks);
            Ok((worker.slice as u32, asked))
        };
        coming.workers.iter_mut().map(pair).collect()
    }

    /// Lets workers of the port's pool take over the applications of a snapshot, concurrently;
    /// workers that already have a part of one are used first. None of them serves before the port
    /// resumes.
    ///
    /// # Errors
    /// All reasons why some applications cannot be taken over.
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
        let mut keep = |slice: usize, step: Result<UnixStream, Failure>| match step {
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
                who: Worker::Destination,
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
                who: Worker::Destination,
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
    /// Socket on which the new worker requests contents.
    asked: Option<UnixStream>,
}

/// Whether a pool serves an API; `None` if it does not tell.
fn is_served(pool: &Path, api: ApiId, patience: &Patience) -> Option<bool> {
    let stream = socket::connect(pool).ok()?;
    socket::refuse_files(&stream);
    socket::send_hello(&stream, Hello::asks(spoken(api)), &[]).ok()?;
    patience.readable(stream.as_fd()).ok()?;
    let (bytes, _) = socket::receive_hello(&stream).ok()?;
    let heard = Hello::check(&bytes, &apis::ALL).ok()?;
    (heard.form == Form::Asks).then_some(heard.api == api)
}

/// Checks that a process listens there.
fn reachable(to: &Pool) -> io::Result<()> {
    match socket::connect(&to.socket) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}
