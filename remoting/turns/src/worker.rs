//! A worker's side of taking turns.
//!
//! The serving thread asks [`Turns::may_submit`] before each request. During its turn, and while nobody else waits,
//! that costs two loads of shared memory, a look at the clock and the meter: no system call. A separate thread waits
//! for the arbiter's messages and for its end. An arbiter's end takes the turn away, and the worker continues when
//! there is another arbiter.
//!
//! If the device serves workers in time slices, and all workers can set theirs, the arbiter lets everybody submit at any
//! time. The same thread then does what the arbiter says about slices and stops, and the serving thread reports what
//! requests use.

use std::{
    fmt, io,
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::{
        Arc, Mutex,
        atomic::{Ordering, fence},
    },
    thread,
    time::Duration,
};

use base::{Unpoisoned, poll};
use remoting_proto::wire::api::RequestClass;

use super::{
    Moment, introduce,
    message::{self, HangsUp, Join, OtherArbiter, Word},
    meter::{Meter, Slice, Verdict},
    page::{Mode, claim},
    pauses::{Expected, Pauses},
    presence::Presence,
    session::{self, NoSession, Session},
    slices::{DRIVERS_SLICE, Sliced, Slices},
    usage::Usage,
    waits::Waiting,
};

/// Maximum number of requests that the driver has at a time while the device serves workers in time slices.
const AHEAD: usize = 1024;
/// How often use is reported at least while requests complete.
const REPORT: Duration = Duration::from_millis(4);

/// A turn is returned this long before its work is expected to end, so that the next one has begun by then: reaching
/// the next worker takes 150 us, and submitting 50.
const LEAD: Duration = Duration::from_micros(300);

/// A message to the serving thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// Something has changed.
    Look,
    /// There is no arbiter for this worker, and there will be none.
    Apart(OtherArbiter),
    /// There is no arbiter until people act; sent once.
    HangsUp(HangsUp),
}

/// State shared by the listening thread and the serving thread.
#[derive(Debug, Default)]
struct Link {
    session: Mutex<Option<Arc<Session>>>,
}

impl Link {
    fn session(&self) -> Option<Arc<Session>> {
        let session = self.session.lock_unpoisoned();
        session.clone().filter(|session| !session.is_gone())
    }
}

/// The worker's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It does not have the device and has not asked for it.
    Without,
    /// It has asked when it had had so many turns.
    Asked(u64),
    /// It has the device.
    Has,
    /// It has the device, does not use it, and lets it be taken away; whether somebody waits or not.
    Parked,
}

/// Takes part in sharing a device.
pub struct Turns {
    link: Arc<Link>,
    session: Option<Arc<Session>>,
    standing: Standing,
    meter: Meter,
    pauses: Pauses,
    /// What requests use of time slices, and for how long there are some; kept by workers that can set their slices.
    sliced: bool,
    mode: Mode,
    completions: u64,
    usage: Usage,
    presence: Presence,
    waiting: Waiting,
    /// By when a turn that was given back is to be over.
    promised: Option<Moment>,
    overrun: Duration,
    /// How long the device had been busy with its requests when the session began.
    before: Duration,
    /// The turn that begins wakes the client.
    coschedule: bool,
    calls: u64,
    synchronous: u64,
    memory: u64,
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns")
            .field("standing", &self.standing)
            .field("meter", &self.meter)
            .finish_non_exhaustive()
    }
}

impl Turns {
    /// Takes part as `join` says; `control` is the socket to the pool, and `tell` tells the serving
    /// thread what has happened. Without `slices`, the worker joins as one that cannot set its time slices.
    pub fn start(
        control: UnixStream,
        join: &Join,
        slices: Option<Box<dyn Slices>>,
        tell: impl Fn(News) + Send + 'static,
    ) -> io::Result<Self> {
        let sliced = slices.is_some();
        let join = Join {
            sliced,
            ..join.clone()
        };
        introduce::belong(&control, &join)?;
        let mut slices = slices.map(Sliced::new);
        let link = Arc::new(Link::default());
        let turns = Self {
            link: Arc::clone(&link),
            session: None,
            standing: Standing::Without,
            meter: Meter::default(),
            pauses: Pauses::default(),
            sliced,
            mode: Mode::default(),
            completions: 0,
            usage: Usage::default(),
            presence: Presence::default(),
            waiting: Waiting::default(),
            promised: None,
            overrun: Duration::ZERO,
            before: Duration::ZERO,
            coschedule: false,
            calls: 0,
            synchronous: 0,
            memory: 0,
        };
        thread::Builder::new()
            .name("turns".to_owned())
            .spawn(move || {
                // A pool that has ended takes this process with it.
                let mut hung_up = 0;
                let end = || {
                    base::note!(
                        "gantry-accel: the arbiter has ended: this worker waits for another one"
                    )
                };
                while listen(&control, &link, &mut slices, &tell, end, &mut hung_up).is_ok() {}
            })?;
        Ok(turns)
    }

