//! The thread of a device: the only one that exchanges messages with its back end.

use std::{
    io,
    net::Shutdown,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError},
    },
    time::{Duration, Instant},
};

use base::{Chain, Unpoisoned, poll::poll};
use device_model::shared_event;
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
use vmm_sys_util::eventfd::EventFd;

use crate::{
    backend::Backend,
    connection::{Connection, Deadline, Failure},
    error::Error,
    memory::{Mapped, Slots, TABLE},
    model::Model,
    rings::{Rings, StartError},
};

/// How long the thread waits until it looks for a lost back end again, at first and at most.
const SOON: Duration = Duration::from_millis(100);
const LATER: Duration = Duration::from_secs(5);

/// What the thread is to do.
pub(crate) enum Command {
    /// Lets the back end serve these queues.
    Start(Rings),
    /// Stops the queues, and says how far the back end has come in each.
    Stop(SyncSender<Vec<u16>>),
    /// Lets the back end serve the queues again.
    Continue,
    /// The driver has reset the device, which is stopped.
    Forget,
    /// The guest's memory has changed; says when the back end knows.
    Remap(SyncSender<()>),
    /// The device is gone.
    End,
}

/// What others see of the thread, and how they cut off its back end.
pub(crate) struct Shared {
    /// The connection, if there is one.
    stream: Mutex<Option<UnixStream>>,
    /// Whether others have ended it, whose back end may still use the guest's memory.
    was_cut: AtomicBool,
    is_lost: AtomicBool,
    slots: AtomicUsize,
    /// The configuration that the driver reads.
    config: Mutex<Vec<u8>>,
    reconnects: AtomicU64,
}

impl Shared {
    pub(crate) fn new(backend: &Backend) -> io::Result<Self> {
        let shared = Self {
            stream: Mutex::new(Some(backend.connection.stream().try_clone()?)),
            was_cut: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            slots: AtomicUsize::new(0),
            config: Mutex::new(backend.config.clone()),
            reconnects: AtomicU64::new(0),
        };
        shared.set_slots(backend.slots);
        Ok(shared)
    }

    fn set_slots(&self, slots: Slots) {
        let slots = match slots {
            Slots::Table => TABLE,
            Slots::Each(slots) => slots,
        };
        self.slots.store(slots, Ordering::Relaxed);
    }

