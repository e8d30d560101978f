//! VMs that leave for another host, or come from one.
//!
//! A migration has a thread of its own, on which it talks to the other side. The machine stays with
//! the control thread: what the migration needs of it is a piece of work that the control thread
//! does between requests, while the other thread waits.

use std::{
    fs::File,
    io, mem,
    os::fd::{AsRawFd, RawFd},
    sync::mpsc,
    time::Duration,
};

use base::Chain;
use devices::thread::{ThreadRole, ThreadSpawner};
use serde_json::Value;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    Control, ExitReason,
    life::{Life, RunState},
    requests::{failed, validate},
};
use crate::{
    api::{
        ApiError, MigrationMode, ReceiveMigration, Rename, Reply, Request, ResolveMigration,
        Response, RunsAt, SendMigration, Status, TimeoutStrategy,
    },
    config::VmConfig,
    machine::{Machine, moving::MovingRegion},
    migration::{
        self, PROTOCOL,
        connection::{Address, Connection, Listener},
        destination::{Destination, Ended, Host as Receives},
        offer::{Offer, OfferedRegion},
        pages::Region,
        progress::{Direction, MigrationInfo, Phase, Progress},
        source::{Outcome, Owner, Retaken, Source, Wishes},
    },
    seccomp::Spawner,
    snapshot::state_file,
};

type Answer = Result<Response, ApiError>;
type Work = Box<dyn FnOnce(&mut Control) + Send>;

/// Why a machine is not there any more for a migration that needs it.
const OVER: &str = "the VM has been switched off or reset, or the VMM ends";

/// All about migrations that the control thread keeps.
pub struct Migrations {
    work: mpsc::Receiver<Work>,
    sender: mpsc::Sender<Work>,
    wake: EventFd,
    job: Job,
    /// What became of the last one.
    last: Option<MigrationInfo>,
    next: u64,
}

/// The migration that goes on.
enum Job {
    None,
    Outgoing {
        number: u64,
        progress: Progress,
        /// True if the VM runs at the destination.
        decision: mpsc::Sender<bool>,
        preserve: bool,
    },
    Incoming {
        number: u64,
        progress: Progress,
        reply: Option<Reply>,
        request: ReceiveMigration,
        machine: Option<Incoming>,
    },
}

/// A machine that is on its way here.
struct Incoming {
    config: Box<VmConfig>,
    machine: Box<Machine>,
    /// It stays paused.
    paused: bool,
}

impl Migrations {
    /// None yet.
    pub fn new() -> io::Result<Self> {
        let (sender, work) = mpsc::channel();
        Ok(Self {
            work,
            sender,
            wake: EventFd::new(EFD_NONBLOCK)?,
            job: Job::None,
            last: None,
            next: 0,
        })
    }

    /// Readable when there is work.
    pub fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn on_control(&self) -> io::Result<OnControl> {
        Ok(OnControl {
            work: self.sender.clone(),
            wake: self.wake.try_clone()?,
        })
    }

    fn progress(&self) -> Option<&Progress> {
        match &self.job {
            Job::None => None,
            Job::Outgoing { progress, .. } | Job::Incoming { progress, .. } => Some(progress),
        }
    }

    fn is_current(&self, of: u64) -> bool {
        match &self.job {
            Job::None => false,
            Job::Outgoing { number, .. } | Job::Incoming { number, .. } => *number == of,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// A migration's way to the control thread.
struct OnControl {
    work: mpsc::Sender<Work>,
    wake: EventFd,
}

impl OnControl {
    /// Has the control thread do something, and waits; `None` if it is gone.
    fn ask<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Control) -> R + Send + 'static,
    ) -> Option<R> {
        let (sender, result) = mpsc::sync_channel(1);
        let work = move |control: &mut Control| {
            // The receiver waits below.
            let _ = sender.send(work(control));
        };
        self.work.send(Box::new(work)).ok()?;
        self.wake.write(1).ok()?;
        result.recv().ok()
    }
}

/// The machine, as the thread of a migration reaches it.
struct Leaving {
    control: OnControl,
    number: u64,
    was_paused: bool,
    decision: mpsc::Receiver<bool>,
}

impl Leaving {
    fn on_machine<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Machine) -> Result<R, String> + Send + 'static,
    ) -> Result<R, String> {
        let number = self.number;
        let done = self.control.ask(move |control| {
            if !control.migrations.is_current(number) {
                return Err(OVER.to_owned());
            }
            let machine = control.life.machine_mut().ok_or_else(|| OVER.to_owned())?;
            work(machine)
        });
        done.unwrap_or_else(|| Err(OVER.to_owned()))
    }
}

