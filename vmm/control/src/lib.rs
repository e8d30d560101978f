//! The control loop: one thread that owns the machine and handles all of its events.
//!
//! ```text
//!   REST API ──ApiReceiver──┐
//!   guest, vCPUs ──events───┼──> Control ──> Machine
//!   SIGTERM, SIGINT ────────┘       └──────> event monitor
//! ```
//!
//! - [`life`]: the states of a VM; [`last_resort`]: termination that does not depend on storage.
//! - [`early_resets`]: guests that reset themselves again and again.
//! - [`gate`]: machines that are stopped while they serve others.
//! - [`migration`]: machines that leave for another host or arrive from one; [`compatible`]: whether this host supports
//!   what their guests have seen.
//! - [`accel`]: moves of an accelerator's applications to other workers; [`applications`]: snapshots that contain them;
//!   [`writing`]: snapshots and core dumps, which a thread of their own writes; [`restore`]: what is made from a snapshot.
//! - [`booting`]: boots and other uses of files that are not open; [`queue`]: the order in which threads make machines.
//! - [`storage`]: resets, pauses and other ends that wait until storage has answered.
//! - [`signals`]: signals, which a thread of their own receives.
//! - [`requests`]: the implementation of each API call; [`removals`]: removal and swapping of devices.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod accel;
mod applications;
mod booting;
mod compatible;
mod early_resets;
pub mod events;
mod gate;
mod host_names;
mod last_resort;
mod life;
mod migration;
mod queue;
mod removals;
mod requests;
mod restore;
mod signals;
mod storage;
mod writing;

use std::{
    collections::BTreeMap,
    io,
    os::fd::AsRawFd,
    sync::mpsc,
    time::{Duration, Instant},
};

use base::Chain;
use devices::guest_event::GuestEvent;
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use vmm_api::{ApiError, ApiReceiver, Handler, Reply, Request, Response, RestoreConfig};
use vmm_config::VmConfig;
use vmm_confinement::seccomp::Filters;
use vmm_machine::{
    cpu::CpuEvent,
    events::{self as machine_events, EventReceiver, EventSender, MachineEvent},
    host::Shell,
};
use vmm_snapshot::lazy::Question;
use vmm_sys_util::epoll::EventSet;

use self::{
    accel::Moving,
    booting::Adding,
    early_resets::EarlyResets,
    last_resort::LastResort,
    life::Life,
    migration::Migrations,
    queue::Queue,
    removals::Removals,
    signals::{Signal, Signals},
    storage::{GuestWish, StorageWaits},
};
use crate::events::EventMonitor;

pub use self::signals::block_signals;

/// What to do before the first request.
#[derive(Debug, Default)]
pub enum Start {
    /// Wait for requests.
    #[default]
    Wait,
    /// Create a VM and boot it.
    Boot(Box<VmConfig>),
    /// Restore a VM.
    Restore(RestoreConfig),
}

/// How the loop starts.
pub struct StartOptions {
    /// What to do first.
    pub start: Start,
    /// How system calls are filtered.
    pub filters: Filters,
    /// When the process started.
    pub started: Instant,
    /// The process stays when the guest powers off.
    pub no_shutdown: bool,
}

/// Why the loop ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExitReason {
    /// The guest powered off.
    GuestShutdown,
    /// A client requested it.
    Request,
    /// A signal requested it.
    Signal,
    /// The guest was lost; the log says why.
    GuestFailed,
}