    /// Ends the connection, whoever waits for an answer.
    pub(crate) fn cut(&self) {
        if let Some(stream) = &*self.stream.lock_unpoisoned() {
            self.was_cut.store(true, Ordering::Relaxed);
            // Fails only if the other side has done so.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Forgets a connection that is lost, and ends it. Whether others had ended it.
    fn forget(&self) -> bool {
        let stream = self.stream.lock_unpoisoned().take();
        if let Some(stream) = stream {
            let _ = stream.shutdown(Shutdown::Both);
        }
        // None sets it without a connection.
        self.was_cut.swap(false, Ordering::Relaxed)
    }

    /// Whether there is no back end.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Number of memory regions that the back end can map.
    pub(crate) fn slots(&self) -> usize {
        self.slots.load(Ordering::Relaxed)
    }

    /// How often a lost back end was found again.
    pub(crate) fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    /// The configuration that the driver reads.
    pub(crate) fn with_config<T>(&self, work: impl FnOnce(&[u8]) -> T) -> T {
        work(&self.config.lock_unpoisoned())
    }
}

/// The connection to the back end.
enum Link {
    Up {
        backend: Box<Backend>,
        mapped: Mapped,
        since: Instant,
    },
    /// It is looked for again then.
    Down(Instant),
}

/// The queues.
enum Run {
    /// The driver has set up none, or the device is stopped.
    Stopped(Option<Rings>),
    /// The driver uses them.
    Active {
        rings: Rings,
        /// The back end serves them.
        is_served: bool,
    },
}

/// The thread's state.
pub(crate) struct Thread {
    pub(crate) socket: PathBuf,
    pub(crate) model: Model,
    /// The features that the driver was offered.
    pub(crate) features: u64,
    link: Link,
    /// How long a lost back end is not looked for.
    pause: Duration,
    run: Run,
    pub(crate) commands: Receiver<Command>,
    /// Readable when there are commands.
    pub(crate) wake: EventFd,
    /// Both of each queue, which the back end has, too.
    pub(crate) kicks: Arc<[EventFd]>,
    pub(crate) calls: Vec<EventFd>,
    pub(crate) shared: Arc<Shared>,
    /// Tells the VM that the back end is lost.
    pub(crate) lost: Box<dyn Fn(String) + Send>,
    /// Time limit for all messages that start, stop or change the queues, or meet another back end.
    pub(crate) patience: Duration,
    polled: Vec<libc::pollfd>,
    /// A failure to find a lost back end again was logged.
    has_complained: bool,
}

/// What a thread is made of.
pub(crate) struct Parts {
    pub(crate) socket: PathBuf,
    pub(crate) model: Model,
    pub(crate) backend: Backend,
    pub(crate) commands: Receiver<Command>,
    pub(crate) wake: EventFd,
    pub(crate) kicks: Arc<[EventFd]>,
    pub(crate) calls: Vec<EventFd>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) lost: Box<dyn Fn(String) + Send>,
    /// Time limit for all messages that start, stop or change the queues, or meet another back end.
    pub(crate) patience: Duration,
}

impl Thread {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts {
            socket,
            model,
            backend,
            commands,
            wake,
            kicks,
            calls,
            shared,
            lost,
            patience,
        } = parts;
        Self {
            socket,
            features: backend.offered(&model),
            model,
            link: Link::Up {
                backend: Box::new(backend),
                mapped: Mapped::default(),
                since: Instant::now(),
            },
            pause: SOON,
            run: Run::Stopped(None),
            commands,
            wake,
            kicks,
            calls,
            shared,
            lost,
            patience,
            polled: Vec::new(),
            has_complained: false,
        }
    }

    /// Serves until the device is gone.
    pub(crate) fn run(mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(Command::End) | Err(TryRecvError::Disconnected) => return,
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => {
                    if let Err(error) = self.wait() {
                        log::error!("a vhost-user device's thread cannot wait: {error}");
                        return self.shared.cut();
                    }
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Start(mut rings) => {
                if let Run::Stopped(Some(stopped)) =
                    std::mem::replace(&mut self.run, Run::Stopped(None))
                {
                    rings.follow(stopped);
                }
                self.run = Run::Active {
                    rings,
                    is_served: false,
                };
                self.serve();
            }
            Command::Continue => {
                if let Run::Stopped(rings) = &mut self.run
                    && let Some(rings) = rings.take()
                {
                    self.run = Run::Active {
                        rings,
                        is_served: false,
                    };
                    self.serve();
                }
            }
            Command::Stop(answer) => {
                let bases = self.stop();
                // Nobody waits for it if the device goes on.
                let _ = answer.send(bases);
            }
            Command::End => {}
            Command::Forget => self.run = Run::Stopped(None),
            Command::Remap(answer) => {
                if let (
                    Run::Active {
                        rings,
                        is_served: true,
                    },
                    Link::Up {
                        backend, mapped, ..
                    },
                ) = (&mut self.run, &mut self.link)
                    && let Err(error) = rings.remap(
                        backend,
                        mapped,
                        &self.kicks,
                        &self.calls,
                        Deadline::after(self.patience),
                    )
                {
                    self.lose(&error);
                }
                let _ = answer.send(());
            }
        }
    }

    /// Lets the back end serve the queues that the driver uses, if it is there.
    fn serve(&mut self) {
        let Run::Active { rings, is_served } = &mut self.run else {
            return;
        };
        match &mut self.link {
            _ if !rings.can_resume() => self.give_up_queues(),
            Link::Up {
                backend, mapped, ..
            } => match rings.start(
                backend,
                mapped,
                &self.kicks,
                &self.calls,
                Deadline::after(self.patience),
            ) {
                Ok(()) => *is_served = true,
                Err(error) => self.lose(&error),
            },
            Link::Down(_) => self.give_up_queues(),
        }
    }