impl Owner for Leaving {
    fn ram(&mut self) -> Vec<MovingRegion> {
        self.on_machine(|machine| Ok(machine.moving_ram()))
            .unwrap_or_default()
    }

    fn pause(&mut self) -> Result<Vec<u8>, String> {
        let was_paused = self.was_paused;
        self.on_machine(move |machine| {
            let words = |error| Chain(&error).to_string();
            if !was_paused {
                machine.pause().map_err(words)?;
            }
            machine.departing_state().map_err(words).inspect_err(|_| {
                if !was_paused && let Err(error) = machine.resume() {
                    log::error!("the VM does not go on: {}", Chain(&error));
                }
            })
        })
    }

    fn resume(&mut self) {
        if self.was_paused {
            return;
        }
        let resumed =
            self.on_machine(|machine| machine.resume().map_err(|error| Chain(&error).to_string()));
        if let Err(error) = resumed {
            log::error!("after a migration that failed, the VM does not go on: {error}");
        }
    }

    fn release(&mut self) -> Result<(), String> {
        self.on_machine(|machine| {
            let words = |error| Chain(&error).to_string();
            machine.release_locks().map_err(words).inspect_err(|_| {
                if let Err(error) = machine.take_locks() {
                    log::error!("a disk is not locked any more: {}", Chain(&error));
                }
            })
        })
    }

    fn retake(&mut self) -> Retaken {
        let retaken = self.on_machine(|machine| {
            Ok(match machine.take_locks() {
                Err(error) => {
                    log::warn!("the locks are not to be had: {}", Chain(&error));
                    Retaken::Denied
                }
                Ok(()) if machine.has_exclusive_lock() => Retaken::Held,
                Ok(()) => Retaken::Silent,
            })
        });
        // Without the control thread there is no machine that could run.
        retaken.unwrap_or(Retaken::Denied)
    }

    fn ask(&mut self) -> bool {
        self.control.ask(|control| {
            control.monitor.emit("vm", "migration-undecided", &[]);
        });
        // Without the control thread there is no machine that could run.
        self.decision.recv().unwrap_or(true)
    }

    fn gone(&mut self) {
        let number = self.number;
        self.control.ask(move |control| {
            if control.migrations.is_current(number) {
                control.machine_has_left();
            }
        });
    }
}

/// The control thread, as the thread of a migration reaches it that brings a machine.
struct Coming {
    control: OnControl,
    number: u64,
}

impl Coming {
    fn on_incoming<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Control) -> Result<R, String> + Send + 'static,
    ) -> Result<R, String> {
        let number = self.number;
        let done = self.control.ask(move |control| {
            if control.migrations.is_current(number) {
                work(control)
            } else {
                Err("the destination does not wait for a VM any more".to_owned())
            }
        });
        done.unwrap_or_else(|| Err("the destination's VMM ends".to_owned()))
    }

    fn on_machine<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Incoming) -> Result<R, String> + Send + 'static,
    ) -> Result<R, String> {
        self.on_incoming(|control| match &mut control.migrations.job {
            Job::Incoming {
                machine: Some(machine),
                ..
            } => work(machine),
            _ => Err("no machine was prepared".to_owned()),
        })
    }
}

impl Receives for Coming {
    fn examine(&mut self, offer: &Offer) -> Vec<String> {
        match self.control.ask(|control| control.life.config().is_some()) {
            Some(false) => {}
            Some(true) => return vec!["the destination has a VM already".to_owned()],
            None => return vec!["the destination's VMM ends".to_owned()],
        }
        match offer.config.validate() {
            Ok(()) => Vec::new(),
            Err(error) => vec![format!("the configuration is not valid: {}", Chain(&error))],
        }
    }

