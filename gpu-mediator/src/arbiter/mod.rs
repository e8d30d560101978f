//! The arbiter: one process that shares one device among the workers of several virtual machines.
//!
//! It holds the state of scheduling and nothing else: killed and started again, it knows its
//! workers by their next connections. A worker's end frees what it had.
//!
//! Workers may lie. What they say of their use of the device decides nothing where another one could
//! be harmed: a turn that others wait for is charged by the clock, less what other clients are charged
//! for it. A process has one connection, by the handle with which its pool introduces it, and a
//! moment to say who it is. Its name and weight are its pool's word, too, which has heard them before
//! anything of an application ran in the worker: one that has been taken over changes neither.
//!
//! - [`connection`]: a worker, from its introduction to its last word.
//! - [`show`]: what there is to see.

pub mod connection;
mod show;

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::Duration,
};

use connection::{Newcomer, Worker};
use gantry_remoting::{
    descriptors::{self, Limit},
    link::closer::Closer,
    turns::message::Word,
};

use crate::{
    Expected, Moment, Slice,
    policy::{ClientId, Name, NoWeight, Weight},
    scheduler::{Dispatch, Scheduler},
    status,
};

/// How often the limit of run time is looked after.
const TICK: Duration = Duration::from_millis(20);
/// Who has the device and does not use it for so long loses it, whoever else waits, so that nothing is
/// left to be looked after. It costs a wait for the next turn.
const UNUSED: Duration = Duration::from_secs(1);
/// How long nobody is accepted after that has failed.
const PAUSE: Duration = Duration::from_millis(100);
/// So often a turn is prolonged at most, whoever would be next: a worker that does not give the device
/// back is looked after from the turn's end on.
const PROLONGED: u32 = 8;
/// Words of one worker that are taken in one go.
const WORDS: usize = 16;
/// Connections that are not workers yet: more are not accepted before one of them is none any more.
const NEWCOMERS: usize = 64;
/// How long a connection may take to become a worker.
const INTRODUCTION: Duration = Duration::from_secs(1);
/// The most workers, and the most machines that are remembered: beyond, newcomers are refused, and
/// machines without workers are forgotten.
const MOST: usize = 1024;

/// Why an arbiter ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error(
        "cannot listen on {path}: is another arbiter running, or may this user not write to its \
         folder?"
    )]
    Listen {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Waiting.
    #[error("cannot wait for workers")]
    Wait(#[source] io::Error),
}

/// Why a worker is refused.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Connection(#[from] connection::Error),
    #[error(transparent)]
    Weight(#[from] NoWeight),
    #[error("there are {MOST} workers already")]
    Many,
    #[error("its process has a connection already")]
    Twice,
}

/// A virtual machine.
#[derive(Debug)]
struct Vm {
    name: String,
    weight: Weight,
    workers: usize,
    /// Workers that want the device, in the order in which they asked.
    waiting: VecDeque<u64>,
    /// Of workers that have ended.
    calls: u64,
    synchronous_calls: u64,
    killed: u64,
}

/// A worker, and whose it is.
#[derive(Debug)]
struct Member {
    worker: Worker,
    vm: ClientId,
    /// What of its account the client was charged for.
    busy: u64,
    synchronous: u64,
    overrun: u64,
    /// When its requests were last seen to wait for those of another worker, or it came.
    behind: Moment,
    /// Its last turn, as long as requests of that can be with the device.
    over: Option<Over>,
    /// It was killed and has not ended yet.
    dying: bool,
}

/// A turn that is over.
#[derive(Clone, Copy, Debug)]
struct Over {
    /// Since when.
    ended: Moment,
    /// Until when its requests have been taken off the time of those whose turn it was then.
    counted: Moment,
}

/// Whether who has the device is told that its turn is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The turn is for one request, which ends by itself.
    Never,
    /// As soon as it is due and others wait.
    WhenDue,
    /// It was told.
    Told,
}