/// The loop could not start or continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A host operation failed.
    #[error("cannot {action}")]
    Host {
        /// The attempted operation.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The hypervisor.
    #[error("cannot use the hypervisor")]
    Hypervisor(#[from] hypervisor::Error),
    /// The initial VM could not be started.
    #[error("cannot start the VM: {0}")]
    Start(ApiError),
    /// The event loop.
    #[error("the control loop failed")]
    Loop(#[source] event_manager::Error),
}

const TOKEN_API: u32 = 0;
const TOKEN_MACHINE: u32 = 1;
const TOKEN_SIGNAL: u32 = 2;
const TOKEN_REMOVALS: u32 = 3;
const TOKEN_ALARMS: u32 = 4;
const TOKEN_MIGRATION: u32 = 5;
const TOKEN_STORAGE: u32 = 6;
const TOKEN_WATCHDOG: u32 = 7;

/// Milliseconds without a request after which a VM shell is created in advance. Whoever started the process is waiting
/// for a first reply, which comes first.
const IDLE_MS: i32 = 20;

/// The KVM part of a machine, which takes a while to create.
enum Advance {
    /// Nothing is created in advance.
    No,
    /// To be created as soon as there is nothing else to do.
    Due,
    Made(Shell),
}

impl Advance {
    fn make() -> Self {
        match Shell::new() {
            Ok(shell) => Self::Made(shell),
            Err(error) => {
                log::debug!("no VM in advance: {error}");
                Self::No
            }
        }
    }
}

/// Everything that the control thread owns.
pub struct Control {
    api: Option<ApiReceiver>,
    monitor: EventMonitor,
    life: Life,
    migrations: Migrations,
    removals: Removals,
    storage: StorageWaits,
    early_resets: EarlyResets,
    /// Moves of accelerators' applications in progress, by the accelerator's name.
    moves: BTreeMap<String, Moving>,
    /// Requests for disks whose images are being opened.
    adding: BTreeMap<u64, Adding>,
    /// Threads that make and end machines.
    queue: Queue,
    /// Those that end machines.
    ends: Queue,
    sender: EventSender,
    receiver: EventReceiver,
    signals: Signals,
    filters: Filters,
    /// For the first machine.
    advance: Advance,
    started: Instant,
    /// The process stays when the guest powers off.
    no_shutdown: bool,
    exit: Option<ExitReason>,
}

/// Runs until the VMM is to end. Call it on a thread that has blocked the signals of [`block_signals`] and is
/// [confined](Filters::confine); the same must be true of all threads started earlier.
pub fn run(
    options: StartOptions,
    api: ApiReceiver,
    monitor: EventMonitor,
) -> Result<ExitReason, Error> {
    hypervisor::install_kick_handler()?;
    // No VM can have AMX any more once the process has had a vCPU. Guests do not see it unless they are to; where the
    // processor lacks it, a VM that asks for it is told.
    if let Err(error) = hypervisor::permit_amx() {
        log::debug!("{error}");
    }
    let mut control = Control::new(options.filters, options.started, monitor)?;
    control.signals = Signals::start().map_err(|source| Error::Host {
        action: "listen to signals",
        source,
    })?;
    control.api = Some(api);
    control.no_shutdown = options.no_shutdown;
    control.monitor.emit("vmm", "starting", &[]);
    let first = match options.start {
        Start::Wait => {
            control.advance = Advance::Due;
            Ok(None)
        }
        Start::Boot(config) => control
            .handle(Request::VmCreate(config))
            .map(|_| Some(control.begin(Request::VmBoot))),
        Start::Restore(config) => Ok(Some(control.begin(Request::VmRestore(config, Vec::new())))),
    };
    // The reply to the initial request, if that takes time.
    let mut started = first.map_err(Error::Start)?;
    let mut manager = EventManager::new().map_err(Error::Loop)?;
    let id = manager.add_subscriber(control);
    loop {
        if let Some(Ok(answer)) = started.as_ref().map(mpsc::Receiver::try_recv) {
            answer.map_err(Error::Start)?;
            started = None;
        }
        let control = manager.subscriber_mut(id).map_err(Error::Loop)?;
        let last_word = control.migrations.last_word();
        if last_word == Some(Duration::ZERO) {
            control.exit.get_or_insert(ExitReason::Request);
        }
        if let Some(reason) = control.exit {
            let in_time = LastResort::start(last_resort::PATIENCE, last_resort::leave)
                .inspect_err(|error| log::warn!("the end may have to wait for storage: {error}"));
            control.end_writing();
            control.end_with_process();
            // Machines and images that are under way.
            control.migrations.job = migration::Job::None;
            control.forget_disks(migration::OVER);
            drop(in_time);
            control.monitor.emit("vmm", "shutdown", &[]);
            return Ok(reason);
        }
        if let Some(left) = last_word {
            let wait = i32::try_from(left.as_millis())
                .unwrap_or(i32::MAX)
                .saturating_add(1);
            manager.run_with_timeout(wait).map_err(Error::Loop)?;
        } else if !matches!(control.advance, Advance::Due) {
            manager.run().map_err(Error::Loop)?;
        } else if manager.run_with_timeout(IDLE_MS).map_err(Error::Loop)? == 0 {
            let control = manager.subscriber_mut(id).map_err(Error::Loop)?;
            control.advance = Advance::make();
        }
    }
}

impl MutEventSubscriber for Control {
    fn init(&mut self, ops: &mut EventOps) {
        let sources = [
            (
                self.api.as_ref().map(|api| api.event().as_raw_fd()),
                TOKEN_API,
            ),
            (Some(self.receiver.wake_event().as_raw_fd()), TOKEN_MACHINE),
            (Some(self.signals.fd()), TOKEN_SIGNAL),
            (Some(self.removals.timer()), TOKEN_REMOVALS),
            (Some(self.sender.alarms().fd()), TOKEN_ALARMS),
            (Some(self.sender.watchdog().fd()), TOKEN_WATCHDOG),
            (Some(self.migrations.fd()), TOKEN_MIGRATION),
            (Some(self.storage.fd()), TOKEN_STORAGE),
        ];
        for (fd, token) in sources {
            let Some(fd) = fd else { continue };
            if let Err(error) = ops.add(Events::with_data_raw(fd, token, EventSet::IN)) {
                log::error!("cannot watch the control loop's events: {error}");
                self.exit = Some(ExitReason::Signal);
            }
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        match events.data() {
            TOKEN_API => {
                if let Some(api) = self.api.take() {
                    api.serve(self);
                    self.api = Some(api);
                }
            }
            TOKEN_MACHINE => self.machine_events(),
            TOKEN_REMOVALS => self.removals_overdue(),
            TOKEN_ALARMS => self.alarms(),
            TOKEN_WATCHDOG => self.watchdog(),
            TOKEN_MIGRATION => self.migration_work(),
            TOKEN_STORAGE => self.storage_work(),
            _ => self.signal(),
        }
    }
}

impl Control {
    /// Creates a control loop without a VM and without an API.
    fn new(filters: Filters, started: Instant, monitor: EventMonitor) -> Result<Self, Error> {
        let host = |action| move |source| Error::Host { action, source };
        let (sender, receiver) = machine_events::queue().map_err(host("create an event queue"))?;
        Ok(Self {
            api: None,
            monitor,
            life: Life::default(),
            migrations: Migrations::new().map_err(host("create an event"))?,
            removals: Removals::new().map_err(host("create a timer"))?,
            early_resets: EarlyResets::default(),
            storage: StorageWaits::new().map_err(host("create a timer"))?,
            moves: BTreeMap::new(),
            adding: BTreeMap::new(),
            queue: Queue::default(),
            ends: Queue::default(),
            sender,
            receiver,
            signals: Signals::none().map_err(host("create an event"))?,
            filters,
            advance: Advance::No,
            started,
            no_shutdown: false,
            exit: None,
        })
    }

    /// Takes the request with which the process starts; returns where the reply comes.
    fn begin(&mut self, request: Request) -> mpsc::Receiver<Result<Response, ApiError>> {
        let (sender, answer) = mpsc::sync_channel(1);
        // The receiver is gone if the loop has ended.
        let reply = Reply::new(move |answer| drop(sender.send(answer)));
        self.take(request, reply);
        answer
    }

    /// Handles the machine's events.
    fn machine_events(&mut self) {
        // Only those that are waiting now, so that a guest that keeps causing events does not starve clients.
        for _ in 0..self.receiver.waiting() {
            let Some(event) = self.receiver.next() else {
                break;
            };
            self.machine_event(event);
        }
    }

    fn machine_event(&mut self, event: MachineEvent) {
        match event {
            MachineEvent::Guest(GuestEvent::Shutdown) => {
                log::info!("the guest has powered off");
                self.monitor.emit("guest", "shutdown", &[]);
                self.abandon_migration();
                match self.no_shutdown {
                    true => self.end_when_quiet(GuestWish::PowerOff),
                    false => self.exit = Some(ExitReason::GuestShutdown),
                }
            }
            MachineEvent::Guest(GuestEvent::Reset) | MachineEvent::Cpu(CpuEvent::Reset) => {
                log::info!("the guest has asked for a reset");
                self.monitor.emit("guest", "reset", &[]);
                self.count_early_reset();
                self.abandon_migration();
                self.end_when_quiet(GuestWish::Reset);
            }
            MachineEvent::Guest(GuestEvent::CpuEjected(vcpu)) => {
                if let Some(machine) = self.life.machine_mut() {
                    machine.cpu_ejected(vcpu);
                }
                self.cpus_leave();
            }
            MachineEvent::Guest(GuestEvent::Panicked) => self.guest_panicked("panic"),
            MachineEvent::Guest(GuestEvent::CrashLoaded) => self.guest_panicked("crash_loaded"),
            MachineEvent::Cpu(CpuEvent::Failed(error)) => {
                log::error!("the guest is lost: {}", Chain(&error));
                self.monitor
                    .emit("guest", "failed", &[("reason", &error.to_string())]);
                self.exit = Some(ExitReason::GuestFailed);
            }
            // Of a machine that has ended meanwhile.
            MachineEvent::MemoryLost(error)
                if !matches!(self.life, Life::Live { .. })
                    && !matches!(self.migrations.job, migration::Job::Restoring(_)) =>
            {
                log::info!("memory of a VM that has ended is lost: {}", Chain(&error));
            }
            MachineEvent::MemoryLost(error) => {
                log::error!("the guest is lost: {}", Chain(&error));
                self.monitor
                    .emit("guest", "failed", &[("reason", &error.to_string())]);
                if let Life::Live { machine, .. } = std::mem::take(&mut self.life) {
                    machine.abandon();
                }
                self.exit = Some(ExitReason::GuestFailed);
            }
            MachineEvent::PciEjected { slot } => {
                self.ejected_when_quiet(slot, Question::default());
            }
            MachineEvent::DeviceLost { id, reason } => {
                log::error!("device {id:?} is lost: {reason}");
                let properties = [("id", id.as_str()), ("reason", reason.as_str())];
                self.monitor.emit("vm", "device-lost", &properties);
            }
            MachineEvent::Gate { id, event } => self.gate(&id, event),
            MachineEvent::AccelMoved { id, number, moved } => self.accel_moved(&id, number, moved),
            MachineEvent::AccelSeated { id, number, seated } => {
                self.accel_seated(&id, number, seated);
            }
            MachineEvent::PeersChanged => {
                if let Some(machine) = self.life.machine_mut() {
                    machine.devices().map_peers();
                }
            }
            MachineEvent::PciReset => {
                if let Some(machine) = self.life.machine_mut() {
                    machine.go_on_with_resets();
                }
            }
            MachineEvent::PciRefused { slot, status } => self.refused(slot, status),
        }
    }

    /// Reports a guest that resets itself again and again.
    fn count_early_reset(&mut self) {
        let has_driver = match self.life.machine_mut() {
            Some(machine) => machine.devices().had_driver(),
            None => return,
        };
        if self.early_resets.reset(Instant::now(), has_driver) {
            log::warn!(
                "the guest resets itself again and again, each time soon after it has booted, without a driver for any \
                 device: its kernel or firmware cannot start here; to see why, add --debug-console or --serial, or give \
                 the VM more memory"
            );
        }
    }

    /// Resets a machine whose guest was late for its watchdog.
    fn watchdog(&mut self) {
        match self.life.machine_mut() {
            Some(machine) if machine.take_watchdog_expiry() => {
                log::warn!("the guest is reset: it has not reset its watchdog in time");
                self.monitor.emit("watchdog", "expired", &[]);
                self.abandon_migration();
                self.end_when_quiet(GuestWish::Reset);
            }
            Some(_) => {}
            // The machine has ended in the meantime.
            None => self.sender.watchdog().set(None),
        }
    }

    /// Reports that the guest's kernel has panicked. The guest decides what it does then.
    fn guest_panicked(&mut self, event: &str) {
        log::warn!("the guest's kernel has panicked ({event})");
        self.monitor.emit("guest", "panic", &[("event", event)]);
    }

    fn signal(&mut self) {
        while let Some(signal) = self.signals.next() {
            match signal {
                Signal::Window => {
                    if let Some(machine) = self.life.machine_mut() {
                        machine.window_changed();
                    }
                }
                Signal::End { number, from } => {
                    log::info!("ending on signal {number} from process {from}");
                    self.exit = Some(ExitReason::Signal);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