    fn prepare(&mut self, offer: Offer) -> Result<Vec<Region>, String> {
        self.on_incoming(move |control| control.prepare_incoming(&offer))
    }

    fn restore(&mut self, state: Vec<u8>) -> Result<(), String> {
        self.on_machine(move |incoming| {
            let arrived = incoming.machine.arrive(&mut incoming.config, &state);
            arrived.map_err(|error| Chain(&error).to_string())
        })
    }

    fn take_locks(&mut self) -> Result<(), String> {
        self.on_machine(|incoming| {
            let taken = incoming.machine.take_locks();
            taken.map_err(|error| Chain(&error).to_string())
        })
    }

    fn run(&mut self) -> Result<(), String> {
        self.on_incoming(Control::run_incoming)
    }
}

impl Control {
    /// Does what migrations ask for.
    pub(super) fn migration_work(&mut self) {
        // Empty if the wake-up was spurious.
        let _ = self.migrations.wake.read();
        while let Ok(work) = self.migrations.work.try_recv() {
            work(self);
        }
    }

    /// What would change the machine under a migration has to wait.
    pub(super) fn refuse_if_migrating(&self, request: &Request) -> Result<(), ApiError> {
        let what = match &self.migrations.job {
            Job::None => return Ok(()),
            Job::Outgoing { .. } => "the VM is being moved to another host",
            Job::Incoming { .. } => "a VM is awaited from another host",
        };
        let allowed = matches!(
            request,
            Request::VmmPing
                | Request::VmmShutdown
                | Request::VmmMetrics
                | Request::VmInfo
                | Request::VmCounters
                | Request::VmPowerButton
                | Request::VmNmi
                | Request::VmMigration
                | Request::VmCancelMigration
                | Request::VmResolveMigration(_)
        );
        if allowed {
            return Ok(());
        }
        Err(ApiError::wrong_state(format!(
            "{what}: vm.cancel-migration ends that, vm.migration shows it"
        )))
    }

    /// The guest has done something that a migration cannot go on after.
    pub(super) fn abandon_migration(&mut self) {
        if let Some(progress) = self.migrations.progress() {
            log::warn!("the migration is cancelled");
            progress.cancel();
            self.migrations.last = Some(progress.info());
            self.migrations.job = Job::None;
        }
    }

    /// `vm.migration`.
    pub(super) fn migration_info(&self) -> Answer {
        let info = self.migrations.progress().map(Progress::info);
        match info.or_else(|| self.migrations.last.clone()) {
            Some(info) => Ok(Response::Migration(Box::new(info))),
            None => Err(ApiError::message(
                Status::NotFound,
                "there has been no migration",
            )),
        }
    }

    /// `vm.cancel-migration`.
    pub(super) fn cancel_migration(&mut self) -> Answer {
        let Some(progress) = self.migrations.progress() else {
            return Err(ApiError::wrong_state("no migration is going on"));
        };
        if matches!(progress.phase(), Phase::Go | Phase::Undecided) {
            return Err(ApiError::wrong_state(
                "the VM has been handed over: it is too late to cancel that",
            ));
        }
        progress.cancel();
        Ok(Response::Empty)
    }

    /// `vm.resolve-migration`.
    pub(super) fn resolve_migration(&mut self, resolve: &ResolveMigration) -> Answer {
        match &self.migrations.job {
            Job::Outgoing {
                progress, decision, ..
            } if progress.phase() == Phase::Undecided => {
                // It waits for it.
                let _ = decision.send(resolve.runs_at == RunsAt::Destination);
                Ok(Response::Empty)
            }
            _ => Err(ApiError::wrong_state(
                "no migration waits for a decision: vm.migration says Undecided then",
            )),
        }
    }

