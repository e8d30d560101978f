//! The arbiter: one process that shares one device among the workers of several virtual machines.
//!
//! It holds only scheduling state: if it is killed and restarted, it learns about its workers when they reconnect. When
//! a worker ends, what it held becomes free.
//!
//! Workers may lie. With turns, what they report about their use of the device decides nothing that could harm another worker: a
//! turn that others wait for is charged by the clock, less what other clients are charged for in it. A process has one
//! connection, identified by the process handle with which its pool introduces it, and a limited time to identify
//! itself. Its name and weight also come from its pool, which received them before any application code ran in the
//! worker, so a compromised worker cannot change them.
//!
//! With the policy `ledger`, as long as all workers can set their time slices, nobody takes turns: [`slicing`] tells each
//! worker how long its slices are, and stops those that have overdrawn. There, what workers report decides: they read it from
//! the device's record, and a worker that was taken over can report less ([`ledger`](crate::policy::ledger)).
//!
//! - [`connection`]: a worker, from its introduction to its last word.
//! - [`show`]: the status for readers.
//! - [`tails`]: how long clients have waited.
//! - [`terms`]: what a client may expect.
//! - [`trials`]: pools that try the device's time slices.

pub mod connection;
mod show;
mod slicing;
mod tails;
mod terms;
mod trials;

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind, Write},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::Duration,
};

use base::{limits::Limit, poll};
use connection::{Newcomer, Worker};
use remoting_transport::closer::Closer;
use remoting_turns::{
    message::{First, Word},
    weight,
};
use slicing::{Reported, Slicing};
use tails::{Tails, WINDOW};
use terms::{NoTerms, Terms};
use trials::Trials;

use crate::{
    Expected, Moment, Slice,
    policy::{Class, ClientId, Delay, Name},
    scheduler::{Dispatch, Scheduler},
    status,
};

/// Interval at which the run time limit is checked.
const TICK: Duration = Duration::from_millis(20);
/// A holder that does not use the device for this long loses it, whoever else waits, so that nothing is left to check.
/// It then has to wait for its next turn.
const UNUSED: Duration = Duration::from_secs(1);
/// How long no connection is accepted after accepting one has failed.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of times that a turn is extended, whoever would be next. A worker that does not give the device back
/// is subject to the limit from the end of the turn on.
const PROLONGED: u32 = 8;
/// Maximum number of words of one worker that are read in one go.
const WORDS: usize = 16;
/// Maximum number of connections that are not workers yet. No more are accepted until one of them is resolved.
const NEWCOMERS: usize = 64;
/// Maximum time for a connection to become a worker.
const INTRODUCTION: Duration = Duration::from_secs(1);
/// Maximum number of workers, and of remembered machines. Beyond it, newcomers are refused, and machines without
/// workers are forgotten.
const MOST: usize = 1024;

/// Why an arbiter ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot listen.
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
    /// It cannot wait.
    #[error("cannot wait for workers")]
    Wait(#[source] io::Error),
}

/// Why a worker is refused.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Connection(#[from] connection::Error),
    #[error(transparent)]
    Terms(#[from] NoTerms),
    #[error("there are {MOST} workers already")]
    Many,
    #[error("its process has a connection already")]
    Twice,
}

/// A virtual machine.
#[derive(Debug)]
struct Vm {
    name: String,
    terms: Terms,
    /// Whether they were changed: they then do not go by what pools say.
    is_set: bool,
    workers: usize,
    /// Workers that want the device, in the order of their requests.
    waiting: VecDeque<u64>,
    /// The sums of workers that have ended.
    calls: u64,
    synchronous_calls: u64,
    killed: u64,
    /// The device time that it was charged for in time slices, and the time for which it waited meanwhile.
    sliced: Duration,
    delayed: Duration,
    /// The device time in nanoseconds, calls and synchronous calls that readers of the status have seen last.
    shown: [u64; 3],
    tails: Tails,
    /// The longest delays of the last window and of this one.
    delays: [Option<Delay>; 2],
}

/// A worker, and its client.
#[derive(Debug)]
struct Member {
    worker: Worker,
    vm: ClientId,
    /// The part of its account that the client was already charged for.
    busy: u64,
    synchronous: u64,
    overrun: u64,
    /// When its requests were last seen behind those of another worker, or when it joined.
    behind: Moment,
    /// Its last turn, as long as requests of that turn may be on the device.
    over: Option<Over>,
    /// Whether it was killed but has not ended yet.
    dying: bool,
    /// Whether it can set its time slices, and what was read of its reports on them.
    sliced: bool,
    reported: Option<Reported>,
    /// For how long it has not stopped although it was told to, since it last did.
    disobeyed: Duration,
}

