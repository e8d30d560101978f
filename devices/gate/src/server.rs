//! The server's end: its handlers, its frozen VM, and the admission of clients.
//!
//! ```text
//!            freeze (the vCPU's thread)         wake-up (the port's thread)
//!   Idle ──────────────────────────> Frozen ───────────────────────────────> Awake
//!     ^                                │ ^             freeze                  │
//!     │                                │ └─────────────────────────────────────┤
//!     └──────────── Ended <────────────┴───────────────────────────────────────┘
//!               given up (the machine); the end of the client, or of the process at slow work
//! ```
//!
//! Only the VMM lets the vCPU run again: [`Server::thaw`], [`Server::over`] and [`Server::give_up`]
//! return whether it has to.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    memory::{AddressSpace, GuestMemory, HostMemory, Mapping},
    named_socket::NamedSocket,
    shared_event,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{SocketFlags, accept_with},
};
use vm_memory::{GuestAddress, GuestAddressSpace};
use vmfunc_gate::{
    host::{self, Pages, ServerSettings},
    port::{Command, Reason, Role, State, registers as at},
    window::{self, HANDLERS, PAGE},
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    CallingVcpu, Error, Event, KERNEL, Refusal, Report, Resources, WATCH, borrowed, hello,
    host_error, kick, process::Process, refusal, side::End, timespec,
};

/// How long no client is admitted after a connection could not be accepted.
pub(super) const BREATH: Duration = Duration::from_millis(20);

/// A server that was given up.
#[must_use]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GivenUp {
    /// Its vCPU is frozen: the caller must let it run.
    pub standing: bool,
    /// The reason that its process is told: [`Reason::Lost`] if a client was taken out of the
    /// server's kernel.
    pub why: Reason,
}

/// Registers that the guest writes and reads.
struct Registers {
    state: State,
    reason: Reason,
    error: u32,
    count: u32,
    window: u64,
    pkru: u32,
    handlers: Box<[u64; HANDLERS]>,
    /// Address of BAR 2.
    place: Option<u64>,
}

/// Distinguishes a process that serves from a later one: a later process may have its page table at
/// the same address.
#[derive(Clone, Eq, PartialEq)]
struct Identity {
    cr3: u64,
    fs_base: u64,
    gs_base: u64,
    pkru: u32,
    window: u64,
    handlers: Vec<u64>,
}

impl Identity {
    /// Settings for the module, with the window at a guest-physical address.
    fn settings(&self, window_gpa: u64) -> ServerSettings {
        ServerSettings {
            cr3: self.cr3,
            fs_base: self.fs_base,
            gs_base: self.gs_base,
            pkru: self.pkru,
            window: self.window,
            window_gpa,
        }
    }
}

/// A process that is registered with the module.
struct Registered {
    server: host::Server,
    identity: Identity,
    place: u64,
    kernel: [u64; KERNEL],
    /// Set if the process can be watched.
    process: Option<Process>,
}

impl Registered {
    /// Whether its process, which is not frozen, has ended.
    fn has_ended(&self, memory: &GuestMemory) -> bool {
        let process = self.process.as_ref();
        process.is_some_and(|process| !process.lives(&memory.memory()))
    }
}

/// The client's memory in this VM. The guest's mapping is dropped first.
struct Shared {
    _placed: Box<dyn Mapping>,
    _pages: Pages,
    count: u32,
}

#[derive(Default)]
struct Module {
    /// An open module device for the next server, opened by the port's thread.
    gate: Option<host::Gate>,
    registered: Option<Registered>,
    /// Counts servers, so that a message about one is not attributed to a later one.
    generation: u64,
    shared: Option<Shared>,
    /// The vCPU is frozen.
    standing: bool,
    /// Why the port has given up the server by itself, until the VMM asks.
    over: Option<Reason>,
    /// The process that was doing slow work when its server was given up, until it has been told.
    untold: Option<Identity>,
}

