//! The client's end: a connection to the server's VM, and a paired process.

use std::{
    io,
    os::{
        fd::{AsFd, FromRawFd, IntoRawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    doorbell::Doorbells,
    memory::{AddressSpace, GuestMemory, HostMemory, Mapping},
    shared_event,
};
use remoting_transport::socket;
use rustix::event::{PollFd, PollFlags, poll};
use vm_memory::{GuestAddress, GuestAddressSpace};
use vmfunc_gate::{
    host::{self, ClientSettings, Pages, Status},
    port::{Command, Reason, Role, State, registers as at},
    window::{self, PAGE},
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    CallingVcpu, Error, Refusal, Resources, WATCH, borrowed, hello, hello::Answer, host_error,
    kick, process::Process, refusal, side::End, stand_in::StandIn, timespec,
};

/// Timeout for a reply of the server's VM.
const PATIENCE: Duration = Duration::from_secs(2);

/// Registers that the guest writes and reads.
struct Registers {
    state: State,
    reason: Reason,
    error: u32,
    window: u64,
    features: u64,
    needs_kernel: bool,
    kernel: bool,
}

/// A paired process. The fields' order matters: the guest's mappings are removed first, then the
/// pages, which keep the client alive, too.
struct Pair {
    _placed: Vec<Box<dyn Mapping>>,
    _pages: [Pages; 3],
    client: host::Client,
    /// Set if the process can be watched.
    process: Option<Process>,
}

/// State of the connection, used by the port's thread and by pairing.
#[derive(Default)]
struct Link {
    /// Shared, because the port's thread may be polling it.
    stream: Option<Arc<UnixStream>>,
    offer: Option<hello::Offer>,
    /// An open module device for the next pair.
    gate: Option<host::Gate>,
    pair: Option<Pair>,
}

/// The address of BAR 2, and the memory there while there is no pair. The guest's mapping is
/// dropped before the memory.
struct WindowMapping {
    address: Option<u64>,
    placed: Option<Box<dyn Mapping>>,
    stand_in: StandIn,
}

/// The doorbell that wakes the server.
#[derive(Default)]
struct Bell {
    wake: Option<EventFd>,
    /// Address of BAR 0.
    place: Option<u64>,
    /// The doorbell is registered with KVM.
    listening: bool,
}

/// A client's end.
pub struct Client {
    name: String,
    server: PathBuf,
    pages: u32,
    lacks: u32,
    vcpu: Arc<dyn CallingVcpu>,
    memory: GuestMemory,
    space: Arc<dyn AddressSpace>,
    doorbells: Arc<dyn Doorbells>,
    kick: EventFd,
    stopping: AtomicBool,
    link: Mutex<Link>,
    bell: Mutex<Bell>,
    place: Mutex<WindowMapping>,
    registers: Mutex<Registers>,
    pairs: AtomicU64,
}

impl Client {
    /// Creates a client without a pair. The server need not exist yet.
    pub(super) fn new(
        name: &str,
        server: PathBuf,
        pages: u32,
        lacks: u32,
        resources: Resources,
    ) -> Result<Self, Error> {
        Ok(Self {
            name: name.to_owned(),
            server,
            pages,
            lacks,
            vcpu: resources.vcpu,
            memory: resources.memory,
            space: resources.space,
            doorbells: resources.doorbells,
            kick: EventFd::new(EFD_NONBLOCK).map_err(Error::EventFd)?,
            stopping: AtomicBool::new(false),
            link: Mutex::default(),
            bell: Mutex::default(),
            place: Mutex::new(WindowMapping {
                address: None,
                placed: None,
                stand_in: StandIn::new(window::SHARED + u64::from(pages) * PAGE)
                    .map_err(Error::Memory)?,
            }),
            registers: Mutex::new(Registers {
                state: State::Idle,
                reason: Reason::None,
                error: 0,
                window: 0,
                features: 0,
                needs_kernel: false,
                kernel: false,
            }),
            pairs: AtomicU64::new(0),
        })
    }

    fn set(&self, state: State, (reason, error): Refusal) {
        let mut registers = self.registers.lock_unpoisoned();
        (registers.state, registers.reason, registers.error) = (state, reason, error);
    }

    /// Executes a command of the guest's process. Runs on the vCPU's thread.
    fn command(&self, number: u32) {
        match Command::from_number(number) {
            Some(Command::Connect) if self.lacks != 0 => {
                self.set(State::Failed, (Reason::Host, self.lacks));
            }
            Some(Command::Connect) => {
                self.drop_pair();
                self.set(State::Connecting, (Reason::None, 0));
                kick(&self.kick);
            }
            Some(Command::Pair) => match self.pair() {
                Ok(()) => self.set(State::Paired, (Reason::None, 0)),
                // The connection stays open for another try.
                Err(refusal) => {
                    self.stand_in();
                    let connected = self.link.lock_unpoisoned().offer.is_some();
                    let state = if connected {
                        State::Connected
                    } else {
                        State::Failed
                    };
                    self.set(state, refusal);
                }
            },
            Some(Command::Unpair) => {
                self.end();
            }
            _ => self.set(State::Failed, (Reason::Invalid, 0)),
        }
    }

    fn drop_pair(&self) {
        let pair = self.link.lock_unpoisoned().pair.take();
        if let Some(pair) = &pair
            && let Err(error) = pair.client.unpair()
        {
            // The server may have ended before.
            log::debug!("{}: {error}", self.name);
        }
        // Frees its pages before the stand-in is mapped.
        drop(pair);
        self.registers.lock_unpoisoned().kernel = false;
        self.stand_in();
    }

    /// Maps the stand-in memory while there is no pair.
    fn stand_in(&self) {
        let mut place = self.place.lock_unpoisoned();
        let (Some(address), None) = (place.address, &place.placed) else {
            return;
        };
        let memory = HostMemory {
            address: place.stand_in.base(),
            len: place.stand_in.bytes(),
            read_only: false,
        };
        match self.space.map(memory, PAGE, Some(GuestAddress(address))) {
            Ok(placed) => place.placed = Some(placed),
            Err(error) => log::warn!("{}: nothing is at its window: {error}", self.name),
        }
    }

    /// Ends any use of the port.
    fn end(&self) {
        // First: a connection that is being established sees this.
        self.set(State::Idle, (Reason::None, 0));
        self.disconnect();
    }

    /// Ends the pair and the connection. The server's VM notices it.
    fn disconnect(&self) {
        self.drop_pair();
        let mut link = self.link.lock_unpoisoned();
        link.offer = None;
        // The port's thread may be polling it.
        let stream = link.stream.take();
        drop(link);
        if let Some(stream) = stream {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        self.ring_for(None);
        kick(&self.kick);
    }

    fn pair(&self) -> Result<(), Refusal> {
        let caller = self.vcpu.caller().map_err(|error| host_error(&error))?;
        let place = self.place.lock_unpoisoned().address;
        let (window, features, needs_kernel) = {
            let registers = self.registers.lock_unpoisoned();
            (registers.window, registers.features, registers.needs_kernel)
        };
        let mut link = self.link.lock_unpoisoned();
        let Some(offer) = &link.offer else {
            return Err((Reason::NotServing, 0));
        };
        let known = window::FEATURE_AVX | window::FEATURE_PKU;
        let valid = caller.ring == 3 && window == offer.window && features & !known == 0;
        let (Some(place), true, None) = (place, valid, &link.pair) else {
            return Err((Reason::Invalid, 0));
        };
        let same = caller.kernel == offer.kernel;
        if needs_kernel && !same {
            return Err((Reason::OtherKernel, 0));
        }
        let settings = ClientSettings {
            cr3: caller.cr3,
            window,
            window_gpa: place,
            shared_pages: self.pages,
            features: features | if same { 0 } else { window::USER_ONLY },
        };
        let Some(gate) = &link.gate else {
            kick(&self.kick);
            return Err((Reason::Refused, libc::EBUSY as u32));
        };
        let mut gate = Some(gate.try_clone().map_err(|error| refusal(&error))?);
        let mut result = None;
        let with_fd = self.vcpu.with_fd(&mut |vcpu| {
            result = gate.take().map(|gate| gate.into_client(vcpu, &settings));
        });
        with_fd.map_err(|error| host_error(&error))?;
        let client = match result {
            Some(Ok(client)) => client,
            Some(Err(error)) => return Err(refusal(&error)),
            None => return Err((Reason::Invalid, 0)),
        };
        // The file is now a client, and cannot be used for another one.
        link.gate = None;
        kick(&self.kick);
        let done = self.place_and_pair(&link, client, place, needs_kernel);
        let (mut pair, kernel) = done?;
        pair.process = Process::find(&self.memory.memory(), caller.cr3, window, place);
        link.pair = Some(pair);
        self.registers.lock_unpoisoned().kernel = kernel;
        self.pairs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Pretends that the module has paired a process. Each call of the module fails.
    #[cfg(test)]
    pub(super) fn pretend(&self, cr3: u64, window: u64) -> Result<(), Box<dyn std::error::Error>> {
        let place = self.place.lock_unpoisoned().address.unwrap_or_default();
        let client = host::Gate::without_module()?.pretend_client(self.pages);
        let pair = Pair {
            _placed: Vec::new(),
            _pages: client.window()?,
            client,
            process: Process::find(&self.memory.memory(), cr3, window, place),
        };
        self.link.lock_unpoisoned().pair = Some(pair);
        self.set(State::Paired, (Reason::None, 0));
        kick(&self.kick);
        Ok(())
    }

    fn place_and_pair(
        &self,
        link: &Link,
        client: host::Client,
        place: u64,
        needs_kernel: bool,
    ) -> Result<(Pair, bool), Refusal> {
        let (Some(offer), Some(stream)) = (&link.offer, &link.stream) else {
            return Err((Reason::NotServing, 0));
        };
        let failed = |error: host::Error| {
            log::debug!("{}: {error}", self.name);
            refusal(&error)
        };
        client.pair(offer.server.as_fd()).map_err(|error| {
            let refusal = failed(error);
            match refusal.1.cast_signed() {
                libc::ESRCH => (Reason::Gone, 0),
                libc::EADDRINUSE => (Reason::NoKernel, libc::EADDRINUSE as u32),
                _ => refusal,
            }
        })?;
        let kernel = client.status().map_err(failed)?.user_only == 0;
        if needs_kernel && !kernel {
            return Err((Reason::NoKernel, 0));
        }
        let pages = client.window().map_err(failed)?;
        self.place.lock_unpoisoned().placed = None;
        let mut placed = Vec::new();
        for page in &pages {
            let bytes = page.memory();
            let memory = HostMemory {
                address: bytes.as_ptr().cast(),
                len: bytes.len() as u64,
                read_only: page.readonly,
            };
            let at = GuestAddress(place + page.offset);
            placed.push(
                self.space
                    .map(memory, PAGE, Some(at))
                    .map_err(|error| host_error(&error))?,
            );
        }
        // Passes the memory for slow work. If the server has just ended, the port's thread notices
        // it.
        hello::share(stream, self.pages, client.as_fd()).map_err(|_| (Reason::Gone, 0))?;
        let pair = Pair {
            _placed: placed,
            _pages: pages,
            client,
            process: None,
        };
        Ok((pair, kernel))
    }

    /// Requests the server from the server's VM. Runs on the port's thread.
    fn connect(&self) -> Result<(), Refusal> {
        let unreachable = |error: io::Error| {
            log::warn!(
                "{}: no server: cannot reach its machine at {}: {error}; is it started with \
                 --accel-server?",
                self.name,
                self.server.display()
            );
            let number = error.raw_os_error().unwrap_or(0);
            (Reason::Unreachable, number.unsigned_abs())
        };
        let stream = socket::connect(&self.server).map_err(unreachable)?;
        wait_for(&stream, PATIENCE).map_err(unreachable)?;
        let offer = match hello::receive_answer(&stream).map_err(unreachable)? {
            Answer::Server(offer) => offer,
            Answer::No(why) => return Err((why, 0)),
        };
        let wake = offer.wake.try_clone().map_err(unreachable)?;
        // SAFETY: a descriptor that has no other owner.
        self.ring_for(Some(unsafe { EventFd::from_raw_fd(wake.into_raw_fd()) }));
        let mut link = self.link.lock_unpoisoned();
        if self.registers.lock_unpoisoned().state != State::Connecting {
            drop(link);
            // The guest, or the VM, has cancelled it.
            self.ring_for(None);
            return Err((Reason::None, 0));
        }
        link.stream = Some(Arc::new(stream));
        link.offer = Some(offer);
        Ok(())
    }

    /// Registers `wake` as the doorbell with KVM, or removes the doorbell.
    fn ring_for(&self, wake: Option<EventFd>) {
        let mut bell = self.bell.lock_unpoisoned();
        self.listen(&mut bell, false);
        bell.wake = wake;
        self.listen(&mut bell, true);
    }

    fn listen(&self, bell: &mut Bell, listen: bool) {
        let (Some(wake), Some(place)) = (&bell.wake, bell.place) else {
            bell.listening = false;
            return;
        };
        let address = place + at::DOORBELL;
        if bell.listening && !listen {
            // Fails if the doorbell was not registered.
            let _ = self.doorbells.unregister(wake, address);
        }
        if listen && let Err(error) = self.doorbells.register(wake, address) {
            // Writes are trapped instead.
            log::warn!("{}: KVM does not take the doorbell: {error}", self.name);
        }
        bell.listening = listen;
    }

    /// Opens the module's device for the next pair.
    fn prepare(&self) {
        let mut link = self.link.lock_unpoisoned();
        if link.gate.is_none() && link.offer.is_some() {
            match host::Gate::open() {
                Ok(gate) => link.gate = Some(gate),
                Err(error) => log::warn!("{}: {error}", self.name),
            }
        }
    }

    /// Waits for an event and handles it. Returns false to stop the thread.
    fn step(&self) -> io::Result<bool> {
        let (stream, is_watched) = {
            let link = self.link.lock_unpoisoned();
            let process = link.pair.as_ref().and_then(|pair| pair.process.as_ref());
            (link.stream.clone(), process.is_some())
        };
        let gone = {
            let nobody = borrowed(&self.kick);
            let stream = stream.as_ref().map_or(nobody, |stream| stream.as_fd());
            let mut fds = [
                PollFd::from_borrowed_fd(nobody, PollFlags::IN),
                PollFd::from_borrowed_fd(stream, PollFlags::RDHUP),
            ];
            let limit = is_watched.then(|| timespec(WATCH));
            match poll(&mut fds, limit.as_ref()) {
                Err(rustix::io::Errno::INTR) => return Ok(true),
                other => other?,
            };
            !fds[1].revents().is_empty()
        };
        let _ = self.kick.read();
        if self.stopping.load(Ordering::SeqCst) {
            return Ok(false);
        }
        if gone && stream.is_some() {
            self.lost();
        }
        self.look_after_process();
        if self.registers.lock_unpoisoned().state == State::Connecting {
            // Ends a connection to an earlier server.
            self.disconnect();
            match self.connect() {
                Ok(()) => {
                    self.prepare();
                    self.connected(State::Connected, (Reason::None, 0));
                }
                Err(refusal) => self.connected(State::Failed, refusal),
            }
        }
        self.prepare();
        Ok(true)
    }

    /// Sets the outcome of connecting, if the guest still waits for it.
    pub(super) fn connected(&self, state: State, (reason, error): Refusal) {
        let link = self.link.lock_unpoisoned();
        // It was cancelled meanwhile, and perhaps requested again: that request is still pending.
        if state == State::Connected && link.offer.is_none() {
            return;
        }
        let mut registers = self.registers.lock_unpoisoned();
        if registers.state == State::Connecting {
            (registers.state, registers.reason, registers.error) = (state, reason, error);
        }
    }

    /// Handles the end of the connection by the server's VM. Delegations end by themselves.
    fn lost(&self) {
        let mut link = self.link.lock_unpoisoned();
        link.stream = None;
        link.offer = None;
        drop(link);
        self.ring_for(None);
        let mut registers = self.registers.lock_unpoisoned();
        if matches!(registers.state, State::Connected | State::Paired) {
            (registers.state, registers.reason) = (State::Failed, Reason::Gone);
        }
    }

    /// Ends the pair of a process that has died without unpairing.
    fn look_after_process(&self) {
        let has_ended = {
            let link = self.link.lock_unpoisoned();
            let process = link.pair.as_ref().and_then(|pair| pair.process.as_ref());
            process.is_some_and(|process| !process.lives(&self.memory.memory()))
        };
        if !has_ended {
            return;
        }
        let mut registers = self.registers.lock_unpoisoned();
        // Another process has already requested a connection, which this thread is about to serve.
        if registers.state == State::Connecting {
            return;
        }
        (registers.state, registers.reason, registers.error) = (State::Idle, Reason::None, 0);
        drop(registers);
        log::info!("{}: the process that was paired has ended", self.name);
        self.disconnect();
    }

    fn status(&self) -> Status {
        let link = self.link.lock_unpoisoned();
        let status = link.pair.as_ref().map(|pair| pair.client.status());
        status.and_then(Result::ok).unwrap_or_default()
    }
}

impl BusDevice for Client {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if data.len() != 4 {
            return;
        }
        let value = match offset {
            at::MAGIC => at::MAGIC_VALUE,
            at::VERSION => at::INTERFACE,
            at::ROLE => Role::Client as u32,
            at::LACKS => self.lacks,
            at::SHARED => self.pages,
            at::EXITS => {
                let status = self.status();
                status.exits_inside.wrapping_sub(status.interrupts_inside) as u32
            }
            _ => {
                let registers = self.registers.lock_unpoisoned();
                match offset {
                    at::STATE => registers.state as u32,
                    at::REASON => registers.reason as u32,
                    at::ERROR => registers.error,
                    at::KERNEL => u32::from(registers.kernel),
                    _ => 0,
                }
            }
        };
        data.copy_from_slice(&value.to_le_bytes());
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Ok(bytes) = <[u8; 8]>::try_from(data) {
            if offset == at::WINDOW {
                self.registers.lock_unpoisoned().window = u64::from_le_bytes(bytes);
            }
            return;
        }
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            return;
        };
        let value = u32::from_le_bytes(bytes);
        match offset {
            at::FEATURES => self.registers.lock_unpoisoned().features = value.into(),
            at::NEEDS_KERNEL => self.registers.lock_unpoisoned().needs_kernel = value & 1 != 0,
            at::COMMAND => self.command(value),
            // KVM did not register it.
            at::DOORBELL => {
                if let Some(wake) = &self.bell.lock_unpoisoned().wake {
                    shared_event::ring(wake);
                }
            }
            _ => {}
        }
    }
}

impl End for Client {
    fn registers_at(&self, address: Option<u64>) {
        let mut bell = self.bell.lock_unpoisoned();
        self.listen(&mut bell, false);
        bell.place = address;
        self.listen(&mut bell, true);
    }

    fn window_at(&self, address: Option<u64>) {
        self.drop_pair();
        let mut place = self.place.lock_unpoisoned();
        place.placed = None;
        place.address = address;
        drop(place);
        self.stand_in();
    }

    fn run(&self) {
        loop {
            match self.step() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    log::error!("{}: nobody is paired any more: {error}", self.name);
                    self.set(State::Failed, (Reason::Invalid, 0));
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
        self.end();
    }

    fn in_use(&self) -> bool {
        // A pair stays mapped for a while after its server has ended.
        let link = self.link.lock_unpoisoned();
        link.offer.is_some() || link.pair.is_some()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let status = self.status();
        vec![
            ("pairs", self.pairs.load(Ordering::Relaxed)),
            ("exits", status.exits),
            ("exits_inside", status.exits_inside),
            ("interrupts_inside", status.interrupts_inside),
            ("doorbells", status.doorbells),
            ("ended", status.aborted),
            ("parked", status.parked),
            ("resumed", status.resumed),
            ("refused", status.refused),
        ]
    }
}

/// Waits until the stream is readable.
fn wait_for(stream: &UnixStream, limit: Duration) -> io::Result<()> {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = timespec(left);
        let mut fds = [PollFd::new(stream, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