    /// Stops the queues. Whatever the back end says or does not say, it is over within the time limit.
    fn stop(&mut self) -> Vec<u16> {
        let run = std::mem::replace(&mut self.run, Run::Stopped(None));
        let (mut rings, is_served) = match run {
            Run::Active { rings, is_served } => (rings, is_served),
            Run::Stopped(Some(rings)) => (rings, false),
            Run::Stopped(None) => return Vec::new(),
        };
        let mut lost = None;
        if is_served
            && let Link::Up { backend, .. } = &mut self.link
            && let Err(failure) = rings.stop(backend, Deadline::after(self.patience))
        {
            lost = Some(failure);
        }
        // What it has said before.
        for at in 0..rings.rings.len() {
            forward(&self.calls, &mut rings, at);
        }
        self.run = Run::Stopped(Some(rings));
        if let Some(failure) = lost {
            self.lose(&failure.into());
        }
        match &self.run {
            Run::Stopped(Some(rings)) => rings.bases(),
            _ => Vec::new(),
        }
    }

    /// The back end is lost, or has to be.
    fn lose(&mut self, why: &StartError) {
        let was_cut = self.shared.forget();
        if let Link::Up { since, .. } = self.link
            && since.elapsed() > LATER
        {
            self.pause = SOON;
        }
        self.look_later();
        self.has_complained = false;
        self.shared.is_lost.store(true, Ordering::Relaxed);
        // One that was cut off may still use the guest's memory, and its end of the connection looks closed, too.
        let is_gone = !was_cut && matches!(why, StartError::Failure(Failure::Closed));
        let resumes = match &mut self.run {
            Run::Active { rings, .. } | Run::Stopped(Some(rings)) => {
                rings.prepare_for_another(is_gone && self.model.resumes);
                rings.can_resume()
            }
            Run::Stopped(None) => true,
        };
        let advice = match resumes {
            true => "start it again, and the device goes on",
            false => "start it again, and then remove the device and add it again",
        };
        (self.lost)(format!("{}; {advice}", Chain(why)));
        self.give_up_queues();
    }

    /// Looks for a lost back end some time later.
    fn look_later(&mut self) {
        self.link = Link::Down(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LATER);
    }

    /// Tells the driver of queues with which no back end can go on.
    fn give_up_queues(&mut self) {
        if let Run::Active { rings, is_served } = &mut self.run {
            *is_served = false;
            if !rings.can_resume() {
                rings.interrupt.needs_reset();
            }
        }
    }

    /// Looks for a lost back end.
    fn reconnect(&mut self) {
        match self.find() {
            Ok(backend) => {
                self.link = Link::Up {
                    backend: Box::new(backend),
                    mapped: Mapped::default(),
                    since: Instant::now(),
                };
                self.shared.is_lost.store(false, Ordering::Relaxed);
                self.shared.reconnects.fetch_add(1, Ordering::Relaxed);
                log::info!("the back end at {} is there again", self.socket.display());
                self.serve();
            }
            Err(error) => {
                *self.shared.stream.lock_unpoisoned() = None;
                // That nobody listens is to be expected.
                let is_other = !matches!(
                    error,
                    Error::Failure {
                        source: Failure::Connect(_),
                        ..
                    }
                );
                if is_other && !std::mem::replace(&mut self.has_complained, true) {
                    log::warn!("{}", Chain(&error));
                }
                self.look_later();
            }
        }
    }