/// State of the port's thread.
#[derive(Default)]
pub(super) struct Door {
    /// Connection to a client's VM, and the generation of the server that it was given.
    client: Option<(UnixStream, u64)>,
    /// No connection can be accepted at present.
    pub(super) closed: bool,
}

/// A server's end.
pub struct Server {
    name: String,
    pub(super) socket: NamedSocket,
    lacks: u32,
    vcpu: Arc<dyn CallingVcpu>,
    memory: GuestMemory,
    space: Arc<dyn AddressSpace>,
    report: Report,
    kick: EventFd,
    wake: EventFd,
    stopping: AtomicBool,
    module: Mutex<Module>,
    /// Always locked after `module`, if both are.
    registers: Mutex<Registers>,
    freezes: AtomicU64,
    wakes: AtomicU64,
}

impl Server {
    /// Listens for clients' VMs; no process serves yet. A stale socket file, on which no process
    /// listens, is replaced.
    pub(super) fn new(
        name: &str,
        socket: &Path,
        lacks: u32,
        resources: Resources,
    ) -> Result<Self, Error> {
        let socket = NamedSocket::listen(socket)?;
        let event = || EventFd::new(EFD_NONBLOCK).map_err(Error::EventFd);
        Ok(Self {
            name: name.to_owned(),
            socket,
            lacks,
            vcpu: resources.vcpu,
            memory: resources.memory,
            space: resources.space,
            report: resources.report,
            kick: event()?,
            wake: event()?,
            stopping: AtomicBool::new(false),
            module: Mutex::default(),
            registers: Mutex::new(Registers {
                state: State::Idle,
                reason: Reason::None,
                error: 0,
                count: 0,
                window: 0,
                pkru: 0,
                handlers: Box::new([0; HANDLERS]),
                place: None,
            }),
            freezes: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
        })
    }

    /// Whether the vCPU is frozen.
    pub fn is_frozen(&self) -> bool {
        self.module.lock_unpoisoned().standing
    }

    /// After [`Event::Woken`]: whether the vCPU is frozen but has slow work to do, so that the
    /// caller must let it run.
    pub fn thaw(&self) -> bool {
        let mut module = self.module.lock_unpoisoned();
        let awake = self.registers.lock_unpoisoned().state == State::Awake;
        awake && std::mem::take(&mut module.standing)
    }

    /// After [`Event::Over`]: the server that the port has given up, unless the VMM has given it up
    /// since, or the process serves again.
    pub fn over(&self) -> Option<GivenUp> {
        let mut module = self.module.lock_unpoisoned();
        let why = module.over.take()?;
        Some(GivenUp {
            standing: std::mem::take(&mut module.standing),
            why,
        })
    }

    /// Gives up the server, if there is one: delegations end, and no client enters any more.
    pub fn give_up(&self, why: Reason) -> Option<GivenUp> {
        let mut module = self.module.lock_unpoisoned();
        let retired = self.retire(&mut module, why);
        let why = retired.or(module.over)?;
        module.over = None;
        Some(GivenUp {
            standing: std::mem::take(&mut module.standing),
            why,
        })
    }

    /// Gives up the server of this generation, but no later one, and reports it. Runs on the port's
    /// thread.
    fn end(&self, generation: u64, why: Reason) {
        let mut module = self.module.lock_unpoisoned();
        if module.generation != generation {
            return;
        }
        if let Some(why) = self.retire(&mut module, why) {
            module.over = Some(why);
            drop(module);
            (self.report)(Event::Over);
        }
    }

    /// Tells the module and the process; returns the final reason.
    fn retire(&self, module: &mut Module, why: Reason) -> Option<Reason> {
        let registered = module.registered.take()?;
        let why = match registered.server.retire() {
            Ok(()) => why,
            Err(error) if error.number() == Some(libc::EOWNERDEAD) => Reason::Lost,
            Err(error) => {
                log::warn!("{}: {error}", self.name);
                why
            }
        };
        // The client's memory stays until the next server: this one may be using it for its work.
        module.gate = None;
        module.untold = (!module.standing).then_some(registered.identity);
        self.set(State::Ended, (why, 0));
        kick(&self.kick);
        Some(why)
    }