    /// `vm.send-migration`: answers when it has begun.
    pub(super) fn send_migration(&mut self, request: &SendMigration) -> Answer {
        check_send(request)?;
        let Life::Live {
            config,
            machine,
            run,
        } = &mut self.life
        else {
            return Err(self.not_live());
        };
        let reasons = machine.reasons_to_stay(config);
        if !reasons.is_empty() {
            let error = migration::Error::Stays(reasons);
            return Err(ApiError::new(Status::BadRequest, &error));
        }
        let was_paused = *run == RunState::Paused;
        let regions = machine.moving_ram();
        let offer = Offer {
            protocol: PROTOCOL,
            state_version: state_file::VERSION,
            gantry: env!("CARGO_PKG_VERSION").to_owned(),
            config: config.clone(),
            regions: regions.iter().map(offered).collect(),
            verify: request.verify,
            dry_run: request.dry_run,
            paused: was_paused,
        };
        let wishes = Wishes {
            downtime: Duration::from_millis(request.downtime_ms),
            timeout: Duration::from_secs(request.timeout_s),
            ignore_timeout: request.timeout_strategy == TimeoutStrategy::Ignore,
            stall: Duration::from_secs(request.stall_s),
        };
        let url = request.destination_url.clone();
        let progress = Progress::new(Direction::Outgoing, &url);
        let (decision, decided) = mpsc::channel();
        let number = self.migrations.number();
        let host = |error: io::Error| host_error("prepare a migration", &error);
        let mut leaving = Leaving {
            control: self.migrations.on_control().map_err(host)?,
            number,
            was_paused,
            decision: decided,
        };
        // Landlock may hide it; then every page is looked at.
        let pagemap = File::open("/proc/self/pagemap").ok();
        let of_thread = progress.clone();
        self.start_migration(move || {
            let outcome = match Connection::connect(&url, &of_thread) {
                Ok(connection) => {
                    let shown = of_thread.clone();
                    Source::new(connection, &mut leaving, offer, wishes, shown, pagemap).run()
                }
                Err(error) => Outcome::Stayed(error),
            };
            leaving
                .control
                .ask(move |control| control.sent(number, outcome));
        })?;
        self.migrations.job = Job::Outgoing {
            number,
            progress,
            decision,
            preserve: request.preserve_source,
        };
        self.monitor.emit("vm", "migration-started", &[]);
        Ok(Response::Empty)
    }

    /// `vm.receive-migration`: answers when the VM runs, or does not.
    pub(super) fn receive_migration(&mut self, request: ReceiveMigration, reply: Reply) {
        match self.start_receiving(&request) {
            Err(error) => reply.send(Err(error)),
            Ok((number, progress)) => {
                self.monitor.emit("vm", "migration-receive-started", &[]);
                self.migrations.job = Job::Incoming {
                    number,
                    progress,
                    reply: Some(reply),
                    request,
                    machine: None,
                };
            }
        }
    }

    fn start_receiving(&mut self, request: &ReceiveMigration) -> Result<(u64, Progress), ApiError> {
        let bad = |message: &str| Err(ApiError::message(Status::BadRequest, message));
        if self.life.config().is_some() {
            return Err(ApiError::message(
                Status::Internal,
                "there is a VM already: delete it first (vm.delete)",
            ));
        }
        if request.tls_dir.is_some() {
            return bad("tls_dir is not supported yet: use a tunnel, or a network that you trust");
        }
        if request.memory_mode != MigrationMode::Precopy {
            return bad("memory_mode=Postcopy is not supported: use Precopy");
        }
        let listener = Listener::bind(&request.receiver_url).map_err(|error| {
            let status = match error {
                migration::Error::Url(_) => Status::BadRequest,
                _ => Status::Internal,
            };
            ApiError::new(status, &error)
        })?;
        let number = self.migrations.number();
        let progress = Progress::new(Direction::Incoming, &request.receiver_url);
        let host = |error: io::Error| host_error("prepare a migration", &error);
        let mut coming = Coming {
            control: self.migrations.on_control().map_err(host)?,
            number,
        };
        let of_thread = progress.clone();
        self.start_migration(move || {
            let ended = loop {
                let connection = match listener.accept(&of_thread) {
                    Ok(connection) => connection,
                    Err(error) => break Err(Ended::Failed(error)),
                };
                let received = Destination::new(connection, &mut coming, of_thread.clone()).run();
                // A question costs nothing; the VM is still to come.
                if !matches!(received, Err(Ended::Asked)) {
                    break received;
                }
            };
            drop(listener);
            coming
                .control
                .ask(move |control| control.received(number, ended));
        })?;
        Ok((number, progress))
    }

