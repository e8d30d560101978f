//! The port's slice, and its rings.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use remoting_proto::{
    apis::nvidia,
    port::{Outcome, State, Wish},
    wire::{
        Flags, Header,
        hello::{self, Form, Hello},
    },
};
use remoting_transport::{
    alarm::Alarm,
    endpoint::{Gone, Receiver, Sender, Spin},
    port_bell::{Doorbell, DoorbellPage, Naps},
    ring::{Consumer, Lines, Producer},
    window::{SMALLEST, Slice, Window},
};

use super::{caching, programs::Programs};
use crate::port::Port;

/// How long the receiver polls for an answer before it naps: with few processors, they are left to the programs. A nap
/// takes several system calls' time, so where those are slow, as in a guest whose kernel is emulated, it polls for longer.
fn spin() -> Duration {
    const ENOUGH: usize = 4;
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(2);
    match thread::available_parallelism() {
        Ok(count) if count.get() >= ENOUGH => Duration::from_micros(200),
        _ => (system_call() * 4).clamp(SHORTEST, LONGEST),
    }
}

/// The time that a system call takes.
fn system_call() -> Duration {
    const COUNT: u32 = 8;
    let begin = Instant::now();
    for _ in 0..COUNT {
        // SAFETY: a call without arguments.
        unsafe { libc::syscall(libc::SYS_getppid) };
    }
    begin.elapsed() / COUNT
}

/// The longest sleep of the receiver: an interrupt may not arrive.
const PATIENCE: Duration = Duration::from_secs(1);

/// A port with one slice.
pub trait OneSlice: Send + 'static {
    /// The window's file. The slice begins at 0.
    fn window(&self) -> &OwnedFd;
    /// The file of the device pages, if the port has any.
    fn pages(&self) -> Option<&OwnedFd>;
    /// The file of the doorbells, the slice's first.
    fn doorbells(&self) -> &OwnedFd;
    /// The descriptor to poll for interrupts, if there are any.
    fn interrupts(&self) -> Option<BorrowedFd<'_>>;
    /// Takes an interrupt. `None`: there was none; else whether the slice's state may have changed.
    fn interrupted(&mut self) -> Option<bool>;
    /// Whether the device is still present.
    fn is_there(&self) -> bool;
    /// The slice's state.
    fn state(&self) -> State;
    /// Has the slice opened for this hello.
    fn open(&self, hello: &[u8; hello::SIZE]) -> io::Result<()>;
    /// The worker's answer to the hello.
    fn reply(&self) -> io::Result<[u8; hello::SIZE]>;
    /// Closes the slice.
    fn close(&self);
    /// What the host wishes.
    fn wish(&self) -> Option<Wish>;
    /// Tells the host what has become of a wish, and why.
    fn tell(&self, outcome: Outcome, reason: &str);
    /// The time in which a part of the window is read.
    fn measure(&self) -> io::Result<Duration> {
        caching::measure(self.window())
    }
}

impl OneSlice for Port {
    fn window(&self) -> &OwnedFd {
        &self.window
    }

    fn pages(&self) -> Option<&OwnedFd> {
        self.pages.as_ref()
    }

    fn doorbells(&self) -> &OwnedFd {
        &self.doorbells
    }

    fn interrupts(&self) -> Option<BorrowedFd<'_>> {
        self.interrupts
            .as_ref()
            .map(|interrupts| interrupts.as_fd())
    }

    fn interrupted(&mut self) -> Option<bool> {
        let mut is_heard = false;
        let is_changed = Self::interrupted(self, |_| is_heard = true);
        is_heard.then_some(is_changed)
    }

    fn is_there(&self) -> bool {
        Self::is_there(self)
    }

    fn state(&self) -> State {
        Self::state(self, 0)
    }

    fn open(&self, hello: &[u8; hello::SIZE]) -> io::Result<()> {
        self.open_slice(0, hello, None)
    }

    fn reply(&self) -> io::Result<[u8; hello::SIZE]> {
        Self::reply(self, 0)
    }

    fn close(&self) {
        self.close_slice(0);
    }

    fn wish(&self) -> Option<Wish> {
        Self::wish(self).map(|(wish, _)| wish)
    }

    fn tell(&self, outcome: Outcome, reason: &str) {
        Self::tell(self, outcome, reason);
    }
}