    /// Connects to a back end that can take the place of the one that was lost.
    fn find(&self) -> Result<Backend, Error> {
        let failed = |source| Error::Failure {
            path: self.socket.clone(),
            source,
        };
        let host = |source| Error::Host {
            action: "keep a connection",
            source,
        };
        let connection = Connection::open(&self.socket).map_err(failed)?;
        let stream = connection.stream().try_clone().map_err(host)?;
        *self.shared.stream.lock_unpoisoned() = Some(stream);
        let deadline = Deadline::after(self.patience);
        let backend = Backend::agree(connection, &self.socket, &self.model, deadline)?;
        let lacks = |what| Error::Lacks {
            path: self.socket.clone(),
            what,
        };
        if backend.offered(&self.model) & self.features != self.features {
            return Err(lacks("features that the device had before"));
        }
        if self.shared.with_config(|config| config != backend.config) {
            return Err(lacks("the configuration that the device had before"));
        }
        let has_notes = match &self.run {
            Run::Active { rings, .. } | Run::Stopped(Some(rings)) => rings.has_notes(),
            Run::Stopped(None) => false,
        };
        if has_notes && !backend.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Err(lacks(
                "INFLIGHT_SHMFD, with which the one before has noted its requests",
            ));
        }
        self.shared.set_slots(backend.slots);
        Ok(backend)
    }

    /// Waits for an event and handles it.
    fn wait(&mut self) -> io::Result<()> {
        const WAKE: usize = 0;
        const SOCKET: usize = 1;
        let entry = |fd: RawFd, events| libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut polled = std::mem::take(&mut self.polled);
        polled.clear();
        polled.push(entry(self.wake.as_raw_fd(), libc::POLLIN));
        let patience = match &self.link {
            Link::Up { backend, .. } => {
                let stream = backend.connection.stream().as_raw_fd();
                polled.push(entry(stream, libc::POLLIN | libc::POLLRDHUP));
                None
            }
            Link::Down(at) => {
                // Ignored by poll(2).
                polled.push(entry(-1, 0));
                Some(at.saturating_duration_since(Instant::now()))
            }
        };
        if let Run::Active {
            rings,
            is_served: true,
        } = &self.run
        {
            for ring in &rings.rings {
                let call = self.calls.get(usize::from(ring.index));
                let call = call.map_or(-1, EventFd::as_raw_fd);
                polled.push(entry(call, libc::POLLIN));
                polled.push(entry(ring.kick.as_raw_fd(), libc::POLLIN));
            }
        }
        let ready = poll(&mut polled, patience);
        if ready.is_ok() {
            self.handle(&polled[WAKE], &polled[SOCKET], &polled[SOCKET + 1..]);
        }
        self.polled = polled;
        ready.map(|_| ())
    }

    /// Handles events of the commands' eventfd, the socket, and the queues (call and kick of each).
    fn handle(&mut self, wake: &libc::pollfd, socket: &libc::pollfd, queues: &[libc::pollfd]) {
        if wake.revents != 0 {
            // Fails only if it was cleared. What the commands are comes first: the end of a connection may be wanted.
            let _ = self.wake.read();
            return;
        }
        if let Run::Active { rings, .. } = &mut self.run {
            for (at, events) in queues.chunks_exact(2).enumerate() {
                if events[0].revents != 0 {
                    forward(&self.calls, rings, at);
                }
                let Some(ring) = rings.rings.get(at) else {
                    continue;
                };
                if events[1].revents != 0 {
                    // Nobody else has this one.
                    let _ = ring.kick.read();
                    if let Some(kick) = self.kicks.get(usize::from(ring.index)) {
                        shared_event::ring(kick);
                    }
                }
            }
        }
        match self.link {
            Link::Up { .. } if socket.revents & (libc::POLLRDHUP | libc::POLLHUP) != 0 => {
                self.lose(&Failure::Closed.into());
            }
            Link::Up { .. } if socket.revents != 0 => self.lose(&Failure::Unasked.into()),
            Link::Down(at) if at <= Instant::now() => self.reconnect(),
            _ => {}
        }
    }
}

/// Forwards the interrupt of a queue, if the back end has raised one.
fn forward(calls: &[EventFd], rings: &mut Rings, at: usize) {
    let call = rings.rings.get(at).map(|ring| usize::from(ring.index));
    if let Some(call) = call.and_then(|index| calls.get(index))
        && shared_event::take(call).is_ok()
    {
        rings.called(at);
    }
}