    /// Whether the next request may be submitted now. If not, the worker asks for the device or
    /// gives it back as need be; the request is to be kept until this says yes. `stuck` says that
    /// what is outstanding cannot end before the client does something, so that waiting for it
    /// would be for ever.
    pub fn may_submit(&mut self, kind: RequestClass, stuck: bool, now: Moment) -> bool {
        self.pauses.end(self.meter.busy(), now);
        self.waiting.begin(now);
        let Some(session) = self.current() else {
            return false;
        };
        if self.sliced && self.mode.is_slices() {
            self.presence.begin(now);
            return stuck || self.meter.outstanding() < AHEAD;
        }
        if !self.hold(&session, now) {
            return false;
        }
        let alone = session.grant().contended.load(Ordering::Relaxed) == 0;
        match self.meter.verdict(kind, alone, now) {
            Verdict::Submit => true,
            Verdict::Wait | Verdict::Filled if stuck && !self.meter.is_over(now) => true,
            Verdict::Filled if !stuck && !alone && self.meter.ends_within(LEAD, now) => {
                self.promised = self.meter.expected_end();
                self.give_back(&session, Word::Again);
                false
            }
            Verdict::Wait | Verdict::Filled if !stuck => false,
            Verdict::Wait | Verdict::Filled | Verdict::Over => {
                self.give_back(&session, Word::Again);
                false
            }
        }
    }

    /// A call was carried out: who has submitted nothing by it, and has nothing outstanding, has no work.
    pub fn carried_out(&mut self, now: Moment) {
        if self.meter.outstanding() > 0 {
            return;
        }
        self.waiting.forget();
        if self.sliced {
            self.presence.rest(self.pauses.expected(), now);
            self.publish();
        }
    }

    /// Whether to say how long requests took by the device's clock ([`Self::took`]).
    pub fn measures(&self) -> bool {
        self.sliced
    }

    /// The oldest outstanding request has completed, so long after the one before it by the device's clock, if that is
    /// known. [`Self::completed`] must be called for it, too.
    pub fn took(&mut self, span: Option<Duration>, now: Moment) {
        self.usage.completed(span, self.time_slice(), now);
    }

    /// The length of this worker's time slices.
    fn time_slice(&self) -> Duration {
        let micros = |session: &Arc<Session>| session.grant().time_slice.load(Ordering::Relaxed);
        match self.session.as_ref().map_or(0, micros) {
            0 => DRIVERS_SLICE,
            micros => Duration::from_micros(micros.into()),
        }
    }

    /// The number of the outstanding request after whose end the arbiter is to be told what was used; `None` if it is not
    /// told.
    pub fn reports_after(&self) -> Option<usize> {
        let reports = self.sliced && self.mode.is_slices();
        self.usage.ending_after(REPORT).filter(|_| reports)
    }

    /// How long from now what was submitted in this turn is expected to take; none if nothing is
    /// outstanding, or nobody waits for its end.
    pub fn expected_end(&self, now: Moment) -> Option<Duration> {
        let end = self.meter.expected_end()?;
        self.is_waited_for().then(|| end.since(now))
    }

    /// Whether this worker has the device and somebody else waits for it.
    fn is_waited_for(&self) -> bool {
        let contended =
            |session: &Arc<Session>| session.grant().contended.load(Ordering::Relaxed) != 0;
        self.standing == Standing::Has && self.session.as_ref().is_some_and(contended)
    }

    /// Whether what was submitted in this turn is expected to end about now, while somebody waits
    /// for that: `soon` before or after.
    pub fn ends_within(&self, soon: Duration, now: Moment) -> bool {
        self.is_waited_for() && self.meter.ends_within(soon, now)
    }

    /// Gives the device back if the turn is over, nothing is outstanding and somebody waits.
    pub fn give_way(&mut self, now: Moment) {
        if self.is_waited_for() && self.meter.outstanding() == 0 && self.meter.is_over(now) {
            self.idle(false);
        }
    }

