//! The thread that waits for programs, files and the port, and sends to the worker.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    sync::Arc,
    time::{Duration, Instant},
};

use base::limits::Limit;
use remoting_proto::{
    apis::nvidia::{self, to_worker},
    port::State,
    wire::hello::{Form, Hello},
};

use super::{
    caching,
    checkpointer::Checkpointer,
    port_link::{Link, OneSlice},
    programs::{MOST_PROGRAMS, Programs},
    readiness::{Interest, READ, Source},
    suspension::Suspension,
};
use crate::{
    holders::{self, Holder},
    removals::Removals,
};

/// How often the slice's state is looked at while it is about to change.
const SOON: Duration = Duration::from_millis(2);
/// How long a worker may take to serve, and the slice to be free.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the slice's state is looked at while the worker may have something to say: without interrupts, and with
/// them, in case one does not arrive. And how often processes that have memory mapped are looked at, and whether there
/// are descriptors again.
const ASKED: Duration = Duration::from_millis(100);
const SELDOM: Duration = Duration::from_secs(1);
/// How often an answer is sent again that could not be sent.
const RETRY: Duration = Duration::from_millis(10);
/// Descriptors of the agent itself, for each program, and on their way to one.
const OWN_DESCRIPTORS: u64 = 128;
const PROGRAM_DESCRIPTORS: u64 = 3;

/// The slice.
enum Stage {
    /// It is closed, or about to be.
    Closed {
        /// When a program first asked for it.
        since: Option<Instant>,
    },
    /// It waits for its worker.
    Opening { since: Instant },
    /// A worker serves it.
    Open(Box<Link>),
    /// A process has memory of it mapped that would become other programs': it stays as it is.
    Held {
        /// That process.
        by: Holder,
        /// Whether it was said which one.
        is_told: bool,
    },
}

/// Serves programs through a port.
pub struct Relay<P> {
    listener: UnixListener,
    removals: Removals,
    port: P,
    programs: Arc<Programs>,
    suspension: Suspension,
    stage: Stage,
    looked: Instant,
    /// When processes of programs were last looked at.
    watched: Instant,
    /// Since when nobody is accepted, as there are no descriptors.
    deaf: Option<Instant>,
    /// Whether it was said that the window is none that this machine caches.
    has_told: bool,
    packet: Vec<u8>,
}