    fn set(&self, state: State, (reason, error): Refusal) {
        let mut registers = self.registers.lock_unpoisoned();
        (registers.state, registers.reason, registers.error) = (state, reason, error);
    }

    /// Executes a command of the guest's process. Runs on the vCPU's thread.
    fn command(&self, number: u32) {
        match Command::from_number(number) {
            Some(Command::Freeze) => match self.freeze() {
                Ok(true) => {
                    self.freezes.fetch_add(1, Ordering::Relaxed);
                    kick(&self.kick);
                    (self.report)(Event::Frozen);
                }
                Ok(false) => {}
                Err(refusal) => self.set(State::Failed, refusal),
            },
            Some(Command::Stop) => {
                // Its vCPU is running, because this is its thread. The process knows of the end.
                let _ = self.give_up(Reason::Gone);
                self.module.lock_unpoisoned().untold = None;
            }
            _ => self.set(State::Failed, (Reason::Invalid, 0)),
        }
    }

    /// Freezes the vCPU. Returns false if the process must first be told what happened during its
    /// slow work.
    fn freeze(&self) -> Result<bool, Refusal> {
        let caller = self.vcpu.caller().map_err(|error| host_error(&error))?;
        if caller.ring != 3 {
            return Err((Reason::Invalid, 0));
        }
        let mut module = self.module.lock_unpoisoned();
        let asks = self.identity(&caller)?;
        if module.untold.take().is_some_and(|untold| untold == asks) {
            return Ok(false);
        }
        let is_over = |before: &Registered| {
            let is_another = before.identity != asks;
            // A process with the same page table has replaced the earlier one.
            is_another && (before.identity.cr3 == asks.cr3 || before.has_ended(&self.memory))
        };
        if module.registered.as_ref().is_some_and(is_over) {
            self.retire(&mut module, Reason::Gone);
            module.untold = None;
        }
        // Before any client can be admitted.
        self.vcpu.freeze(true).map_err(|error| host_error(&error))?;
        let done = match &module.registered {
            Some(registered) if registered.identity != asks => Err((Reason::Invalid, 0)),
            Some(registered) => registered.server.sleep().map_err(|error| refusal(&error)),
            None => self.register(&caller, &asks, &mut module),
        };
        if done.is_ok() {
            module.standing = true;
            self.set(State::Frozen, (Reason::None, 0));
        } else {
            // This is the vCPU's own thread.
            let _ = self.vcpu.freeze(false);
            module.standing = false;
        }
        done.map(|()| true)
    }

    /// The identity of the calling process, from the registers that it has written.
    fn identity(&self, caller: &super::Caller) -> Result<Identity, Refusal> {
        let registers = self.registers.lock_unpoisoned();
        let handlers = registers.handlers.get(..registers.count as usize);
        Ok(Identity {
            cr3: caller.cr3 & !0xfff,
            fs_base: caller.fs_base,
            gs_base: caller.gs_base,
            pkru: registers.pkru,
            window: registers.window,
            handlers: handlers.ok_or((Reason::Invalid, 0))?.to_vec(),
        })
    }

    fn register(
        &self,
        caller: &super::Caller,
        identity: &Identity,
        module: &mut Module,
    ) -> Result<(), Refusal> {
        let place = self.registers.lock_unpoisoned().place;
        let settings = identity.settings(place.ok_or((Reason::Invalid, 0))?);
        module.shared = None;
        let Some(gate) = &module.gate else {
            // The port's thread will open it soon, if the host has the module.
            kick(&self.kick);
            return Err(if self.lacks == 0 {
                (Reason::Refused, libc::EAGAIN as u32)
            } else {
                (Reason::Host, 0)
            });
        };
        let mut gate = Some(gate.try_clone().map_err(|error| refusal(&error))?);
        let mut result = None;
        let with_fd = self.vcpu.with_fd(&mut |vcpu| {
            let gate = gate.take();
            result = gate.map(|gate| gate.into_server(vcpu, &identity.handlers, &settings));
        });
        with_fd.map_err(|error| host_error(&error))?;
        let server = match result {
            Some(Ok(server)) => server,
            Some(Err(error)) => {
                log::warn!("{}: no server: {error}", self.name);
                return Err(refusal(&error));
            }
            None => return Err((Reason::Invalid, 0)),
        };
        let place = settings.window_gpa;
        self.serve(module, server, &caller.kernel, (identity.clone(), place));
        Ok(())
    }

