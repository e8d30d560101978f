//! The thread that waits for programs, files and the port, and sends to the worker.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use base::limits::Limit;
use gantry_remoting::{
    apis::nvidia::{self, to_worker},
    port::State,
    wire::hello::{Form, Hello},
};

use super::{
    caching,
    port_link::{Link, OneSlice},
    programs::{MOST_PROGRAMS, Programs},
    readiness::{READ, Source},
};
use crate::removals::Removals;

/// How often the slice's state is looked at while it is about to change.
const SOON: Duration = Duration::from_millis(2);
/// How long a worker may take to serve, and the slice to be free.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the slice's state is looked at while the worker may have something to say: without interrupts, and with
/// them, in case one does not arrive.
const ASKED: Duration = Duration::from_millis(100);
const SELDOM: Duration = Duration::from_secs(1);
/// How often an answer is sent again that could not be sent.
const RETRY: Duration = Duration::from_millis(10);
/// Descriptors of the agent itself, for each program, and on their way to one.
const OWN_DESCRIPTORS: u64 = 128;
const PROGRAM_DESCRIPTORS: u64 = 2;

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
}

/// Serves programs through a port.
pub struct Relay<P> {
    listener: UnixListener,
    removals: Removals,
    port: P,
    programs: Arc<Programs>,
    stage: Stage,
    looked: Instant,
    /// Whether the window is memory that this machine caches, once that is known.
    is_cached: Option<bool>,
    packet: Vec<u8>,
}

impl<P: OneSlice> Relay<P> {
    /// For programs that connect to a listener for packets.
    pub fn new(listener: UnixListener, port: P) -> io::Result<Self> {
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
            stage: Stage::Closed { since: None },
            looked: Instant::now(),
            is_cached: None,
            packet: Vec::new(),
        })
    }

    /// Serves until the port is removed.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn run(mut self) -> io::Result<()> {
        loop {
            let ready = self.programs.readiness.wait(self.next_look())?;
            let mut is_changed = false;
            for source in ready {
                match source {
                    Source::Listener => self.accept(),
                    Source::Wake => self.programs.wake.take(),
                    Source::Interrupt => is_changed |= self.interrupted(),
                    Source::Removals => is_changed |= self.removals.heard().removed,
                    Source::Program(number) => self.hear(number),
                    Source::File(number) => {
                        if self.programs.close_file(number) {
                            self.send(to_worker::CLOSE, number, &[]);
                        }
                    }
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
            self.step(is_due);
        }
    }

    /// The time until the slice's state is to be looked at.
    fn next_look(&self) -> Option<Duration> {
        let activity = self.programs.activity();
        let retry = activity.is_delayed.then_some(RETRY);
        let look = match &self.stage {
            Stage::Closed { .. } if self.is_cached == Some(false) => None,
            Stage::Closed { .. } => (!activity.is_empty).then_some(SOON),
            Stage::Opening { .. } => Some(SOON),
            Stage::Open(_) if !activity.is_asked => None,
            Stage::Open(_) if self.port.interrupts().is_some() => Some(SELDOM),
            Stage::Open(_) => Some(ASKED),
        };
        look.into_iter().chain(retry).min()
    }

    fn accept(&mut self) {
        // A bounded number, so that others are served while programs keep connecting.
        for _ in 0..MOST_PROGRAMS {
            match self.listener.accept() {
                Ok((connection, _)) => self.programs.connect(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // There are no descriptors, or no memory: the program waits.
                    thread::sleep(RETRY);
                    break;
                }
            }
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

    /// Takes a program's request to the worker, or notices its end.
    fn hear(&mut self, number: u32) {
        let mut packet = std::mem::take(&mut self.packet);
        let has_worker = self.is_cached != Some(false);
        match self.programs.hear(number, has_worker, &mut packet) {
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
                if self.programs.disconnect(number, has_worker) {
                    self.send(to_worker::END, number, &[]);
                }
            }
        }
        self.packet = packet;
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
        for (number, user) in self.programs.begin() {
            self.send(to_worker::BEGIN, number, &user.to_le_bytes());
        }
    }

    /// Opens and closes the slice as programs and the worker want.
    fn step(&mut self, is_due: bool) {
        if self.is_cached == Some(false) {
            // Each request is answered without a worker.
            self.programs.begin();
            return;
        }
        match &mut self.stage {
            Stage::Closed { since } => {
                if !self.programs.has_any() {
                    *since = None;
                    return;
                }
                let since = *since.get_or_insert_with(Instant::now);
                self.looked = Instant::now();
                match self.port.state() {
                    State::Free => self.open(),
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
                                .starts_with(&gantry_remoting::wire::hello::MAGIC)
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
        if self.is_cached.is_none() {
            match caching::check(self.port.window()) {
                Ok(is_cached) => self.is_cached = Some(is_cached),
                Err(error) => return self.end(&format!("cannot read the window: {error}")),
            }
        }
        if self.is_cached == Some(false) {
            self.close();
            self.programs.begin();
            return;
        }
        match Link::new(&self.port, &self.programs) {
            Ok(link) => {
                self.stage = Stage::Open(Box::new(link));
                self.begin();
            }
            Err(error) => self.end(&format!("cannot use the worker: {error}")),
        }
    }

    /// Closes the slice. The next program has it opened again.
    fn close(&mut self) {
        // First the thread that receives, then the slice.
        self.stage = Stage::Closed { since: None };
        self.port.close();
    }

    /// Ends all programs and files, whose worker is lost.
    fn end(&mut self, why: &str) {
        base::note!("gantry-agent: programs lose their native contexts: {why}");
        self.close();
        self.programs.clear();
    }
}