/// Who has the device.
#[derive(Clone, Copy, Debug)]
struct Turn {
    member: u64,
    /// By when it should be over if others wait.
    due: Moment,
    /// How long it was to be, and how often it may still be prolonged by that.
    length: Duration,
    prolongable: u32,
    stop: Stop,
    /// Since when every look has found it unused.
    unused: Option<Moment>,
    /// Others wait, and it was between two batches when that was looked at: until when it keeps the
    /// device.
    paused: Option<Moment>,
}

/// The arbiter.
#[derive(Debug)]
pub struct Arbiter {
    listener: UnixListener,
    readers: UnixListener,
    policy: Name,
    limit: Option<Duration>,
    started: Moment,
    scheduler: Scheduler,
    vms: BTreeMap<ClientId, Vm>,
    members: BTreeMap<u64, Member>,
    newcomers: Vec<Newcomer>,
    turn: Option<Turn>,
    /// The next number of a virtual machine, and of a worker.
    next: (u32, u64),
    /// When the policy wants to be asked again.
    ask: Option<Moment>,
    /// Until when nobody is accepted: that has just failed, for want of descriptors.
    deaf: Option<Moment>,
    closer: Closer,
}

/// Opens a socket that only this user reaches.
fn listen(path: &Path) -> Result<UnixListener, Error> {
    status::listen(path).map_err(|source| Error::Listen {
        path: path.to_owned(),
        source,
    })
}

/// What helps when nobody can be accepted, if that is known.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            "; raise the hard limit of open files (ulimit -Hn, or LimitNOFILE= of the service)"
        }
        _ => "",
    }
}

impl Arbiter {
    /// An arbiter that workers reach at `path`. A request that has the device for longer than
    /// `limit` costs its worker.
    pub fn new(path: &Path, policy: Name, limit: Option<Duration>) -> Result<Self, Error> {
        Ok(Self {
            listener: listen(path)?,
            readers: listen(&status::path(path))?,
            policy,
            limit,
            started: Moment::now(),
            scheduler: Scheduler::new(policy.make()),
            vms: BTreeMap::new(),
            members: BTreeMap::new(),
            newcomers: Vec::new(),
            turn: None,
            next: (0, 0),
            ask: None,
            deaf: None,
            closer: Closer::default(),
        })
    }

    /// Has nobody waited for who may stay away for longer than this between two batches
    /// ([`LONGEST_PAUSE`](crate::scheduler::LONGEST_PAUSE) otherwise); zero: nobody at all.
    pub fn set_longest_pause(&mut self, longest: Duration) {
        self.scheduler.set_longest_pause(longest);
    }

    /// Shares the device, for ever.
    pub fn run(mut self) -> Result<(), Error> {
        // There may be more workers than the usual soft limit allows.
        if let Err(error) = Limit::raise() {
            log::warn!("cannot raise the limit of file descriptors: {error}");
        }
        loop {
            self.step(None).map_err(Error::Wait)?;
        }
    }

    /// Sleeps until something has happened, or for some time if that is bounded, and deals with it.
    ///
    /// # Errors
    /// As of poll(2).
    pub fn step(&mut self, patience: Option<Duration>) -> io::Result<()> {
        let ready = self.wait(patience)?;
        self.deaf = self.deaf.filter(|until| Moment::now() < *until);
        self.accept(ready.contains(&self.listener.as_raw_fd()));
        if ready.contains(&self.readers.as_raw_fd()) {
            self.show();
        }
        self.handshake(&ready);
        let ids: Vec<u64> = self.members.keys().copied().collect();
        for id in ids {
            self.hear(id, &ready);
        }
        self.enforce(Moment::now());
        self.stop_overdue(Moment::now());
        self.let_go(Moment::now());
        self.end_pause(Moment::now());
        self.dispatch();
        self.give_up(Moment::now());
        Ok(())
    }