    /// Admits clients from now on.
    fn serve(
        &self,
        module: &mut Module,
        server: host::Server,
        kernel: &[u64; KERNEL],
        (identity, place): (Identity, u64),
    ) {
        let (cr3, window) = (identity.cr3, identity.window);
        module.generation += 1;
        // An end that the VMM has not asked for belonged to the earlier server.
        module.over = None;
        module.registered = Some(Registered {
            server,
            identity,
            place,
            kernel: *kernel,
            process: Process::find(&self.memory.memory(), cr3, window, place),
        });
    }

    /// Pretends that the module has registered a process as a server, with the handlers that it has
    /// written; it is either frozen or doing slow work. Each call of the module fails.
    #[cfg(any(test, feature = "test-support"))]
    pub fn pretend(&self, settings: &ServerSettings, standing: bool) -> io::Result<()> {
        let server = host::Gate::without_module()?.pretend_server();
        let mut module = self.module.lock_unpoisoned();
        let handlers = {
            let registers = self.registers.lock_unpoisoned();
            let handlers = registers.handlers.get(..registers.count as usize);
            handlers.unwrap_or_default().to_vec()
        };
        let identity = Identity {
            cr3: settings.cr3,
            fs_base: settings.fs_base,
            gs_base: settings.gs_base,
            pkru: settings.pkru,
            window: settings.window,
            handlers,
        };
        let process = (identity, settings.window_gpa);
        self.serve(&mut module, server, &[0; KERNEL], process);
        module.standing = standing;
        drop(module);
        let state = if standing {
            State::Frozen
        } else {
            State::Awake
        };
        self.set(state, (Reason::None, 0));
        kick(&self.kick);
        Ok(())
    }

    /// Offers the server to a client's VM, or replies why not. Returns the server's generation.
    fn admit(&self, stream: &UnixStream, taken: bool) -> io::Result<Option<u64>> {
        let module = self.module.lock_unpoisoned();
        let why = match &module.registered {
            Some(_) if taken => Reason::Taken,
            Some(registered) => {
                hello::offer(
                    stream,
                    registered.identity.window,
                    &registered.kernel,
                    registered.server.as_fd(),
                    borrowed(&self.wake),
                )?;
                return Ok(Some(module.generation));
            }
            None if self.lacks != 0 => Reason::Host,
            None => Reason::NotServing,
        };
        drop(module);
        hello::refuse(stream, why)?;
        Ok(None)
    }

    /// Maps the client's memory into this VM, for slow work.
    fn share(&self, of: u64, (pages, memory): (u32, OwnedFd)) -> io::Result<()> {
        if u64::from(pages) > window::SHARED_PAGES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let pages = host::shared_pages(memory.as_fd(), pages).map_err(io::Error::other)?;
        let mut module = self.module.lock_unpoisoned();
        let registered = module.registered.as_ref();
        let Some(registered) = registered.filter(|_| module.generation == of) else {
            return Ok(());
        };
        let place = registered.place + window::SHARED;
        // Removes an earlier mapping first: the two must not overlap.
        module.shared = None;
        let bytes = pages.memory();
        let memory = HostMemory {
            address: bytes.as_ptr().cast(),
            len: bytes.len() as u64,
            read_only: false,
        };
        let placed = self.space.map(memory, PAGE, Some(GuestAddress(place)))?;
        module.shared = Some(Shared {
            _placed: placed,
            count: (bytes.len() as u64 / PAGE) as u32,
            _pages: pages,
        });
        Ok(())
    }