/// A turn that is over.
#[derive(Clone, Copy, Debug)]
struct Over {
    /// When it ended.
    ended: Moment,
    /// Until when its requests have been deducted from the time of the later holders.
    counted: Moment,
}

/// Whether the holder is told that its turn is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// Never: the turn is for one request, which ends by itself.
    Never,
    /// As soon as the turn is due and others wait.
    WhenDue,
    /// It has been told.
    Told,
}

/// The current holder of the device.
#[derive(Clone, Copy, Debug)]
struct Turn {
    member: u64,
    /// When it should end if others wait.
    due: Moment,
    /// Its original length, and how often it may still be extended by that length.
    length: Duration,
    prolongable: u32,
    stop: Stop,
    /// Since when every check has found it unused.
    unused: Option<Moment>,
    /// If others wait and it was between two batches at the last check: until when it keeps the device.
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
    /// The next numbers of a virtual machine and of a worker.
    next: (u32, u64),
    /// When to ask the policy again.
    ask: Option<Moment>,
    /// Until when no connection is accepted, since accepting has just failed for lack of descriptors.
    deaf: Option<Moment>,
    closer: Closer,
    slicing: Slicing,
    trials: Trials,
    /// When the last window of clients' waits began.
    marked: Moment,
}

/// Opens a socket that only this user can reach.
fn listen(path: &Path) -> Result<UnixListener, Error> {
    status::listen(path).map_err(|source| Error::Listen {
        path: path.to_owned(),
        source,
    })
}

/// Advice for the case that no connection can be accepted, if there is any.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            "; raise the hard limit of open files (ulimit -Hn, or LimitNOFILE= of the service)"
        }
        _ => "",
    }
}