    /// Whether this turn is to begin with waking the client; says so once.
    pub fn coschedule(&mut self) -> bool {
        std::mem::take(&mut self.coschedule)
    }

    /// A request was submitted.
    pub fn submitted(&mut self, kind: RequestClass, now: Moment) {
        self.meter.submitted(kind, now);
        self.waiting.begin(now);
        if self.sliced {
            self.usage.submitted(kind, now);
            self.presence.begin(now);
        }
        self.calls += 1;
        self.publish();
    }

    /// The oldest outstanding requests have completed, so many of them, which was noticed at once.
    pub fn completed(&mut self, count: u32, now: Moment) {
        self.meter.completed_together(count, now);
        self.completions += u64::from(count);
        while self.usage.outstanding() > self.meter.outstanding() {
            self.usage.completed(None, self.time_slice(), now);
        }
        self.after_completion(now);
    }

    /// The outstanding request that has so many older ones before it, which wait for the client,
    /// has completed.
    pub fn completed_behind(&mut self, older: usize, now: Moment) {
        self.meter.completed_behind(older, now);
        self.completions += 1;
        self.usage.completed_behind(older, self.time_slice());
        self.after_completion(now);
    }

    fn after_completion(&mut self, now: Moment) {
        let waited = self.waiting.end(self.meter.outstanding() > 0, now);
        if let (Some(waited), Some(session)) = (waited, &self.session) {
            session.account().waits.count(waited);
        }
        if self.meter.outstanding() == 0 {
            self.keep_promise(now);
            self.pauses.begin(now);
            self.presence.rest(self.pauses.expected(), now);
        }
        self.publish();
    }

    /// The client waits for the answer to a call.
    pub fn synchronous(&mut self) {
        self.synchronous += 1;
    }

    /// The client has so many bytes of device memory: nothing but a look, if it is known.
    pub fn memory(&mut self, bytes: u64) {
        let gone = self.session.as_deref().is_none_or(Session::is_gone);
        if self.memory != bytes || gone {
            self.memory = bytes;
            self.current();
            self.publish();
        }
    }