/// The agent's ends of the rings. Messages that arrive are handled by a thread of its own.
pub struct Link {
    sender: Sender<Slice, Doorbell>,
    /// The ring of answers, for its words.
    answers: Slice,
    /// Rouses the receiver.
    bell: Doorbell,
    /// What the receiver sleeps on, if there are interrupts.
    alarm: Option<Alarm>,
    is_stopped: Arc<AtomicBool>,
    programs: Arc<Programs>,
    receiver: Option<JoinHandle<()>>,
}

impl Link {
    /// Maps the rings of a slice whose worker has answered the hello, and receives from now on.
    pub fn new(port: &impl OneSlice, programs: &Arc<Programs>) -> io::Result<Self> {
        let reply = port.reply()?;
        let hello = Hello::check(&reply, &[nvidia::SPOKEN]).map_err(io::Error::other)?;
        if hello.form != Form::Port {
            return Err(io::Error::other(
                "invalid window of the worker: not a slice of a port",
            ));
        }
        Window::check(hello.window, hello.ring).map_err(io::Error::other)?;
        // The kernel enters each page of a mapping at once: only the rings are mapped, which end before four times the
        // size of one, or in the first part of the window.
        let mapped = hello.ring.saturating_mul(4).max(SMALLEST).min(hello.window);
        let window = Window::map_slice(port.window(), 0, mapped, hello.ring);
        let window = window.map_err(io::Error::other)?;
        let (mut alarm, mut sleeps_on) = (None, None);
        if port.interrupts().is_some() {
            let (own, file) = Alarm::create().map_err(io::Error::other)?;
            sleeps_on = Some(Alarm::map(&file).map_err(io::Error::other)?);
            alarm = Some(own);
        }
        let page = Arc::new(DoorbellPage::map(port.doorbells(), 0)?);
        let bell = |alarm| Doorbell::Port {
            page: page.clone(),
            naps: Arc::new(Naps::new(alarm)),
            patience: PATIENCE,
        };
        // Who waits for room naps: the thread that takes interrupts is the one that sends.
        let sender = Sender::new(Producer::new(window.calls(), bell(None)), spin());
        let bell = bell(sleeps_on);
        let receiver = Receiver::new(Consumer::new(window.answers(), bell.clone()));
        let is_stopped = Arc::new(AtomicBool::new(false));
        let thread = {
            let (programs, is_stopped) = (programs.clone(), is_stopped.clone());
            let run = move || receive(receiver, &programs, &is_stopped);
            thread::Builder::new()
                .name("native-answers".into())
                .spawn(run)?
        };
        Ok(Self {
            sender,
            answers: window.answers(),
            bell,
            alarm,
            is_stopped,
            programs: programs.clone(),
            receiver: Some(thread),
        })
    }

    /// Sends a message, waiting for room while `alive`.
    pub fn send(
        &mut self,
        opcode: u16,
        sequence: u32,
        body: &[u8],
        alive: impl Fn() -> bool,
    ) -> Result<(), Gone> {
        let header = Header {
            // At most a packet.
            length: body.len() as u32,
            opcode,
            flags: Flags::default(),
            sequence: sequence.into(),
        };
        self.sender.send(header, body, alive)
    }

    /// Has the receiver look soon, as an answer is awaited.
    pub fn hurry(&self) {
        self.bell.hurry(&self.answers.control().items.0);
    }

    /// There was an interrupt.
    pub fn wake(&self) {
        self.alarm.iter().for_each(Alarm::wake);
    }
}

impl Drop for Link {
    /// Waits for the receiver's end.
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        self.programs.rouse();
        let Some(receiver) = self.receiver.take() else {
            return;
        };
        // It may be about to sleep.
        while !receiver.is_finished() {
            self.bell.rouse(&self.answers.control().items.0);
            thread::sleep(Duration::from_micros(100));
        }
        let _ = receiver.join();
    }
}

/// Handles messages until the link is dropped, or no more can come.
fn receive(mut receiver: Receiver<Slice, Doorbell>, programs: &Programs, is_stopped: &AtomicBool) {
    let is_stopped = || is_stopped.load(Ordering::SeqCst);
    let mut spin = Spin::new(spin());
    let mut body = Vec::new();
    while !is_stopped() {
        let handled = match receiver.poll(&mut body) {
            Ok(Some(header)) => {
                spin.reset();
                programs.handle(header, &body)
            }
            Ok(None) => {
                if programs.wait_until_expecting(is_stopped) {
                    spin.reset();
                }
                receiver.wait(&mut spin, is_stopped);
                Ok(())
            }
            Err(gone) => Err(gone.to_string()),
        };
        if let Err(why) = handled {
            return programs.lose(&why);
        }
    }
}