    fn start_migration(&self, body: impl FnOnce() + Send + 'static) -> Result<(), ApiError> {
        let spawner = Spawner::new(self.filters.clone())
            .map_err(|error| host_error("start a thread", &error))?;
        spawner
            .spawn(ThreadRole::Migration, "_migration", Box::new(body))
            .map(drop)
            .map_err(|error| host_error("start a migration's thread", &error))
    }

    /// The machine runs elsewhere, and must never run here again.
    fn machine_has_left(&mut self) {
        self.life = match mem::take(&mut self.life) {
            Life::Live {
                mut config,
                machine,
                ..
            } => {
                drop(machine);
                self.receiver.clear();
                self.removals.finish(&mut config, &mut self.monitor);
                Life::Shutdown(config)
            }
            other => other,
        };
    }

    /// The end of an outgoing migration.
    fn sent(&mut self, number: u64, outcome: Outcome) {
        if !self.migrations.is_current(number) {
            return;
        }
        let Job::Outgoing {
            progress, preserve, ..
        } = mem::replace(&mut self.migrations.job, Job::None)
        else {
            return;
        };
        let event = match outcome {
            Outcome::Moved => {
                log::info!("the VM has moved: {}", summary(&progress.info()));
                end(&progress, Phase::Completed, None);
                if !preserve {
                    self.exit = Some(ExitReason::Request);
                }
                "migration-finished"
            }
            Outcome::Acceptable => {
                end(&progress, Phase::Completed, None);
                "migration-acceptable"
            }
            Outcome::Stayed(error) => {
                let error = Chain(&error).to_string();
                log::error!("the VM stays: {error}");
                end(&progress, Phase::Failed, Some(error));
                "migration-failed"
            }
        };
        self.migrations.last = Some(progress.info());
        self.monitor.emit("vm", event, &[]);
    }

    /// The end of an incoming migration.
    fn received(&mut self, number: u64, ended: Result<(), Ended>) {
        if !self.migrations.is_current(number) {
            return;
        }
        let Job::Incoming {
            progress, reply, ..
        } = mem::replace(&mut self.migrations.job, Job::None)
        else {
            return;
        };
        let answer = match ended {
            Ok(()) => {
                log::info!("the VM has arrived: {}", summary(&progress.info()));
                end(&progress, Phase::Completed, None);
                self.monitor.emit("vm", "migration-receive-finished", &[]);
                Ok(Response::Empty)
            }
            Err(Ended::Asked) => Ok(Response::Empty),
            Err(Ended::Failed(error)) => {
                let text = Chain(&error).to_string();
                log::error!("no VM has arrived: {text}");
                end(&progress, Phase::Failed, Some(text));
                self.monitor.emit("vm", "migration-receive-failed", &[]);
                Err(ApiError::internal(&error).context("no VM has arrived"))
            }
        };
        self.migrations.last = Some(progress.info());
        if let Some(reply) = reply {
            reply.send(answer);
        }
    }

    fn prepare_incoming(&mut self, offer: &Offer) -> Result<Vec<Region>, String> {
        let Job::Incoming { request, .. } = &self.migrations.job else {
            return Err("no VM is awaited".to_owned());
        };
        let mut config = renamed(
            &offer.config,
            request.renames.as_deref().unwrap_or_default(),
        )?;
        for update in request.zone_updates.iter().flatten() {
            let zones = config.memory.zones.iter_mut().flatten();
            match zones.into_iter().find(|zone| zone.id == update.id) {
                Some(zone) => zone.host_numa_node = Some(update.host_numa_node),
                None => return Err(format!("the VM has no memory zone {:?}", update.id)),
            }
        }
        validate(&config).map_err(|error| error.to_string())?;
        let plugged: Vec<_> = offer
            .regions
            .iter()
            .filter(|region| region.hotplugged)
            .map(|region| (region.guest, region.len))
            .collect();
        let host = self.host().map_err(|error| error.to_string())?;
        let machine = Machine::arriving(&mut config, &plugged, host)
            .map_err(|error| Chain(&error).to_string())?;
        let ram = machine.moving_ram();
        let here: Vec<_> = ram.iter().map(offered).collect();
        if here != offer.regions {
            return Err("the machine has its memory elsewhere here than at the source".to_owned());
        }
        if let Job::Incoming { machine: slot, .. } = &mut self.migrations.job {
            *slot = Some(Incoming {
                config,
                machine: Box::new(machine),
                paused: offer.paused,
            });
        }
        let region = |moving: MovingRegion| Region {
            guest: moving.guest,
            mapping: moving.mapping,
        };
        Ok(ram.into_iter().map(region).collect())
    }