impl Arbiter {
    /// Creates an arbiter that workers reach at `path`. If a request has the device for longer than `limit`, its worker
    /// is killed.
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
            slicing: Slicing::default(),
            trials: Trials::default(),
            marked: Moment::now(),
        })
    }

    /// Sets the longest pause between two batches for which the device is kept (default:
    /// [`LONGEST_PAUSE`](crate::scheduler::LONGEST_PAUSE)). It is not kept for clients that may be away for longer;
    /// with zero, it is never kept.
    pub fn set_longest_pause(&mut self, longest: Duration) {
        self.scheduler.set_longest_pause(longest);
    }

    /// Shares the device, forever.
    pub fn run(mut self) -> Result<(), Error> {
        // There may be more workers than the usual soft limit allows.
        if let Err(error) = Limit::raise() {
            log::warn!("cannot raise the limit of file descriptors: {error}");
        }
        loop {
            self.step(None).map_err(Error::Wait)?;
        }
    }

    /// Sleeps until something happens, or until the timeout if there is one, and handles it.
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn step(&mut self, patience: Option<Duration>) -> io::Result<()> {
        let ready = self.wait(patience)?;
        self.deaf = self.deaf.filter(|until| Moment::now() < *until);
        self.accept(ready.contains(&self.listener.as_raw_fd()));
        if ready.contains(&self.readers.as_raw_fd()) {
            self.show();
        }
        self.handshake(&ready);
        // Before words are heard: a newcomer that takes turns may have asked for one already.
        self.share_by_slices(Moment::now());
        let ids: Vec<u64> = self.members.keys().copied().collect();
        for id in ids {
            self.hear(id, &ready);
        }
        self.share_by_slices(Moment::now());
        self.enforce(Moment::now());
        self.stop_overdue(Moment::now());
        self.let_go(Moment::now());
        self.end_pause(Moment::now());
        self.dispatch();
        self.give_up(Moment::now());
        self.trials.step(&ready, Moment::now());
        self.mark_waits(Moment::now());
        Ok(())
    }

    /// Sleeps until something happens, or until the timeout. Returns the descriptors that are ready.
    fn wait(&self, patience: Option<Duration>) -> io::Result<Vec<i32>> {
        let members = self.members.values();
        // poll(2) ignores descriptor -1.
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
                // For a worker that is about to end, only the end matters.
                let words = (!member.dying).then(|| member.worker.fd());
                [words.unwrap_or(-1), member.worker.end()]
            }))
            .chain(self.trials.fds())
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
        let review = self.slicing.next().map(left);
        let trial = self.trials.due().map(left);
        let mark = (!self.vms.is_empty()).then(|| left(self.marked + WINDOW));
        let times = [
            ask, pause, overdue, deaf, tick, silent, review, trial, mark, patience,
        ];
        let patience = times.into_iter().flatten().min();
        poll::poll(&mut polled, patience)?;
        let ready = polled.into_iter().filter(|entry| entry.revents != 0);
        Ok(ready.map(|entry| entry.fd).collect())
    }

    /// Accepts one connection, if there is one. If there is no descriptor for it, nothing is accepted for a while,
    /// since the waiting connection would wake the arbiter again at once.
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

    /// Reads the first messages of newcomers.
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

    /// Admits a newcomer whose process has no other connection; an older newcomer of the same process is dropped. A
    /// worker reconnects when its arbiter has ended, and a worker whose connection has ended is killed, so an honest
    /// worker never connects twice.
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

    /// Disconnects newcomers that have not identified themselves in time.
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
        let join = match newcomer.first()? {
            First::Worker(join) => join,
            First::Trial(device) => {
                let slices = self.policy == Name::Ledger;
                self.trials.ask(newcomer.into_stream(), device, slices);
                return Ok(());
            }
            First::Weight(client) => {
                let weight = client.weight;
                return self.change(newcomer, &client.name, |terms| {
                    Terms::new(weight, terms.latency())
                });
            }
            First::Latency(client) => {
                let latency = client.latency;
                return self.change(newcomer, &client.name, |terms| {
                    Terms::new(terms.number(), latency)
                });
            }
        };
        if self.members.len() >= MOST {
            return Err(Refused::Many);
        }
        let worker = newcomer.into_worker()?;
        let terms = Terms::new(join.weight, join.latency)?;
        // A client without workers may come back with different terms.
        self.forget(|vm| vm.name == join.name && vm.terms != terms && !vm.is_set);
        let known = self.vms.iter().find(|(_, vm)| vm.name == join.name);
        let vm = match known {
            Some((id, vm)) => {
                if vm.terms != terms && !vm.is_set {
                    log::warn!(
                        "{}: {} stays as long as it has workers, and does not become {terms}",
                        vm.name,
                        vm.terms
                    );
                }
                *id
            }
            None => self.add(join.name, terms),
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
            sliced: join.sliced,
            reported: None,
            disobeyed: Duration::ZERO,
        };
        if self.slicing.is_on() && member.sliced {
            member.worker.share(self.slicing.mode());
        }
        self.members.insert(self.next.1, member);
        Ok(())
    }

    /// Changes the terms of the client of this name as whoever has connected wishes, and answers.
    fn change(
        &mut self,
        newcomer: Newcomer,
        name: &str,
        to: impl Fn(Terms) -> Result<Terms, NoTerms>,
    ) -> Result<(), Refused> {
        let answer = match self.set_terms(name, to, Moment::now())? {
            true => weight::CHANGED,
            false => weight::UNKNOWN,
        };
        // There is room for it: nothing was written before.
        let _ = (&*newcomer.into_stream()).write_all(&[answer]);
        Ok(())
    }

    /// Changes the terms of a client from now on. Returns whether there is one of this name.
    fn set_terms(
        &mut self,
        name: &str,
        to: impl Fn(Terms) -> Result<Terms, NoTerms>,
        now: Moment,
    ) -> Result<bool, NoTerms> {
        let Some((id, vm)) = self.vms.iter_mut().find(|(_, vm)| vm.name == name) else {
            // What nobody could have is refused nevertheless.
            return to(Terms::default()).map(|_| false);
        };
        let terms = to(vm.terms)?;
        let mut own = self.members.values().filter(|member| member.vm == *id);
        if terms.class == Class::Idle && own.any(|member| !member.worker.sees_requests()) {
            return Err(NoTerms::Native);
        }
        log::info!("{name}: {} becomes {terms}", vm.terms);
        (vm.terms, vm.is_set) = (terms, true);
        self.scheduler.set_weight(*id, terms.weight, now);
        self.slicing.set_terms(*id, terms);
        Ok(true)
    }

    /// Has another window of waits begin if it is time.
    fn mark_waits(&mut self, now: Moment) {
        if now.since(self.marked) < WINDOW {
            return;
        }
        self.marked = now;
        for (id, vm) in &mut self.vms {
            vm.delays = [vm.delays[1], None];
            let workers = self.members.values().filter(|member| member.vm == *id);
            vm.tails
                .mark(workers.map(|member| member.worker.account().waits.read()));
        }
    }

    /// Forgets machines without workers.
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

    fn add(&mut self, name: String, terms: Terms) -> ClientId {
        if self.vms.len() >= MOST {
            self.forget(|_| true);
        }
        let id = ClientId(self.next.0);
        self.next.0 = self.next.0.wrapping_add(1);
        self.scheduler.join(id, terms.weight, Moment::now());
        let vm = Vm {
            name,
            terms,
            is_set: false,
            workers: 0,
            waiting: VecDeque::new(),
            calls: 0,
            synchronous_calls: 0,
            killed: 0,
            sliced: Duration::ZERO,
            delayed: Duration::ZERO,
            shown: [0; 3],
            tails: Tails::default(),
            delays: [None; 2],
        };
        self.vms.insert(id, vm);
        id
    }

    /// Handles a worker's words, or its end.
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
                    // A process that has closed its connection may still use the device, until the process ends.
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
        if self.slicing.is_on() {
            // Said before the worker knew.
            return;
        }
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
            // The turn was taken away meanwhile, or this is nonsense that harms nobody.
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
            // A client that was alone pays for what it has used until now.
            self.charge(turn.member, false, now);
        }
        if !self.waited_for()
            && let Some(turn) = &mut self.turn
        {
            // Until now, it could have continued forever.
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

    /// Checks whether a holder that does not use the device keeps it although others wait. It does if it is expected to
    /// continue in time.
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
        // Other applications of its client come first.
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

    /// Takes the device from a holder that has not come back in time.
    fn end_pause(&mut self, now: Moment) {
        if self
            .turn
            .and_then(|turn| turn.paused)
            .is_some_and(|until| until <= now)
        {
            self.review(now);
        }
    }

    /// Charges the holder for all the time if others wait, otherwise for the use that it reports. Time that others'
    /// requests took after their turns is deducted.
    fn charge(&mut self, id: u64, all: bool, now: Moment) {
        let Some(vm) = self.members.get(&id).map(|member| member.vm) else {
            return;
        };
        let taken = self.charge_late(vm, now);
        let Some(member) = self.members.get_mut(&id) else {
            return;
        };
        let account = member.worker.account();
        // Including the request in progress.
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

    /// Charges clients for the time that their requests took after their turns. Returns how much of that was time of
    /// the client `but`. Only requests of a turn that has taken place count against others' time, and for no longer
    /// than that turn has been over: reporting more does not relieve anybody else.
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

    /// Whether somebody has the device, or uses it after the end of its turn.
    fn is_used(&self) -> bool {
        let mut workers = self.members.values().map(|member| &member.worker);
        self.turn.is_some() || workers.any(|worker| worker.running_since().is_some())
    }

    /// Ends the holder's turn; `used` says whether it was using the device.
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

    /// Gives a free device to the next client.
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
                // Its workers have ended meanwhile.
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

    /// Kills workers that have exceeded the run time limit: by what they report, and, if others wait for the holder, by
    /// the clock.
    ///
    /// A turn is given back before its last request has ended. Requests of the next holder wait in the device for that,
    /// however long it takes. So the time of every request but the first starts when no other request is ahead of it.
    /// This relies on the workers' own reports. Therefore nobody may keep the device from others for longer than the
    /// limits of all of them together, one after the other.
    fn enforce(&mut self, now: Moment) {
        let Some(limit) = self.limit else {
            return;
        };
        let waited_for = self.waited_for();
        let longest = limit * (2 + u32::try_from(self.members.len()).unwrap_or(u32::MAX - 2));
        // Read once, since workers change it.
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

    /// Whether the holder must be told when this turn is due. Kernels that can be stopped end then; other holders have
    /// usually given the device back a little earlier.
    fn is_to_stop(&self, turn: &Turn) -> bool {
        turn.stop == Stop::WhenDue && self.waited_for()
    }

    /// Tells a holder that has used up its turn, while others wait, that the turn is over.
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

    /// Extends the holder's turn if it would be next anyway. Returns whether it did. Stopping it and giving the device
    /// back to it would waste device time.
    fn prolong(&mut self, turn: Turn, now: Moment) -> bool {
        let Some(member) = self.members.get(&turn.member) else {
            return false;
        };
        // Other applications of its client come first.
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

    /// Takes the device from a holder that has not used it for long, as far as can be seen.
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

    /// Handles the end of a worker's process.
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
        vm.tails.keep(&account.waits.read());
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
