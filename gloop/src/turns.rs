//! Shares a GPU with other processes, in turns that an arbiter (`gantry-arbiter`) grants.
//!
//! ```text
//!   arbiter ── grant page: which turn is over, do others wait ──► kernel (where the GPU reads it)
//!      │  ▲                                                     └───► this process: a thread listens
//!      │  └── Want, Again, Done; what was used                              │ stop word of the job
//!      └───── a byte: something has changed ────────────────────────────────┘──► kernel
//! ```
//!
//! A job only runs in turns. When its turn is over and others wait, it is stopped between two of its callbacks, and
//! continues in its next turn. If all of a job's blocks wait for files or sockets while others want the GPU, it ends
//! its turn, and asks for another one when something has arrived. A turn lasts for as long as nobody else wants the
//! GPU.
//!
//! A job that stops in time is charged by its own report. A kernel that ignores the arbiter is charged by the arbiter's
//! clock, and its process is killed at the arbiter's limit.
//!
//! The arbiter ends a process that hangs up, since its kernels might still run. So a process joins once, and belongs to
//! the arbiter (or its successor) until it ends. Name and weight are the process's own claim: see
//! [`introduce::introduce_self`] for why that is sufficient.

use std::{
    io,
    ops::RangeInclusive,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use remoting_turns::{
    introduce,
    message::{self, OtherArbiter, Word},
    page::claim,
    session::{self, NoSession, Session},
};

use crate::state::State;

pub use remoting_turns::message::Join;

/// The interval at which to check whether a kernel has ended by itself.
const LOOK: Duration = Duration::from_micros(100);
/// How long to poll for the end of a kernel after it was stopped.
const SPIN: Duration = Duration::from_micros(200);
/// How long before and after the expected start or end of a turn to poll for it without sleeping. Otherwise two threads
/// of this process would have to wake up while the GPU is idle.
const NEAR: Duration = Duration::from_micros(300);

/// Whether this process has joined.
static JOINED: AtomicBool = AtomicBool::new(false);

/// Why there are no turns.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A process can only join once.
    #[error("this process has joined an arbiter already: it belongs to it until it ends")]
    Twice,
    /// Every arbiter would refuse it.
    #[error(
        "a client of the arbiter has a name without control characters, and a weight from 1 to 10000"
    )]
    Refused,
    /// The arbiter is of another build.
    #[error(transparent)]
    Other(#[from] OtherArbiter),
    /// A system call has failed.
    #[error("cannot join an arbiter")]
    System(#[from] io::Error),
}

/// Work that runs in turns: kernels that can be stopped, and continue where they were.
pub trait Resumable {
    /// Why it cannot continue.
    type Error: From<Error>;

    /// Sets the arbiter to use from now on. The work does not run at this time.
    fn meet(&mut self, session: &Arc<Session>);

    /// Begins or continues in the turn whose number has this lower half.
    ///
    /// # Errors
    /// It cannot.
    fn resume_in(&mut self, turn: u32) -> Result<(), Self::Error>;

    /// Returns the state immediately.
    ///
    /// # Errors
    /// It has failed.
    fn look(&mut self) -> Result<State, Self::Error>;

    /// The turn is over: the work has to leave the GPU soon.
    fn stop(&self);

    /// Others want the GPU: the work has to leave it when it only waits.
    fn contend(&self);

    /// Waits until there is something to do for the work.
    fn wait_for_more(&self);
}

/// What the listening thread has received.
#[derive(Debug, Default)]
struct Heard {
    session: Option<Arc<Session>>,
    apart: Option<OtherArbiter>,
}

#[derive(Debug, Default)]
struct Ear {
    heard: Mutex<Heard>,
    changed: Condvar,
}

impl Ear {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, heard: MutexGuard<'a, Heard>) -> MutexGuard<'a, Heard> {
        let waited = self.changed.wait(heard);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for<'a>(&self, heard: MutexGuard<'a, Heard>, time: Duration) -> MutexGuard<'a, Heard> {
        let waited = self.changed.wait_timeout(heard, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn tell(&self, change: impl FnOnce(&mut Heard)) {
        change(&mut self.heard());
        self.changed.notify_all();
    }
}

/// This process as one of those that share a GPU.
#[derive(Debug)]
pub struct Member {
    ear: Arc<Ear>,
    session: Option<Arc<Session>>,
    /// The number of turns that it had had when it asked for another one.
    asked: Option<u64>,
    /// How long it waited for its last turn, if it had the previous one and asked for another one immediately. The next
    /// wait is expected to be as long, if the turns of others are alike.
    waited: Option<Duration>,
    /// The time on the GPU, and the number of launches, in this session.
    used: Duration,
    launches: u64,
    turns: u64,
}

/// Whether a moment is near that is expected this long after the start.
fn is_near(expected: Duration, since: Instant) -> bool {
    let now = since.elapsed();
    now + NEAR >= expected && now <= expected + NEAR
}

/// The weights that arbiters accept.
const WEIGHTS: RangeInclusive<u32> = 1..=10_000;

impl Member {
    /// Joins the arbiter at this socket, or whichever is there later.
    ///
    /// # Errors
    /// This process has joined before, an arbiter would refuse the name or the weight, or the thread could not be
    /// created.
    pub fn join(arbiter: PathBuf, join: &Join) -> Result<Self, Error> {
        let is_name = !join.name.is_empty() && !join.name.contains(char::is_control);
        if !is_name || !WEIGHTS.contains(&join.weight) {
            return Err(Error::Refused);
        }
        if JOINED.swap(true, Ordering::Relaxed) {
            return Err(Error::Twice);
        }
        let control = introduce::introduce_self("gloop", join, arbiter);
        let joined = control.map_err(Error::from).and_then(Self::with);
        if joined.is_err() {
            JOINED.store(false, Ordering::Relaxed);
        }
        joined
    }

    /// The same, introduced over this socket.
    fn with(control: UnixStream) -> Result<Self, Error> {
        let ear = Arc::new(Ear::default());
        let its = Arc::clone(&ear);
        thread::Builder::new()
            .name("turns".to_owned())
            .spawn(move || listen(&control, &its))?;
        Ok(Self {
            ear,
            session: None,
            asked: None,
            waited: None,
            used: Duration::ZERO,
            launches: 0,
            turns: 0,
        })
    }

    /// The number of turns so far.
    pub fn turns(&self) -> u64 {
        self.turns
    }

    /// Runs a job to its end, in turns.
    ///
    /// # Errors
    /// It has failed, or there is no arbiter of this build.
    pub fn run<J: Resumable>(&mut self, job: &mut J) -> Result<(), J::Error> {
        loop {
            let (session, turn) = self.turn()?;
            self.turns += 1;
            let ran = self.run_in(job, &session, turn);
            match ran {
                Ok(State::Ready | State::Running) => self.give_back(&session, Word::Again),
                _ => self.give_back(&session, Word::Done),
            }
            match ran? {
                State::Done => return Ok(()),
                State::Waiting => job.wait_for_more(),
                State::Ready | State::Running => {}
            }
        }
    }

    /// Waits for a turn. Returns its number.
    fn turn(&mut self) -> Result<(Arc<Session>, u64), Error> {
        loop {
            let session = self.arbiter()?;
            let count = || session.grant().turn.load(Ordering::Acquire);
            let since = Instant::now();
            let (before, expected) = match self.asked.take() {
                Some(before) => (before, self.waited.take()),
                None => {
                    let before = count();
                    self.waited = None;
                    // If the arbiter is gone, the listening thread notices.
                    let _ = Word::Want.say(session.stream());
                    (before, None)
                }
            };
            let mut heard = self.ear.heard();
            while !session.is_gone() {
                let turn = count();
                if turn != before {
                    drop(heard);
                    self.waited = Some(since.elapsed());
                    return Ok((session, turn));
                }
                heard = match expected {
                    Some(expected) if is_near(expected, since) => {
                        drop(heard);
                        while count() == before && is_near(expected, since) {
                            thread::yield_now();
                        }
                        self.ear.heard()
                    }
                    Some(expected) if since.elapsed() < expected => {
                        let rest = expected.saturating_sub(NEAR + since.elapsed());
                        self.ear.wait_for(heard, rest)
                    }
                    _ => self.ear.wait(heard),
                };
            }
        }
    }

    /// Returns the current arbiter, or waits for one.
    fn arbiter(&mut self) -> Result<Arc<Session>, Error> {
        let mut heard = self.ear.heard();
        loop {
            if let Some(apart) = heard.apart {
                return Err(apart.into());
            }
            if let Some(session) = heard.session.clone().filter(|one| !one.is_gone()) {
                drop(heard);
                let is_known = |known: &Arc<Session>| Arc::ptr_eq(known, &session);
                if !self.session.as_ref().is_some_and(is_known) {
                    // A new session counts from zero.
                    (self.used, self.launches, self.asked) = (Duration::ZERO, 0, None);
                    self.session = Some(Arc::clone(&session));
                }
                return Ok(session);
            }
            heard = self.ear.wait(heard);
        }
    }

    /// Runs a job until it has left the GPU. Returns its state.
    fn run_in<J: Resumable>(
        &mut self,
        job: &mut J,
        session: &Arc<Session>,
        turn: u64,
    ) -> Result<State, J::Error> {
        job.meet(session);
        // The lower half, as the arbiter publishes it.
        let number = turn as u32;
        job.resume_in(number)?;
        self.launches += 1;
        let account = session.account();
        account.calls.store(self.launches, Ordering::Relaxed);
        let begun = Instant::now();
        let mut seen = begun;
        let mut stopped = None;
        loop {
            let state = job.look()?;
            // No request is reported to be in flight: a kernel that can be stopped has no limit. One that does not stop
            // has the arbiter's limit, by the arbiter's clock.
            let now = Instant::now();
            self.used += now - seen;
            seen = now;
            let used = u64::try_from(self.used.as_nanos()).unwrap_or(u64::MAX);
            account.busy.store(used, Ordering::Relaxed);
            if state != State::Running {
                return Ok(state);
            }
            let grant = session.grant();
            let over = || session.is_gone() || grant.stop.load(Ordering::Acquire) == number;
            match stopped {
                None if over() => {
                    job.stop();
                    stopped = Some(now);
                }
                Some(since) if now - since < SPIN => {
                    std::hint::spin_loop();
                    continue;
                }
                _ => {}
            }
            if stopped.is_none() && grant.contended.load(Ordering::Relaxed) != 0 {
                job.contend();
                if is_near(
                    Duration::from_nanos(grant.slice.load(Ordering::Relaxed)),
                    begun,
                ) {
                    thread::yield_now();
                    continue;
                }
            }
            let heard = self.ear.heard();
            if stopped.is_some() || !over() {
                // Whatever has ended the wait, everything is checked again.
                drop(self.ear.wait_for(heard, LOOK));
            }
        }
    }

    fn give_back(&mut self, session: &Session, word: Word) {
        // Before the arbiter can grant the next turn.
        let had = session.grant().turn.load(Ordering::Acquire);
        self.asked = (word == Word::Again).then_some(had);
        session
            .account()
            .claim
            .store(claim::NONE, Ordering::Release);
        // If the arbiter is gone, the listening thread notices.
        let _ = word.say(session.stream());
    }
}

/// Listens to one arbiter after another, as long as there can be another one.
fn listen(control: &UnixStream, ear: &Ear) {
    let mut hung_up = 0;
    loop {
        let session = match Session::open(control) {
            Ok(session) => Arc::new(session),
            Err(NoSession::Other(other)) => return ear.tell(|heard| heard.apart = Some(other)),
            Err(NoSession::HungUp(why)) => {
                hung_up += 1;
                if hung_up == 2 {
                    base::note!("gloop: {why}");
                }
                session::pause(hung_up);
                continue;
            }
            // The arbiter has ended meanwhile.
            Err(NoSession::System(_)) => {
                session::pause(0);
                continue;
            }
        };
        hung_up = 0;
        ear.tell(|heard| heard.session = Some(Arc::clone(&session)));
        while message::listen(session.stream()).is_ok() {
            ear.tell(|_| {});
        }
        session.end();
        ear.tell(|heard| heard.session = None);
        base::note!("gloop: the arbiter has ended: this program waits for another one");
    }
}

#[cfg(test)]
mod host_kernel;
#[cfg(test)]
mod tests;