    /// Sleeps until something has happened, or for some time; the descriptors that are ready.
    fn wait(&self, patience: Option<Duration>) -> io::Result<Vec<i32>> {
        let members = self.members.values();
        // Nothing is polled for at the number -1.
        let polled_if =
            |hears, listener: &UnixListener| if hears { listener.as_raw_fd() } else { -1 };
        let hears = self.deaf.is_none();
        let listeners = [
            polled_if(hears && self.newcomers.len() < NEWCOMERS, &self.listener),
            polled_if(hears, &self.readers),
        ];
        let mut polled: Vec<libc::pollfd> = listeners
            .into_iter()
            .chain(self.newcomers.iter().map(Newcomer::fd))
            .chain(members.flat_map(|member| {
                // Of one that is about to end, only the end matters.
                let words = (!member.dying).then(|| member.worker.fd());
                [words.unwrap_or(-1), member.worker.end()]
            }))
            .map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        let left = |moment: Moment| moment.since(Moment::now());
        let (ask, deaf) = (self.ask.map(left), self.deaf.map(left));
        let pause = self.turn.and_then(|turn| turn.paused).map(left);
        let overdue = self.turn.filter(|turn| self.is_to_stop(turn));
        let overdue = overdue.map(|turn| left(turn.due));
        let tick = (self.limit.is_some() && self.is_used()).then_some(TICK);
        let newcomers = self.newcomers.iter().map(Newcomer::since).min();
        let silent = newcomers.map(|since| left(since + INTRODUCTION));
        let times = [ask, pause, overdue, deaf, tick, silent, patience];
        let patience = times.into_iter().flatten().min();
        descriptors::poll(&mut polled, patience)?;
        let ready = polled.into_iter().filter(|entry| entry.revents != 0);
        Ok(ready.map(|entry| entry.fd).collect())
    }