impl<P: OneSlice> Relay<P> {
    /// For programs that connect to a listener for packets, and are suspended by a checkpointer.
    pub fn new(listener: UnixListener, port: P, checkpointer: Checkpointer) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let pages = port.pages().map(OwnedFd::try_clone).transpose()?;
        let soft = Limit::now()?.soft;
        let others = OWN_DESCRIPTORS + PROGRAM_DESCRIPTORS * MOST_PROGRAMS as u64;
        let room = Limit { soft, hard: soft }.room(others, 1);
        let programs = Programs::new(port.window().try_clone()?, pages, room)?;
        let removals = Removals::listen()?;
        programs.readiness.add(&listener, READ, Source::Listener)?;
        programs.readiness.add(&programs.wake, READ, Source::Wake)?;
        programs
            .readiness
            .add(removals.as_fd(), READ, Source::Removals)?;
        if let Some(interrupts) = port.interrupts() {
            programs
                .readiness
                .add(interrupts, READ, Source::Interrupt)?;
        }
        Ok(Self {
            listener,
            removals,
            port,
            programs: Arc::new(programs),
            suspension: Suspension::new(checkpointer),
            stage: Stage::Closed { since: None },
            looked: Instant::now(),
            watched: Instant::now(),
            deaf: None,
            has_told: false,
            packet: Vec::new(),
        })
    }

    /// Serves until the port is removed.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn run(mut self) -> io::Result<()> {
        if self.port.state() != State::Free {
            // An earlier agent's.
            self.close();
        }
        let mut has_looked = false;
        loop {
            let rest = self
                .deaf
                .map(|since| SELDOM.saturating_sub(since.elapsed()));
            // The host may have had a wish before.
            let first = (!has_looked).then_some(Duration::ZERO);
            let patience = self.next_look().into_iter().chain(rest).chain(first).min();
            let ready = self.programs.readiness.wait(patience)?;
            let mut is_changed = false;
            let mut is_closed = false;
            for source in ready {
                match source {
                    Source::Listener => self.accept(),
                    Source::Wake => {
                        self.programs.wake.take();
                    }
                    Source::Interrupt => is_changed |= self.interrupted(),
                    Source::Removals => is_changed |= self.removals.heard().removed,
                    Source::Program(number) => is_closed |= self.hear(number),
                    Source::File(number) => {
                        is_closed = true;
                        if self.programs.close_file(number) {
                            self.send(to_worker::CLOSE, number, &[]);
                        }
                    }
                    Source::Process(number) => {
                        is_closed = true;
                        self.release(number);
                    }
                    // It is looked at below.
                    Source::Checkpointer => {}
                }
            }
            self.listen_again(is_closed);
            if self.programs.activity().is_watched && self.watched.elapsed() >= SELDOM {
                self.watched = Instant::now();
                for number in self.programs.unmapped() {
                    self.release(number);
                }
            }
            for (kind, number) in self.programs.take_due() {
                self.send(kind, number, &[]);
            }
            if self.programs.activity().is_delayed {
                self.programs.retry();
            }
            let look = self.next_look();
            let is_due = is_changed || look.is_some_and(|look| look <= self.looked.elapsed());
            if is_due && !self.port.is_there() {
                self.end("the accelerator port is gone");
                return Ok(());
            }
            let is_wish_due = is_due || !has_looked;
            has_looked = true;
            let suspension = &mut self.suspension;
            if suspension.step(&self.port, &self.programs, is_wish_due) {
                // First the thread that receives.
                self.stage = Stage::Closed { since: None };
                self.programs.leave();
                self.close();
            }
            // After that, as it may admit programs again.
            self.step(is_due);
        }
    }

    /// The time until the slice's state is to be looked at.
    fn next_look(&self) -> Option<Duration> {
        let activity = self.programs.activity();
        let retry = activity.is_delayed.then_some(RETRY);
        let look = match &self.stage {
            Stage::Closed { .. } if self.suspension.is_closed() => None,
            Stage::Closed { .. } => (!activity.is_empty).then_some(SOON),
            Stage::Held { .. } => Some(SELDOM),
            Stage::Opening { .. } => Some(SOON),
            Stage::Open(_) if !activity.is_asked => None,
            Stage::Open(_) if self.port.interrupts().is_some() => Some(SELDOM),
            Stage::Open(_) => Some(ASKED),
        };
        let watch = activity.is_watched.then_some(SELDOM);
        let has_interrupts = self.port.interrupts().is_some();
        let wish = self.suspension.next_look(has_interrupts);
        look.into_iter().chain(retry).chain(watch).chain(wish).min()
    }

    fn accept(&mut self) {
        // A bounded number, so that others are served while programs keep connecting.
        for _ in 0..MOST_PROGRAMS {
            match self.listener.accept() {
                Ok((connection, _)) => self.programs.connect(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // There are no descriptors, or no memory: the program waits.
                    self.deaf = Some(Instant::now());
                    let none = Interest::default();
                    let readiness = &self.programs.readiness;
                    readiness.change(&self.listener, none, Source::Listener);
                    break;
                }
            }
        }
    }

    /// Accepts programs again when something was closed, or after a while.
    fn listen_again(&mut self, is_closed: bool) {
        if let Some(since) = self.deaf
            && (is_closed || since.elapsed() >= SELDOM)
        {
            self.deaf = None;
            let readiness = &self.programs.readiness;
            readiness.change(&self.listener, READ, Source::Listener);
        }
    }

    /// A program that has disconnected does not use its memory any longer.
    fn release(&mut self, number: u32) {
        if self.programs.release(number) {
            self.send(to_worker::END, number, &[]);
        }
    }

    /// Takes an interrupt. Returns whether the slice's state may have changed.
    fn interrupted(&mut self) -> bool {
        let Some(is_changed) = self.port.interrupted() else {
            return false;
        };
        if let Stage::Open(link) = &self.stage {
            link.wake();
        }
        is_changed
    }

    /// Takes a program's request to the worker, or notices its end. Returns whether it was disconnected.
    fn hear(&mut self, number: u32) -> bool {
        let mut packet = std::mem::take(&mut self.packet);
        let heard = self.programs.hear(number, &mut packet);
        let is_closed = heard.is_err();
        match heard {
            Ok(false) => {}
            Ok(true) => {
                self.send(to_worker::REQUEST, number, &packet);
                if let Stage::Open(link) = &self.stage {
                    link.hurry();
                }
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::UnexpectedEof {
                    base::note!("gantry-agent: a program's connection ends: {error}");
                }
                if self.programs.disconnect(number) {
                    self.send(to_worker::END, number, &[]);
                }
            }
        }
        self.packet = packet;
        is_closed
    }

    fn send(&mut self, opcode: u16, sequence: u32, body: &[u8]) {
        let Stage::Open(link) = &mut self.stage else {
            return;
        };
        let port = &self.port;
        let alive = || port.is_there() && port.state() == State::Open;
        if let Err(gone) = link.send(opcode, sequence, body, alive) {
            self.programs.lose(&gone.to_string());
        }
    }

    /// Has new programs begin.
    fn begin(&mut self) {
        let suspension = &self.suspension;
        let begun = self
            .programs
            .begin(|process, user| suspension.admits(process, user));
        for (number, user) in begun {
            self.send(to_worker::BEGIN, number, &user.to_le_bytes());
        }
    }

    /// Opens and closes the slice as programs and the worker want.
    fn step(&mut self, is_due: bool) {
        match &mut self.stage {
            Stage::Held { by, .. } => {
                if !is_due && !self.programs.are_waiting() {
                    return;
                }
                self.looked = Instant::now();
                match holders::mapping(&self.programs.memory, Some(by)) {
                    Some(by) => self.hold(by),
                    None => self.close_unmapped(),
                }
            }
            Stage::Closed { since } => {
                if self.suspension.is_closed() || !self.programs.are_waiting() {
                    *since = None;
                    return;
                }
                let since = *since.get_or_insert_with(Instant::now);
                self.looked = Instant::now();
                match self.port.state() {
                    State::Free => match holders::mapping(&self.programs.memory, None) {
                        Some(by) => self.hold(by),
                        None => self.open(),
                    },
                    _ if since.elapsed() >= PATIENCE => {
                        self.end("the accelerator port's slice does not become free");
                    }
                    _ => {}
                }
            }
            Stage::Opening { since } => {
                let since = *since;
                self.looked = Instant::now();
                match self.port.state() {
                    State::Open => self.serve(),
                    State::Opening if since.elapsed() < PATIENCE => {}
                    _ => {
                        let why = self.port.reply().ok().and_then(|reply| {
                            let refused = Hello::check(&reply, &[nvidia::SPOKEN]).err()?;
                            reply
                                .starts_with(&remoting_proto::wire::hello::MAGIC)
                                .then_some(refused)
                        });
                        self.end(&why.map_or_else(
                            || "no worker took the slice: see the host's log".to_owned(),
                            |refused| refused.to_string(),
                        ));
                    }
                }
            }
            Stage::Open(_) => {
                self.begin();
                if let Some(why) = self.programs.lost() {
                    return self.end(&why);
                }
                if is_due {
                    self.looked = Instant::now();
                    if self.port.state() != State::Open {
                        return self.end("the worker has ended");
                    }
                }
                if self.programs.activity().is_empty {
                    self.close();
                }
            }
        }
    }

    fn open(&mut self) {
        let hello = Hello::answer(nvidia::SPOKEN, Form::File, (0, 0)).to_bytes();
        match self.port.open(&hello) {
            Ok(()) => {
                self.stage = Stage::Opening {
                    since: Instant::now(),
                }
            }
            Err(error) => self.end(&format!("cannot use the accelerator port's slice: {error}")),
        }
    }

    /// A worker serves the slice.
    fn serve(&mut self) {
        // Each time: what this machine caches may depend on its other devices.
        match self.port.measure() {
            Ok(time) if caching::check(time, &mut self.has_told) => {}
            Ok(_) => {
                self.programs.refuse();
                return self.close();
            }
            Err(error) => return self.end(&format!("cannot read the window: {error}")),
        }
        match Link::new(&self.port, &self.programs) {
            Ok(link) => {
                self.stage = Stage::Open(Box::new(link));
                self.begin();
            }
            Err(error) => self.end(&format!("cannot use the worker: {error}")),
        }
    }

    /// Closes the slice, unless a process has it mapped. The next program has it opened again.
    fn close(&mut self) {
        // First the thread that receives, then the slice.
        self.stage = Stage::Closed { since: None };
        self.looked = Instant::now();
        match holders::mapping(&self.programs.memory, None) {
            Some(by) => self.hold(by),
            None => self.close_unmapped(),
        }
    }

    /// Closes the slice, which nobody has mapped.
    fn close_unmapped(&mut self) {
        self.stage = Stage::Closed { since: None };
        if self.port.state() != State::Free {
            self.port.close();
        }
    }

    /// Leaves the slice as it is. Programs that wait for it find no device.
    fn hold(&mut self, by: Holder) {
        let mut is_told = matches!(
            &self.stage,
            Stage::Held { by: before, is_told: true } if before.process() == by.process()
        );
        if self.programs.refuse() && !is_told {
            is_told = true;
            base::note!(
                "gantry-agent: programs find no device for native contexts until memory of an earlier worker is free: \
                 {by}; end that process"
            );
        }
        self.stage = Stage::Held { by, is_told };
    }

    /// Ends all programs and files, whose worker is lost.
    fn end(&mut self, why: &str) {
        base::note!("gantry-agent: programs lose their native contexts: {why}");
        // First the thread that receives.
        self.stage = Stage::Closed { since: None };
        self.programs.clear();
        self.close();
    }
}