    /// Handles a client's doorbell.
    fn rung(&self) {
        let module = self.module.lock_unpoisoned();
        let Some(registered) = &module.registered else {
            return;
        };
        if self.registers.lock_unpoisoned().state != State::Frozen {
            return;
        }
        match registered.server.wake() {
            Ok(()) => {
                self.wakes.fetch_add(1, Ordering::Relaxed);
                self.set(State::Awake, (Reason::None, 0));
                drop(module);
                (self.report)(Event::Woken);
            }
            Err(error) if error.number() == Some(libc::ESRCH) => {
                let generation = module.generation;
                drop(module);
                self.end(generation, Reason::Lost);
            }
            // Another thread of the client is still inside; the client will ring again.
            Err(error) => log::debug!("{}: {error}", self.name),
        }
    }

    /// Opens the module's device for the next server.
    fn prepare(&self) {
        let mut module = self.module.lock_unpoisoned();
        if module.gate.is_none() && module.registered.is_none() {
            match host::Gate::open() {
                Ok(gate) => module.gate = Some(gate),
                Err(error) => log::debug!("{}: {error}", self.name),
            }
        }
    }

    /// A process that ends during slow work sends no message, and its client would wait forever.
    fn look_after_process(&self) {
        let module = self.module.lock_unpoisoned();
        let at_work = module.registered.as_ref().filter(|_| !module.standing);
        if !at_work.is_some_and(|registered| registered.has_ended(&self.memory)) {
            return;
        }
        let generation = module.generation;
        drop(module);
        log::info!("{}: the process has ended at slow work", self.name);
        self.end(generation, Reason::Gone);
        // There is no process to tell.
        self.module.lock_unpoisoned().untold = None;
    }

    /// Maximum time that the thread may sleep.
    pub(super) fn limit(&self, door: &Door) -> Option<Duration> {
        let module = self.module.lock_unpoisoned();
        let at_work = module.registered.is_some() && !module.standing;
        match (door.closed, at_work) {
            (true, _) => Some(BREATH),
            (false, true) => Some(WATCH),
            (false, false) => None,
        }
    }

    /// Waits for an event and handles it. Returns false to stop the thread.
    pub(super) fn step(&self, door: &mut Door) -> io::Result<bool> {
        let limit = self.limit(door).map(timespec);
        let [kicked, rung, heard, connecting] = {
            let nobody = borrowed(&self.kick);
            let stream = door.client.as_ref();
            let stream = stream.map_or(nobody, |(stream, _)| stream.as_fd());
            let listener = self.socket.listener.as_fd();
            let listener = if door.closed { nobody } else { listener };
            let mut fds = [nobody, borrowed(&self.wake), stream, listener]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut fds, limit.as_ref()) {
                Err(rustix::io::Errno::INTR) => return Ok(true),
                other => other?,
            };
            fds.map(|fd| !fd.revents().is_empty())
        };
        if kicked {
            let _ = self.kick.read();
        }
        if self.stopping.load(Ordering::SeqCst) {
            return Ok(false);
        }
        self.prepare();
        self.look_after_process();
        if heard {
            self.hear(door);
        }
        // A client whose server was given up has to ask again.
        let module = self.module.lock_unpoisoned();
        let current = module.registered.as_ref().map(|_| module.generation);
        drop(module);
        if door
            .client
            .as_ref()
            .is_some_and(|(_, of)| current != Some(*of))
        {
            door.client = None;
        }
        if rung {
            // The other VM's process holds it, too.
            let _ = shared_event::take(&self.wake);
            if door.client.is_some() {
                self.rung();
            }
        }
        if !std::mem::take(&mut door.closed) && connecting {
            self.accept(door);
        }
        Ok(true)
    }

    /// Handles a message of the client's VM, or the end of its connection.
    fn hear(&self, door: &mut Door) {
        let Some((stream, of)) = &door.client else {
            return;
        };
        let word = hello::receive_shared(stream).and_then(|word| match word {
            Some(word) => self.share(*of, word).map(|()| true),
            None => Ok(false),
        });
        let stays = word.unwrap_or_else(|error| {
            log::warn!("{}: its client is not served any more: {error}", self.name);
            false
        });
        if !stays {
            self.end(*of, Reason::Gone);
            door.client = None;
        }
    }

    fn accept(&self, door: &mut Door) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = match accept_with(&self.socket.listener, flags) {
            Ok(stream) => UnixStream::from(stream),
            Err(error) => {
                // For example, no descriptors are left: the connection is still pending, and would
                // be reported again immediately.
                log::debug!("{}: {error}", self.name);
                door.closed = true;
                return;
            }
        };
        match self.admit(&stream, door.client.is_some()) {
            Ok(Some(generation)) => door.client = Some((stream, generation)),
            Ok(None) => {}
            Err(error) => log::debug!("{}: a client has left: {error}", self.name),
        }
    }
}