    /// There is nothing to do for a while. With nothing outstanding, or nothing that can end, the
    /// device can be taken away if nobody waits for it, or if the client is expected back; otherwise it
    /// is given back.
    pub fn idle(&mut self, stuck: bool) {
        if self.standing != Standing::Has || (self.meter.outstanding() > 0 && !stuck) {
            return;
        }
        let Some(session) = self.current() else {
            return;
        };
        // The way of sharing may have changed.
        if self.standing != Standing::Has {
            return;
        }
        let since = self.pauses.since().filter(|_| !stuck);
        let expected = since.map_or(Expected::default(), |_| self.pauses.expected());
        let account = session.account();
        for (place, value) in [
            (&account.away_since, since.map_or(0, Moment::nanos)),
            (&account.away_within, nanos(expected.within)),
            (&account.away_usual, nanos(expected.usual)),
            (&account.batch, nanos(expected.batch)),
        ] {
            place.store(value, Ordering::Relaxed);
        }
        let word = &account.claim;
        word.store(claim::IDLE, Ordering::Release);
        // The arbiter says first that somebody waits and then looks at the claim: one of both
        // sides sees what the other has written.
        fence(Ordering::SeqCst);
        let alone = session.grant().contended.load(Ordering::Relaxed) == 0;
        if alone || !expected.within.is_zero() {
            self.standing = Standing::Parked;
            if !alone {
                // As in `hold`.
                let _ = Word::Pause.say(session.stream());
            }
        } else if word
            .compare_exchange(
                claim::IDLE,
                claim::NONE,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
        {
            self.give_back(&session, Word::Done);
        } else {
            // The arbiter was faster, and knows.
            self.standing = Standing::Without;
        }
        // What it leaves in the driver is no longer in its time.
        self.publish();
    }

    /// The session, if it is still one; who has lost it has lost its turn.
    fn current(&mut self) -> Option<Arc<Session>> {
        if let Some(session) = &self.session
            && !session.is_gone()
        {
            let session = Arc::clone(session);
            self.follow(session.grant().mode());
            return Some(session);
        }
        self.standing = Standing::Without;
        self.session = self.link.session();
        self.mode =
            (self.session.as_ref()).map_or(Mode::default(), |session| session.grant().mode());
        if self.session.is_some() {
            // This arbiter counts from nothing, and knows nothing of the client.
            self.overrun = Duration::ZERO;
            self.before = self.meter.busy();
            self.publish();
        }
        self.session.clone()
    }

    /// When the way of sharing changes, nobody has a turn, and what was asked for is forgotten.
    fn follow(&mut self, mode: Mode) {
        if self.mode != mode {
            self.mode = mode;
            self.standing = Standing::Without;
            self.promised = None;
            if !mode.is_slices() && self.meter.outstanding() > 0 {
                // What the driver has runs on beside the turns: as what is left of a turn that is over.
                self.promised = Some(Moment::now());
                self.publish();
            }
        }
    }

    /// Notices whether the way of sharing has changed.
    pub fn look(&mut self) {
        if self.sliced {
            self.current();
        }
    }

    /// Whether the worker has the device; asks for it if it does not.
    fn hold(&mut self, session: &Session, now: Moment) -> bool {
        match self.standing {
            Standing::Has => return true,
            Standing::Asked(turns) => {
                if session.grant().turn.load(Ordering::Acquire) == turns {
                    return false;
                }
                self.coschedule = session.grant().coschedule.load(Ordering::Relaxed) != 0;
                self.begin(session, now);
                return true;
            }
            Standing::Parked => {
                let taken = session.account().claim.compare_exchange(
                    claim::IDLE,
                    claim::BUSY,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                if taken.is_ok() {
                    self.standing = Standing::Has;
                    // Who keeps its turn while others wait has what is left of it.
                    if session.grant().contended.load(Ordering::Relaxed) == 0 {
                        self.begin(session, now);
                    }
                    return true;
                }
            }
            Standing::Without => {}
        }
        self.standing = Standing::Asked(session.grant().turn.load(Ordering::Acquire));
        // If it is gone, the listening thread notices.
        let _ = Word::Want.say(session.stream());
        false
    }

    /// What was outstanding when a turn was given back is over, or belongs to the next one: if that
    /// has come later than was expected, the client owes it. (A little later is nobody's fault: the
    /// next one has begun.)
    fn keep_promise(&mut self, now: Moment) {
        if let Some(promised) = self.promised.take() {
            self.overrun += now.since(promised + LEAD * 2);
        }
    }

    fn begin(&mut self, session: &Session, now: Moment) {
        self.keep_promise(now);
        let slice = match session.grant().slice.load(Ordering::Relaxed) {
            0 => Slice::Request,
            nanos => Slice::Time(Duration::from_nanos(nanos)),
        };
        self.meter.begin(slice, now);
        self.standing = Standing::Has;
    }

    fn give_back(&mut self, session: &Session, word: Word) {
        self.standing = match word {
            Word::Again => Standing::Asked(session.grant().turn.load(Ordering::Acquire)),
            _ => Standing::Without,
        };
        self.publish();
        session
            .account()
            .claim
            .store(claim::NONE, Ordering::Release);
        // As in `hold`.
        let _ = word.say(session.stream());
    }

    /// Writes down what the arbiter may see: some stores.
    fn publish(&self) {
        let Some(session) = &self.session else {
            return;
        };
        let account = session.account();
        // What can only end when the client does something runs without the device.
        let uses = self.standing == Standing::Has || self.promised.is_some();
        let since = self.meter.running_since().filter(|_| uses);
        let since = since.map_or(0, Moment::nanos);
        account.running_since.store(since, Ordering::Relaxed);
        let busy = self.meter.busy().saturating_sub(self.before).as_nanos() as u64;
        account.busy.store(busy, Ordering::Relaxed);
        let overrun = self.overrun.as_nanos() as u64;
        account.overrun.store(overrun, Ordering::Relaxed);
        account.calls.store(self.calls, Ordering::Relaxed);
        account
            .synchronous
            .store(self.synchronous, Ordering::Relaxed);
        account.memory.store(self.memory, Ordering::Relaxed);
        if self.sliced {
            let oldest = self.usage.oldest(self.time_slice());
            let (since, long) = oldest.unwrap_or_default();
            account.long.store(long.into(), Ordering::Relaxed);
            for (place, value) in [
                (&account.oldest_since, since.nanos()),
                (&account.completions, self.completions),
                (&account.measured, nanos(self.usage.used())),
                (&account.present, nanos(self.presence.before)),
                (&account.present_since, self.presence.since.nanos()),
                (&account.present_until, self.presence.until.nanos()),
            ] {
                place.store(value, Ordering::Relaxed);
            }
        }
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// Takes part in sharing by time slices without seeing what is submitted, and takes no turns: does what arbiters say about
/// `slices` until this process is not introduced to any more. `join` is as for [`Turns::start`]; `tell` is told what prevents
/// that, and when the arbiter has changed how the device is shared: whether it is by time slices.
///
/// # Errors
/// The socket to whoever introduces this process is closed, or the thread cannot be started.
pub fn share_slices(
    control: UnixStream,
    join: &Join,
    slices: Box<dyn Slices>,
    tell: impl Fn(Sharing) + Send + 'static,
) -> io::Result<()> {
    let join = Join {
        sliced: true,
        ..join.clone()
    };
    introduce::belong(&control, &join)?;
    let mut slices = Some(Sliced::new(slices));
    let run = move || {
        let (link, mut hung_up) = (Link::default(), 0);
        let news = |news| match news {
            News::Look => {
                let session = link.session();
                if let Some(session) = session {
                    tell(Sharing::By(session.grant().mode()));
                }
            }
            News::Apart(other) => tell(Sharing::Apart(other)),
            News::HangsUp(why) => tell(Sharing::HangsUp(why)),
        };
        let end = || tell(Sharing::Ended);
        while listen(&control, &link, &mut slices, &news, end, &mut hung_up).is_ok() {
            if is_closed(&control) {
                return tell(Sharing::Abandoned);
            }
        }
    };
    thread::Builder::new()
        .name("slices".to_owned())
        .spawn(run)
        .map(drop)
}

/// What has become of sharing the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// It is shared in this way.
    By(Mode),
    /// The arbiter has ended. There may be another one.
    Ended,
    /// Nobody introduces this process to arbiters any more.
    Abandoned,
    /// There is no arbiter for this worker, and there will be none.
    Apart(OtherArbiter),
    /// There is no arbiter until people act; sent once.
    HangsUp(HangsUp),
}

/// Whether the other end of a socket is closed.
fn is_closed(stream: &UnixStream) -> bool {
    let mut polled = [libc::pollfd {
        fd: stream.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    }];
    poll::poll(&mut polled, Some(Duration::ZERO)).is_ok_and(|ready| ready > 0)
}

/// One session, from its begin to its end, of which `end` is told; `hung_up` counts arbiters that hang up instead of it. An
/// error: there is not going to be another one.
fn listen(
    control: &UnixStream,
    link: &Link,
    slices: &mut Option<Sliced>,
    tell: &impl Fn(News),
    end: impl Fn(),
    hung_up: &mut u32,
) -> Result<(), NoSession> {
    let session = match Session::open(control) {
        Ok(session) => Arc::new(session),
        Err(NoSession::Other(other)) => {
            tell(News::Apart(other));
            return Err(other.into());
        }
        Err(NoSession::HungUp(why)) => {
            *hung_up = hung_up.saturating_add(1);
            if *hung_up == 2 {
                tell(News::HangsUp(why));
            }
            session::pause(*hung_up);
            return Ok(());
        }
        Err(NoSession::System(_)) => {
            // The arbiter has ended meanwhile; if the pool has, nothing comes from it any more.
            session::pause(0);
            return Ok(());
        }
    };
    *hung_up = 0;
    let set = |value| *link.session.lock_unpoisoned() = value;
    set(Some(Arc::clone(&session)));
    // Before that is told: it may change meanwhile.
    let mut mode = session.grant().mode();
    tell(News::Look);
    loop {
        let again = slices.as_mut().and_then(|slices| slices.obey(&session));
        match wait(session.stream(), again) {
            Ok(false) => continue,
            Ok(true) if message::listen(session.stream()).is_ok() => {}
            _ => break,
        }
        // News about slices are not for the serving thread.
        let before = std::mem::replace(&mut mode, session.grant().mode());
        if before != mode || !mode.is_slices() {
            tell(News::Look);
        }
    }
    session.end();
    set(None);
    if let Some(slices) = slices {
        slices.release();
    }
    end();
    tell(News::Look);
    Ok(())
}

/// Waits until the arbiter says something or has ended, or for this time. Returns whether it does.
fn wait(stream: &UnixStream, patience: Option<Duration>) -> io::Result<bool> {
    let mut polled = [libc::pollfd {
        fd: stream.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    }];
    Ok(poll::poll(&mut polled, patience)? > 0)
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