    /// Accepts one connection, if there is one. Without a descriptor for it, nobody is accepted for
    /// a while: whoever waits is there again at once.
    fn accept_at(&mut self, listener: fn(&Self) -> &UnixListener) -> Option<UnixStream> {
        match listener(self).accept() {
            Ok((stream, _)) => Some(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => {
                log::warn!(
                    "nobody is accepted for {} ms: {error}{}",
                    PAUSE.as_millis(),
                    remedy(&error)
                );
                self.deaf = Some(Moment::now() + PAUSE);
                None
            }
        }
    }

    fn accept(&mut self, ready: bool) {
        if !ready || self.newcomers.len() >= NEWCOMERS {
            return;
        }
        if let Some(stream) = self.accept_at(|arbiter| &arbiter.listener)
            && let Ok(newcomer) = Newcomer::new(stream, &self.closer)
        {
            self.newcomers.push(newcomer);
        }
    }

    /// Reads newcomers' first messages.
    fn handshake(&mut self, ready: &[i32]) {
        for mut newcomer in std::mem::take(&mut self.newcomers) {
            if !ready.contains(&newcomer.fd()) {
                self.newcomers.push(newcomer);
                continue;
            }
            let read = newcomer.read();
            let whose = newcomer.whose();
            let joined = match read {
                Ok(false) => self.admit(newcomer),
                Ok(true) => self.join(newcomer),
                Err(connection::Error::Ended) => continue,
                Err(error) => Err(error.into()),
            };
            if let Err(error) = joined {
                log::warn!("a worker of {whose} was refused: {error}");
            }
        }
    }

    /// Lets a newcomer go on whose process has no other connection; an older newcomer of it goes.
    /// A worker comes back when its arbiter has ended, and one whose connection has ended is killed:
    /// no honest one comes twice.
    fn admit(&mut self, newcomer: Newcomer) -> Result<(), Refused> {
        if let Some(process) = newcomer.process() {
            let mut members = self.members.values();
            if members.any(|member| member.worker.process().is(process)) {
                return Err(Refused::Twice);
            }
            self.newcomers
                .retain(|other| !other.process().is_some_and(|other| other.is(process)));
        }
        self.newcomers.push(newcomer);
        Ok(())
    }

    /// Hangs up on newcomers that have not said who they are in time.
    fn give_up(&mut self, now: Moment) {
        self.newcomers.retain(|newcomer| {
            let keep = now.since(newcomer.since()) < INTRODUCTION;
            if !keep {
                log::warn!(
                    "a worker of {} has not said who it is for {} ms: it is not waited for",
                    newcomer.whose(),
                    INTRODUCTION.as_millis()
                );
            }
            keep
        });
    }

    fn join(&mut self, newcomer: Newcomer) -> Result<(), Refused> {
        if self.members.len() >= MOST {
            return Err(Refused::Many);
        }
        let (worker, join) = newcomer.join()?;
        let weight = Weight::try_from(join.weight)?;
        // Who has no workers may come back with another weight.
        self.forget(|vm| vm.name == join.name && vm.weight != weight);
        let known = self.vms.iter().find(|(_, vm)| vm.name == join.name);
        let vm = match known {
            Some((id, vm)) => {
                if vm.weight != weight {
                    log::warn!(
                        "{}: weight {} stays as long as it has workers, and does not become {}",
                        vm.name,
                        vm.weight.get(),
                        join.weight
                    );
                }
                *id
            }
            None => self.add(join.name, weight),
        };
        if let Some(vm) = self.vms.get_mut(&vm) {
            vm.workers += 1;
        }
        self.next.1 += 1;
        let member = Member {
            worker,
            vm,
            busy: 0,
            synchronous: 0,
            overrun: 0,
            behind: Moment::now(),
            over: None,
            dying: false,
        };
        self.members.insert(self.next.1, member);
        Ok(())
    }

    /// Forgets machines that have no workers.
    fn forget(&mut self, which: impl Fn(&Vm) -> bool) {
        let scheduler = &mut self.scheduler;
        self.vms.retain(|id, vm| {
            let keep = vm.workers > 0 || !which(vm);
            if !keep {
                scheduler.leave(*id, Moment::now());
            }
            keep
        });
    }

    fn add(&mut self, name: String, weight: Weight) -> ClientId {
        if self.vms.len() >= MOST {
            self.forget(|_| true);
        }
        let id = ClientId(self.next.0);
        self.next.0 = self.next.0.wrapping_add(1);
        self.scheduler.join(id, weight, Moment::now());
        let vm = Vm {
            name,
            weight,
            workers: 0,
            waiting: VecDeque::new(),
            calls: 0,
            synchronous_calls: 0,
            killed: 0,
        };
        self.vms.insert(id, vm);
        id
    }

    /// Takes a worker's words, or its end.
    fn hear(&mut self, id: u64, ready: &[i32]) {
        let Some(member) = self.members.get(&id) else {
            return;
        };
        let (words, process) = (member.worker.fd(), member.worker.end());
        if ready.contains(&process) {
            return self.leave(id);
        }
        if member.dying || !ready.contains(&words) {
            return;
        }
        for _ in 0..WORDS {
            let Some(member) = self.members.get_mut(&id) else {
                return;
            };
            match member.worker.word() {
                Ok(Some(word)) => self.obey(id, word),
                Ok(None) => return,
                Err(error) => {
                    if !matches!(error, connection::Error::Ended) {
                        log::warn!("a worker of {} is ended: {error}", self.name_of(id));
                    }
                    // A process that has closed its connection may still use the device. It is
                    // over when the process is.
                    if let Some(member) = self.members.get_mut(&id) {
                        member.dying = true;
                        member.worker.kill();
                    }
                    return;
                }
            }
        }
    }

    fn name_of(&self, id: u64) -> &str {
        self.members
            .get(&id)
            .and_then(|member| self.vms.get(&member.vm))
            .map_or("", |vm| vm.name.as_str())
    }

    fn obey(&mut self, id: u64, word: Word) {
        let has = self.turn.is_some_and(|turn| turn.member == id);
        match word {
            Word::Want if !has => self.want(id),
            Word::Done if has => {
                let vm = self.members.get(&id).map(|member| member.vm);
                self.end_turn(true);
                if let Some(vm) = vm {
                    let now = Moment::now();
                    self.scheduler.away(vm, Expected::default(), now, now);
                }
            }
            Word::Again if has => {
                self.end_turn(true);
                self.want(id);
            }
            // A turn that was taken away meanwhile, or nonsense that harms nobody.
            Word::Again => self.want(id),
            Word::Pause if has => self.review(Moment::now()),
            Word::Want | Word::Done | Word::Pause => {}
        }
    }

    fn want(&mut self, id: u64) {
        let now = Moment::now();
        let Some(member) = self.members.get(&id) else {
            return;
        };
        let vm = member.vm;
        if let Some(turn) = self.turn
            && !self.scheduler.contended()
        {
            // Who has been alone pays for what it has used until now.
            self.charge(turn.member, false, now);
        }
        if !self.waited_for()
            && let Some(turn) = &mut self.turn
        {
            // Until now it could have gone on for ever.
            turn.due = turn.due.max(now);
        }
        if let Some(vm) = self.vms.get_mut(&vm)
            && !vm.waiting.contains(&id)
        {
            vm.waiting.push_back(id);
        }
        self.scheduler.want(vm, now);
        if let Some(turn) = self.turn
            && let Some(holder) = self.members.get(&turn.member)
        {
            holder.worker.set_contended(true);
            self.review(now);
        }
    }

    /// Looks whether who has the device and does not use it keeps it although others wait: if it is
    /// expected to go on in time.
    fn review(&mut self, now: Moment) {
        let Some(turn) = self.turn else {
            return;
        };
        let idle = |member: &Member| member.worker.is_idle();
        let keeps = self.members.get(&turn.member).is_some_and(idle) && self.waited_for();
        if let Some(turn) = &mut self.turn {
            turn.paused = None;
        }
        if !keeps {
            return;
        }
        self.charge(turn.member, true, now);
        let Some(member) = self.members.get(&turn.member) else {
            return;
        };
        let (since, expected) = member.worker.expected(now);
        // Its client's other applications come first.
        let others = |vm: &Vm| !vm.waiting.is_empty();
        let keeps = match self.vms.get(&member.vm).is_some_and(others) {
            true => None,
            false => (self.scheduler).keeps(expected, since, now < turn.due, now),
        };
        if keeps.is_some() {
            if let Some(turn) = &mut self.turn {
                turn.paused = keeps;
            }
        } else if member.worker.take() {
            let vm = member.vm;
            self.end_turn(false);
            self.scheduler.away(vm, expected, since, now);
        }
    }

    /// Takes the device from who has not come back in time.
    fn end_pause(&mut self, now: Moment) {
        if self
            .turn
            .and_then(|turn| turn.paused)
            .is_some_and(|until| until <= now)
        {
            self.review(now);
        }
    }

    /// Charges the holder: all the time, if others wait, and else what it says that it has used;
    /// less what requests of others, whose turns were over, have taken of it.
    fn charge(&mut self, id: u64, all: bool, now: Moment) {
        let Some(vm) = self.members.get(&id).map(|member| member.vm) else {
            return;
        };
        let taken = self.charge_late(vm, now);
        let Some(member) = self.members.get_mut(&id) else {
            return;
        };
        let account = member.worker.account();
        // With what is under way.
        let running = member.worker.running_since();
        let running = running.map_or(Duration::ZERO, |since| now.since(since));
        let busy = account.busy.load(Ordering::Relaxed);
        let busy = busy.saturating_add(running.as_nanos() as u64);
        let synchronous = account.synchronous.load(Ordering::Relaxed);
        let used = if all {
            self.scheduler.held(now)
        } else {
            Duration::from_nanos(busy.saturating_sub(member.busy))
        };
        let calls = synchronous.saturating_sub(member.synchronous);
        (member.busy, member.synchronous) = (busy, synchronous);
        self.scheduler
            .charge(used.saturating_sub(taken), calls, now);
    }

    /// Charges clients for what their requests have taken after their turns; how much of that was
    /// this one's time. Only requests of a turn that has been take others' time, and not for longer
    /// than it has been over: who says more of himself spares nobody else.
    fn charge_late(&mut self, but: ClientId, now: Moment) -> Duration {
        let mut taken = Duration::ZERO;
        for member in self.members.values_mut() {
            let overrun = member.worker.account().overrun.load(Ordering::Relaxed);
            let late = Duration::from_nanos(overrun.saturating_sub(member.overrun));
            member.overrun = overrun;
            if late.is_zero() {
                continue;
            }
            let charged = self.scheduler.charge_late(member.vm, late, now);
            let Some(over) = member.over.take() else {
                continue;
            };
            if member.vm != but {
                taken += charged.min(now.since(over.counted));
            }
            let still = member.worker.running_since();
            if still.is_some_and(|since| since <= over.ended) {
                member.over = Some(Over {
                    counted: now,
                    ..over
                });
            }
        }
        taken
    }

    /// Whether somebody has the device, or uses it although its turn is over.
    fn is_used(&self) -> bool {
        let mut workers = self.members.values().map(|member| &member.worker);
        self.turn.is_some() || workers.any(|worker| worker.running_since().is_some())
    }

    /// The holder's turn is over; `used` says whether it was using the device.
    fn end_turn(&mut self, used: bool) {
        let Some(turn) = self.turn.take() else {
            return;
        };
        let now = Moment::now();
        self.charge(turn.member, used, now);
        let vm = self.members.get_mut(&turn.member).map(|member| {
            member.over = Some(Over {
                ended: now,
                counted: now,
            });
            member.vm
        });
        self.scheduler.done(now);
        // Other workers of the same machine may wait.
        if let Some(id) = vm
            && self.vms.get(&id).is_some_and(|vm| !vm.waiting.is_empty())
        {
            self.scheduler.want(id, now);
        }
    }

    /// Gives a free device to who is next.
    fn dispatch(&mut self) {
        self.ask = None;
        loop {
            let now = Moment::now();
            let turn = match self.scheduler.dispatch(now) {
                Dispatch::Grant(turn) => turn,
                Dispatch::At(moment) => {
                    self.ask = Some(moment);
                    return;
                }
                Dispatch::Nothing => return,
            };
            let vm = self.vms.get_mut(&turn.client);
            let next = vm.and_then(|vm| vm.waiting.pop_front());
            let Some((id, member)) =
                next.and_then(|id| self.members.get(&id).map(|member| (id, member)))
            else {
                // Its workers have ended since.
                self.scheduler.done(now);
                continue;
            };
            let (length, stop) = match turn.slice {
                Slice::Request => (Duration::ZERO, Stop::Never),
                Slice::Time(length) => (length, Stop::WhenDue),
            };
            self.turn = Some(Turn {
                member: id,
                due: now + length,
                length,
                prolongable: PROLONGED,
                stop,
                unused: None,
                paused: None,
            });
            let others = self
                .vms
                .get(&turn.client)
                .is_some_and(|vm| !vm.waiting.is_empty());
            member
                .worker
                .give(turn, others || self.scheduler.contended());
            return;
        }
    }

    /// Ends workers that have exceeded the limit of run time: by what they say themselves, and, if
    /// others wait for the one that has the device, by the clock.
    ///
    /// A turn is given back before its last request has ended. What the next one submits waits in
    /// the device for that, however long it takes: the time of all but the first begins when they
    /// are no longer behind it. What that depends on is the workers' own word. So nobody keeps the
    /// device from others for longer than all of them could be waited for, one after the other.
    fn enforce(&mut self, now: Moment) {
        let Some(limit) = self.limit else {
            return;
        };
        let waited_for = self.waited_for();
        let longest = limit * (2 + u32::try_from(self.members.len()).unwrap_or(u32::MAX - 2));
        // Read once: workers change it.
        let since: Vec<_> = self
            .members
            .values()
            .map(|member| member.worker.running_since())
            .collect();
        let first = since.iter().copied().flatten().min();
        for ((id, member), since) in self.members.iter_mut().zip(since) {
            if first.is_some() && since != first {
                member.behind = now;
            }
            let running = since.map_or(Duration::ZERO, |since| now.since(since.max(member.behind)));
            let turn = self.turn.filter(|turn| turn.member == *id);
            let late = turn.map_or(Duration::ZERO, |turn| {
                now.since(turn.due.max(member.behind))
            });
            let overdue = turn.map_or(Duration::ZERO, |turn| now.since(turn.due));
            let keeps = waited_for && (late > limit * 2 || overdue > longest);
            if member.dying || running <= limit && !keeps {
                continue;
            }
            member.dying = true;
            member.worker.kill();
            if let Some(vm) = self.vms.get_mut(&member.vm) {
                vm.killed += 1;
                log::warn!(
                    "{}: a request has had the device for {:.1} s, and {:.1} s are allowed: its \
                     worker is ended",
                    vm.name,
                    running.max(late).max(overdue).as_secs_f64(),
                    limit.as_secs_f64()
                );
            }
        }
    }

    /// Whether who has this turn is to be told when it is due: kernels that can be stopped end then,
    /// and others have given the device back a little earlier, mostly.
    fn is_to_stop(&self, turn: &Turn) -> bool {
        turn.stop == Stop::WhenDue && self.waited_for()
    }

    /// Tells who has had the device for its turn, while others wait, that this is over.
    fn stop_overdue(&mut self, now: Moment) {
        let Some(turn) = self.turn.filter(|turn| self.is_to_stop(turn)) else {
            return;
        };
        if now < turn.due || self.prolong(turn, now) {
            return;
        }
        if let Some(member) = self.members.get(&turn.member) {
            member.worker.stop();
        }
        self.turn = Some(Turn {
            stop: Stop::Told,
            ..turn
        });
    }

    /// Whether who has had the device for its turn has it for another one at once: if it would be next.
    /// To stop it and to give the device back to it would be time of the device that nobody has.
    fn prolong(&mut self, turn: Turn, now: Moment) -> bool {
        let Some(member) = self.members.get(&turn.member) else {
            return false;
        };
        // Its client's other applications come first.
        let others = |vm: &Vm| !vm.waiting.is_empty();
        let (siblings, idle) = (
            self.vms.get(&member.vm).is_some_and(others),
            member.worker.is_idle(),
        );
        if turn.prolongable == 0 || siblings || idle {
            return false;
        }
        self.charge(turn.member, true, now);
        if !self.scheduler.goes_on(now) {
            return false;
        }
        if let Some(member) = self.members.get(&turn.member) {
            member.worker.prolong(turn.length);
        }
        self.turn = Some(Turn {
            due: now + turn.length,
            prolongable: turn.prolongable - 1,
            ..turn
        });
        true
    }

    /// Takes the device from who has not used it for long, as far as has been seen.
    fn let_go(&mut self, now: Moment) {
        let Some(turn) = &mut self.turn else {
            return;
        };
        let Some(holder) = self.members.get(&turn.member) else {
            return;
        };
        if !holder.worker.is_idle() {
            turn.unused = None;
            return;
        }
        let since = *turn.unused.get_or_insert(now);
        if now.since(since) >= UNUSED && holder.worker.take() {
            self.end_turn(false);
        }
    }

    /// Whether anybody but the holder waits.
    fn waited_for(&self) -> bool {
        self.vms.values().any(|vm| !vm.waiting.is_empty())
    }

    /// A worker's process has ended.
    fn leave(&mut self, id: u64) {
        if self.turn.is_some_and(|turn| turn.member == id) {
            self.end_turn(true);
        }
        let Some(member) = self.members.remove(&id) else {
            return;
        };
        let Some(vm) = self.vms.get_mut(&member.vm) else {
            return;
        };
        vm.waiting.retain(|waiting| *waiting != id);
        vm.workers -= 1;
        let account = member.worker.account();
        let (calls, synchronous) = (&account.calls, &account.synchronous);
        vm.calls = vm.calls.saturating_add(calls.load(Ordering::Relaxed));
        vm.synchronous_calls =
            (vm.synchronous_calls).saturating_add(synchronous.load(Ordering::Relaxed));
        let now = Moment::now();
        if vm.waiting.is_empty() {
            self.scheduler.give_up(member.vm, now);
        }
        if let Some(turn) = self.turn
            && let Some(holder) = self.members.get(&turn.member)
        {
            holder.worker.set_contended(self.waited_for());
        }
    }
}

#[cfg(test)]
mod tests;