impl BusDevice for Server {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if data.len() != 4 {
            return;
        }
        let shared = match offset {
            at::SHARED => self
                .module
                .lock_unpoisoned()
                .shared
                .as_ref()
                .map_or(0, |it| it.count),
            _ => 0,
        };
        let registers = self.registers.lock_unpoisoned();
        let value = match offset {
            at::MAGIC => at::MAGIC_VALUE,
            at::VERSION => at::INTERFACE,
            at::ROLE => Role::Server as u32,
            at::STATE => registers.state as u32,
            at::REASON => registers.reason as u32,
            at::ERROR => registers.error,
            at::LACKS => self.lacks,
            at::SHARED => shared,
            _ => 0,
        };
        data.copy_from_slice(&value.to_le_bytes());
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Ok(bytes) = <[u8; 8]>::try_from(data) {
            let value = u64::from_le_bytes(bytes);
            let mut registers = self.registers.lock_unpoisoned();
            if offset == at::WINDOW {
                registers.window = value;
            } else if offset >= at::HANDLERS && offset.is_multiple_of(8) {
                let index = ((offset - at::HANDLERS) / 8) as usize;
                if let Some(handler) = registers.handlers.get_mut(index) {
                    *handler = value;
                }
            }
            return;
        }
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            return;
        };
        let value = u32::from_le_bytes(bytes);
        match offset {
            at::COUNT => self.registers.lock_unpoisoned().count = value,
            at::PKRU => self.registers.lock_unpoisoned().pkru = value,
            at::COMMAND => self.command(value),
            _ => {}
        }
    }
}

impl End for Server {
    fn registers_at(&self, _address: Option<u64>) {}

    fn window_at(&self, address: Option<u64>) {
        // A serving process is frozen. If the guest moves the window, it is running, and the old
        // process can no longer be served.
        let _ = self.give_up(Reason::Invalid);
        self.module.lock_unpoisoned().shared = None;
        self.registers.lock_unpoisoned().place = address;
    }

    fn run(&self) {
        self.prepare();
        let mut door = Door::default();
        loop {
            match self.step(&mut door) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    log::error!("{}: nobody is served any more: {error}", self.name);
                    let generation = self.module.lock_unpoisoned().generation;
                    self.end(generation, Reason::Gone);
                    return;
                }
            }
        }
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        kick(&self.kick);
    }

    fn reset(&self) {
        let _ = self.give_up(Reason::Invalid);
        let mut module = self.module.lock_unpoisoned();
        (module.shared, module.untold) = (None, None);
        drop(module);
        self.set(State::Idle, (Reason::None, 0));
    }

    fn in_use(&self) -> bool {
        self.module.lock_unpoisoned().registered.is_some()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("freezes", self.freezes.load(Ordering::Relaxed)),
            ("wakes", self.wakes.load(Ordering::Relaxed)),
        ]
    }
}