    fn run_incoming(&mut self) -> Result<(), String> {
        let Job::Incoming { machine, .. } = &mut self.migrations.job else {
            return Err("no VM is awaited".to_owned());
        };
        let Some(Incoming {
            config,
            mut machine,
            paused,
        }) = machine.take()
        else {
            return Err("no machine was prepared".to_owned());
        };
        if !paused {
            machine
                .resume()
                .map_err(|error| failed(&error).to_string())?;
        }
        let run = match paused {
            true => RunState::Paused,
            false => RunState::Running,
        };
        self.life = Life::Live {
            config,
            machine,
            run,
        };
        Ok(())
    }
}

fn offered(region: &MovingRegion) -> OfferedRegion {
    OfferedRegion {
        guest: region.guest,
        len: region.mapping.size() as u64,
        hotplugged: region.hotplugged,
    }
}

fn end(progress: &Progress, phase: Phase, error: Option<String>) {
    // The time that it took, once more.
    let elapsed = progress.info().elapsed_ms;
    progress.update(|info| {
        info.phase = phase;
        info.error = error;
        info.elapsed_ms = elapsed;
        info.remaining_bytes = 0;
    });
}

fn summary(info: &MigrationInfo) -> String {
    let stood = match info.downtime_ms {
        Some(downtime) => format!(", stood still for {downtime} ms"),
        None => String::new(),
    };
    format!(
        "{} rounds, {} bytes of pages in {} ms{stood}",
        info.rounds, info.sent_bytes, info.elapsed_ms
    )
}

/// What is asked for and cannot be had.
fn check_send(request: &SendMigration) -> Result<(), ApiError> {
    let bad = |message: String| Err(ApiError::message(Status::BadRequest, message));
    if let Err(error) = Address::parse(&request.destination_url) {
        return Err(ApiError::new(Status::BadRequest, &error));
    }
    if request.local {
        return bad("local=on is not supported yet: leave it out, and the memory is copied".into());
    }
    if request.connections != 1 {
        return bad(format!(
            "{} connections are not supported yet: use connections=1",
            request.connections
        ));
    }
    if request.tls_dir.is_some() {
        return bad(
            "tls_dir is not supported yet: use a tunnel, or a network that you trust".into(),
        );
    }
    if request.memory_mode != MigrationMode::Precopy {
        return bad("memory_mode=Postcopy is not supported: use Precopy".into());
    }
    if request.downtime_ms == 0 || request.timeout_s == 0 || request.stall_s == 0 {
        return bad("downtime_ms, timeout_s and stall_s are at least 1".into());
    }
    Ok(())
}

fn host_error(action: &str, error: &io::Error) -> ApiError {
    ApiError::internal(error).context(format!("cannot {action}"))
}

/// The configuration with the host's resources as they are called here.
fn renamed(config: &VmConfig, renames: &[Rename]) -> Result<Box<VmConfig>, String> {
    /// Fields that name something of the host.
    const FIELDS: [&str; 7] = [
        "path",
        "socket",
        "file",
        "tap",
        "kernel",
        "initramfs",
        "src",
    ];
    fn walk(value: &mut Value, renames: &[Rename]) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text) if FIELDS.contains(&name.as_str()) => {
                            if let Some(rename) = renames.iter().find(|r| r.from == *text) {
                                text.clone_from(&rename.to);
                            }
                        }
                        value => walk(value, renames),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| walk(value, renames)),
            _ => {}
        }
    }
    let failed = |error: serde_json::Error| error.to_string();
    let mut value = serde_json::to_value(config).map_err(failed)?;
    walk(&mut value, renames);
    serde_json::from_value(value).map_err(failed)
}
