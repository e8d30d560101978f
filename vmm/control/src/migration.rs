//! VMs that are migrated to another host, or arrive from one.
//!
//! A migration has a thread of its own, on which it talks to the peer. The machine stays with the control thread. When
//! the migration needs the machine, it sends a closure, which the control thread runs between requests, while the other
//! thread waits.
//!
//! - [`arrival`]: VMs that arrive; [`allowed`]: what they may use; [`detach`]: devices that leave a VM before it is migrated; [`returns`]: their
//!   applications; [`plan`]: turns a request into a migration plan.

mod allowed;
mod arrival;
mod detach;
mod plan;
mod returns;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io, mem,
    os::fd::{AsRawFd, RawFd},
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use base::{Cancel, Chain};
use devices::{
    accel::{
        left::{Application, Left},
        rounds::Copied,
        saved::{Standing, Stopped},
    },
    disk::Scope,
    thread::{ThreadRole, ThreadSpawner},
};
use vmm_api::{
    ApiError, ReceiveMigration, Reply, Request, ResolveMigration, Response, RunsAt, SendMigration,
    Status,
};
use vmm_config::VmConfig;
use vmm_confinement::seccomp::Spawner;
use vmm_machine::{
    Machine, applications, error::MachineError, handover::Belongings, moving::MovingRegion,
};
use vmm_migration::{
    files::{FileUse, GivenFile},
    lanes::Body,
    offer::{Copy, HostId, Moment},
    postcopy::Asked,
    progress::{Direction, LOOK, MigrationInfo, Phase, Progress},
    source::{Outcome, Owner, Paused, Quiesced, Retaken},
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::{detach::Leaves, returns::Return};
use super::{
    Control, ExitReason,
    applications::Workers,
    booting::Booting,
    life::{Life, RunState},
    restore::Restoring,
    storage::PATIENCE,
    writing::Written,
};

type Answer = Result<Response, ApiError>;
type Work = Box<dyn FnOnce(&mut Control) + Send>;

/// A client counts as watching a migration if it has polled the progress within this time.
const WATCHED: Duration = Duration::from_secs(3);

/// How much longer other watching clients may poll after one has seen the end: each polls at a shorter interval.
const OTHERS: Duration = LOOK.saturating_mul(5);

/// Name of a migration's threads; those of its lanes have a number appended.
const THREAD: &str = "_migration";

/// Name of the thread that flushes the disks.
const FLUSH: &str = "_flush";

/// Why a machine that a migration needs no longer exists.
pub(super) const OVER: &str = "the VM has been switched off or reset, or the VMM ends";

/// The state of migrations in the control thread.
pub struct Migrations {
    work: mpsc::Receiver<Work>,
    sender: mpsc::Sender<Work>,
    wake: EventFd,
    pub(super) job: Job,
    /// The result of the last migration.
    last: Option<MigrationInfo>,
    /// When a client last polled the progress, or when a migration started that may be watched.
    asked: Option<Instant>,
    /// The VM has left; the time at which the process exits.
    leave_at: Option<Instant>,
    next: u64,
    /// Applications that wait for devices of a guest that has stayed.
    pub(super) returns: Vec<Return>,
    /// ID of this host; read before Landlock may hide the file.
    host: Option<HostId>,
}

/// The migration in progress.
pub(super) enum Job {
    None,
    Outgoing {
        number: u64,
        progress: Progress,
        /// Receives true if the VM runs at the destination.
        decision: mpsc::Sender<bool>,
        preserve: bool,
        /// Devices that were removed from the VM, which gets them back if it stays.
        leaves: Leaves,
    },
    Incoming {
        number: u64,
        progress: Progress,
        reply: Option<Reply>,
        request: ReceiveMigration,
        machine: Option<Incoming>,
    },
    /// Not a migration: a snapshot waits for workers of accelerators.
    Workers(Workers),
    /// Not a migration: a VM is being restored.
    Restoring(Restoring),
    /// Not a migration: a VM is being booted.
    Booting(Booting),
    /// Not a migration: a snapshot or a core dump is being written.
    Writing(Written),
}

/// A machine that is arriving.
pub(super) struct Incoming {
    config: Box<VmConfig>,
    machine: Box<Machine>,
    /// The machine stays paused.
    paused: bool,
}

impl Migrations {
    /// No migration yet.
    pub fn new() -> io::Result<Self> {
        let (sender, work) = mpsc::channel();
        Ok(Self {
            work,
            sender,
            wake: EventFd::new(EFD_NONBLOCK)?,
            job: Job::None,
            last: None,
            asked: None,
            leave_at: None,
            next: 0,
            returns: Vec::new(),
            host: HostId::read(),
        })
    }

    /// Readable when there is work.
    pub fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// How much longer a client that watched the VM leave may ask for the result.
    pub(super) fn last_word(&self) -> Option<Duration> {
        let left = self.leave_at?.checked_duration_since(Instant::now());
        Some(left.unwrap_or_default())
    }

    pub(super) fn on_control(&self) -> io::Result<OnControl> {
        Ok(OnControl {
            work: self.sender.clone(),
            wake: self.wake.try_clone()?,
        })
    }

    fn progress(&self) -> Option<&Progress> {
        match &self.job {
            Job::None | Job::Workers(_) | Job::Restoring(_) | Job::Booting(_) | Job::Writing(_) => {
                None
            }
            Job::Outgoing { progress, .. } | Job::Incoming { progress, .. } => Some(progress),
        }
    }

    pub(super) fn is_current(&self, of: u64) -> bool {
        match &self.job {
            Job::None => false,
            Job::Outgoing { number, .. }
            | Job::Incoming { number, .. }
            | Job::Workers(Workers { number, .. })
            | Job::Restoring(Restoring { number, .. })
            | Job::Booting(Booting { number, .. })
            | Job::Writing(Written { number, .. }) => *number == of,
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Sends work of a migration to the control thread.
pub(super) struct OnControl {
    work: mpsc::Sender<Work>,
    wake: EventFd,
}

impl OnControl {
    /// Runs `work` on the control thread and waits for its result; `None` if that thread is gone.
    pub(super) fn ask<R: Send + 'static>(
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

    /// Runs `work` on the control thread without waiting.
    pub(super) fn tell(&self, work: impl FnOnce(&mut Control) + Send + 'static) {
        if self.work.send(Box::new(work)).is_ok() {
            // If this fails, the next wake-up will process the work.
            let _ = self.wake.write(1);
        }
    }

    /// Starts a thread of the migration.
    fn start(&self, body: Body) -> Result<(), String> {
        self.start_as(ThreadRole::Migration, THREAD.to_owned(), body)
    }

    /// Starts the thread of a lane.
    fn start_lane(&self, number: u32, body: Body) -> Result<(), String> {
        self.start_as(ThreadRole::Lane, format!("{THREAD}{number}"), body)
    }

    fn start_as(&self, role: ThreadRole, name: String, body: Body) -> Result<(), String> {
        let started = self.ask(move |control| control.start_thread_as(role, &name, body));
        let started = started.ok_or_else(|| OVER.to_owned())?;
        started.map_err(|error| error.to_string())
    }
}

/// Applications of a machine's accelerators while it leaves. Stopped ones resume when this is dropped.
enum Applications {
    /// They are not migrated: they prevent the migration, or there are none.
    Stay,
    /// They are migrated and still run; contains what another host already has of them.
    Go(Copied),
    /// They are stopped; the guest may run.
    Standing(Standing, Copied),
    /// They are stopped together with their guest, and saved.
    Saved(Stopped),
    /// They continue elsewhere, and contents of their memory follow.
    Left(Left),
}

/// The machine, as accessed by a migration's thread.
struct Leaving {
    control: OnControl,
    number: u64,
    was_paused: bool,
    applications: Applications,
    /// Cancels a wait for their workers.
    cancel: Cancel,
    /// Its files were handed over.
    local: bool,
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

    /// Stops the vCPUs, and waits until storage has answered or the migration is cancelled; meanwhile the control thread
    /// serves requests.
    fn wait_for_storage(&self) -> Result<(), String> {
        /// Interval for looking at what is in flight.
        const LOOK: Duration = Duration::from_millis(1);
        let since = Instant::now();
        self.on_machine(|machine| {
            machine.stop();
            Ok(())
        })?;
        loop {
            let waited = since.elapsed();
            let is_late = waited >= PATIENCE;
            let gives_up = is_late || self.cancel.is_cancelled();
            let held = self.on_machine(move |machine| {
                let held = machine.hold(waited).map_err(words);
                if held.is_err() && gives_up {
                    machine.devices().carry_on();
                    if let Err(error) = machine.resume() {
                        log::error!("after a pause that failed, the guest does not go on: {error}");
                    }
                }
                Ok(held)
            })?;
            match held {
                Ok(()) => return Ok(()),
                Err(why) if is_late => return Err(why),
                Err(why) if gives_up => {
                    log::info!("storage is not waited for any longer: {why}");
                    return Err(why);
                }
                Err(_) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Flushes the disks, so that another host can read what the guest has written. That takes as long as the storage
    /// likes: a thread of its own waits for it, and is left behind if the migration is cancelled.
    fn flush_disks(&self) -> Result<(), String> {
        /// Interval for looking at whether the migration is cancelled.
        const LOOK: Duration = Duration::from_millis(20);
        let disks = self.on_machine(|machine| Ok(machine.devices().disk_flushes()))?;
        if disks.is_empty() {
            return Ok(());
        }
        let (sender, flushed) = mpsc::sync_channel(1);
        let flush = move || {
            let all = disks.into_iter().try_for_each(|flush| flush());
            // Nobody waits after a cancellation.
            let _ = sender.send(all);
        };
        let role = ThreadRole::Migration;
        self.control
            .start_as(role, FLUSH.to_owned(), Box::new(flush))?;
        loop {
            match flushed.recv_timeout(LOOK) {
                Ok(all) => return all.map_err(|error| format!("cannot flush a disk: {error}")),
                Err(RecvTimeoutError::Timeout) if !self.cancel.is_cancelled() => {}
                Err(_) => return Err("the disks were not flushed".to_owned()),
            }
        }
    }

    /// The state of the paused machine, with its applications.
    fn state(&mut self) -> Result<Paused, String> {
        // First, because signals that workers still send become part of the state of the interrupt controllers.
        let archive = match self.applications.take() {
            Applications::Standing(standing, copied) => {
                let (stopped, archive) =
                    applications::depart(standing, copied, self.cancel.clone()).map_err(words)?;
                self.applications = Applications::Saved(stopped);
                Some(archive)
            }
            _ => None,
        };
        self.flush_disks()?;
        self.on_machine(|machine| {
            let saved_at = Moment::now();
            let state = machine.departing_state().map_err(words)?;
            Ok(Paused {
                state,
                saved_at,
                archive,
            })
        })
    }
}

impl Leaving {
    /// Drops the machine, which runs elsewhere.
    fn end_of_machine(&self) -> impl FnOnce(&mut Control) + Send + 'static {
        let (number, was_local) = (self.number, self.local);
        move |control| {
            if control.migrations.is_current(number) {
                // The other process listens at their paths from now on.
                if was_local && let Some(machine) = control.life.machine_mut() {
                    machine.set_owns_sockets(false);
                }
                control.drop_machine();
                // Disks whose images are being opened were for that machine.
                control.forget_disks(OVER);
            }
        }
    }
}

impl Applications {
    fn take(&mut self) -> Self {
        mem::replace(self, Self::Stay)
    }
}

impl Owner for Leaving {
    fn ram(&mut self) -> Vec<MovingRegion> {
        self.on_machine(|machine| Ok(machine.moving_ram()))
            .unwrap_or_default()
    }

    fn check_movable(&mut self) -> Result<(), String> {
        if let Applications::Go(_) = &self.applications {
            let ports = self.on_machine(|machine| Ok(machine.devices().ports()))?;
            applications::check_movable(&ports, self.cancel.clone()).map_err(words)?;
        }
        Ok(())
    }

    fn files(&mut self) -> Result<Vec<GivenFile>, String> {
        let regions = self.on_machine(|machine| Ok(machine.moving_ram()))?;
        let with_file = |(region, moving): (usize, &MovingRegion)| {
            let file = moving.mapping.file().ok_or("its memory is private")?;
            let what = FileUse::Memory {
                region,
                offset: moving.mapping.offset(),
            };
            let file = file.try_clone().map_err(|error| error.to_string())?.into();
            Ok(GivenFile { what, file })
        };
        let memory = regions.iter().enumerate().map(with_file);
        let mut files: Vec<GivenFile> = memory.collect::<Result<_, String>>()?;
        let words = |error: io::Error| error.to_string();
        let belongings = self.on_machine(|machine| Ok(machine.belongings()))?;
        for socket in &belongings.sockets {
            if let Some(file) = socket.descriptor().map_err(words)? {
                let path = socket.path().to_owned();
                let what = FileUse::Socket { path };
                files.push(GivenFile { what, file });
            }
        }
        for (id, taps) in &belongings.taps {
            for (queue, file) in Belongings::queues(taps)
                .map_err(words)?
                .into_iter()
                .enumerate()
            {
                let id = id.clone();
                let what = FileUse::Tap { id, queue };
                files.push(GivenFile { what, file });
            }
        }
        Ok(files)
    }

    fn start(&mut self, body: Body) -> Result<(), String> {
        self.control.start(body)
    }

    fn start_lane(&mut self, number: u32, body: Body) -> Result<(), String> {
        self.control.start_lane(number, body)
    }

    fn throttle(&mut self, percent: u8) {
        let done = self.on_machine(move |machine| {
            machine.throttle(percent);
            Ok(())
        });
        if let Err(error) = done {
            log::debug!("no vCPU is slowed down or let go: {error}");
        }
    }

    fn quiesce(&mut self, most_made: u64) -> Result<Quiesced, String> {
        if let Applications::Go(copied) = &self.applications {
            applications::wait_for_workers(copied, self.cancel.clone()).map_err(words)?;
            if most_made < u64::MAX {
                let made = applications::made(copied, self.cancel.clone());
                if made > most_made {
                    return Ok(Quiesced::Made(made));
                }
            }
            let ports = self.on_machine(|machine| Ok(machine.devices().ports()))?;
            let standing = applications::stop(ports, self.cancel.clone()).map_err(words)?;
            if let Applications::Go(copied) = self.applications.take() {
                self.applications = Applications::Standing(standing, copied);
            }
        }
        Ok(Quiesced::Still)
    }

    fn copy(&mut self) -> Result<Option<Copy>, String> {
        let Applications::Go(copied) = &mut self.applications else {
            return Ok(None);
        };
        let (ports, archive) = applications::copy(copied, self.cancel.clone()).map_err(words)?;
        Ok((!ports.is_empty()).then(|| Copy::new(ports, archive)))
    }

    fn pause(&mut self) -> Result<Paused, String> {
        if !self.was_paused {
            self.wait_for_storage()?;
            self.on_machine(|machine| machine.pause().map_err(words))?;
        }
        self.state().inspect_err(|_| self.resume())
    }

    fn resume(&mut self) {
        if !self.was_paused {
            let resumed = self.on_machine(|machine| machine.resume().map_err(words));
            if let Err(error) = resumed {
                log::error!("after a migration that failed, the VM does not go on: {error}");
            }
        }
        self.applications = Applications::Stay;
    }

    fn release(&mut self) -> Result<(), String> {
        self.on_machine(|machine| {
            machine.release_locks().map_err(words).inspect_err(|_| {
                if let Err(error) = machine.take_locks() {
                    log::error!("a disk is not locked any more: {}", Chain(&error));
                }
            })
        })
    }

    fn retake(&mut self, among: Scope) -> Retaken {
        let retaken = self.on_machine(move |machine| {
            let telling = machine.exclusive_disks(among);
            let Err(error) = machine.take_locks() else {
                return Ok(match telling.is_empty() {
                    true => Retaken::Silent,
                    false => Retaken::Held,
                });
            };
            log::warn!("the locks are not to be had: {}", Chain(&error));
            Ok(match error.taken_disk() {
                Some(id) if telling.iter().any(|telling| telling == id) => Retaken::Denied,
                // Also when storage does not tell who has the lock: it may be unreachable for both sides.
                _ => Retaken::Silent,
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

    fn left(&mut self) -> bool {
        if let Applications::Saved(stopped) = self.applications.take() {
            self.applications = Applications::Left(stopped.leave());
        }
        // There is no need to wait for its end: the applications already continue elsewhere.
        self.control.tell(self.end_of_machine());
        matches!(&self.applications, Applications::Left(left) if !left.is_empty())
    }

    fn fetch(&mut self, asked: &Asked) -> Result<File, String> {
        match &mut self.applications {
            Applications::Left(left) => left.fetch(&asked.of, &asked.fetch()),
            _ => Err("nothing is left here".to_owned()),
        }
    }

    fn drained(&mut self, of: &Application) -> bool {
        match &mut self.applications {
            Applications::Left(left) => {
                left.drained(of);
                !left.is_empty()
            }
            _ => false,
        }
    }

    fn gone(&mut self) {
        if let Applications::Saved(stopped) = self.applications.take() {
            stopped.end();
        }
        self.control.ask(self.end_of_machine());
    }
}

impl Control {
    /// Runs the work that migrations have sent.
    pub(super) fn migration_work(&mut self) {
        // Empty if the wake-up was spurious.
        let _ = self.migrations.wake.read();
        while let Ok(work) = self.migrations.work.try_recv() {
            work(self);
        }
    }

    /// Refuses requests that would change the machine during a migration.
    pub(super) fn refuse_if_migrating(&self, request: &Request) -> Result<(), ApiError> {
        if self.migrations.leave_at.is_some() && !is_allowed(request) {
            return Err(ApiError::wrong_state(
                "the VM has left, and this VMM ends: vm.send-migration with preserve_source keeps it",
            ));
        }
        let what = match &self.migrations.job {
            Job::None => return Ok(()),
            Job::Outgoing { .. } => "the VM is being moved to another host",
            Job::Incoming { .. } => "a VM is awaited from another host",
            Job::Writing(written) => {
                let message = format!("{}: {}", written.what(), written.advice());
                return match is_allowed(request) {
                    true => Ok(()),
                    false => Err(ApiError::wrong_state(message)),
                };
            }
            Job::Workers(_) => {
                "a snapshot of the VM is being written, and waits for workers of accelerators"
            }
            Job::Restoring(restoring) => restoring.what(),
            Job::Booting(booting) => &booting.what(),
        };
        if is_allowed(request) {
            return Ok(());
        }
        let shows = match self.migrations.progress() {
            Some(_) => ", vm.migration shows it",
            None => "",
        };
        Err(ApiError::wrong_state(format!(
            "{what}: vm.cancel-migration ends that{shows}"
        )))
    }

    /// Cancels a migration after the guest has done something that makes it impossible.
    pub(super) fn abandon_migration(&mut self) {
        self.abandon_workers();
        self.abandon_restore();
        self.abandon_writing();
        if let (Job::Incoming { number, .. }, Life::Live { .. }) =
            (&self.migrations.job, &self.life)
        {
            // It runs here, and whoever awaits it is told so.
            self.received(*number, Ok(()));
        }
        if let Some(progress) = self.migrations.progress() {
            log::warn!("the migration is cancelled");
            progress.cancel();
            self.migrations.last = Some(progress.info());
            if let Job::Outgoing { leaves, .. } = mem::replace(&mut self.migrations.job, Job::None)
            {
                self.keep_for_next_boot(&leaves);
            }
        }
    }

    /// `vm.migration`.
    pub(super) fn migration_info(&mut self) -> Answer {
        self.migrations.asked = Some(Instant::now());
        let info = self.migrations.progress().map(Progress::info);
        if let Some(at) = &mut self.migrations.leave_at {
            *at = (*at).min(Instant::now() + OTHERS);
        }
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
            return self.cancel_waits();
        };
        if progress.phase() == Phase::Postcopy {
            return Err(ApiError::wrong_state(
                "the VM runs at the destination, and contents of its applications' memory follow it (vm.migration \
                 shows how many bytes): it is too late to cancel that; ending this VMM costs these applications \
                 an error",
            ));
        }
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
                // The migration's thread is waiting for it.
                let _ = decision.send(resolve.runs_at == RunsAt::Destination);
                Ok(Response::Empty)
            }
            _ => Err(ApiError::wrong_state(
                "no migration waits for a decision: vm.migration says Undecided then",
            )),
        }
    }

    /// `vm.send-migration`: replies when the migration has started.
    pub(super) fn send_migration(&mut self, request: &SendMigration) -> Answer {
        plan::check(request)?;
        self.refuse_if_moving()?;
        let Life::Live {
            config,
            machine,
            run,
        } = &self.life
        else {
            return Err(self.not_live());
        };
        let was_paused = *run == RunState::Paused;
        let host = self.migrations.host.clone();
        let (plan, applications) = plan::make(config, machine, was_paused, request, host)?;
        let url = &request.destination_url;
        let progress = Progress::new(Direction::Outgoing, url);
        let (decision, decided) = mpsc::channel();
        let number = self.migrations.number();
        let host = |error: io::Error| host_error("prepare a migration", &error);
        let mut leaving = Leaving {
            control: self.migrations.on_control().map_err(host)?,
            number,
            was_paused,
            applications,
            cancel: progress.cancellation(),
            local: request.local,
            decision: decided,
        };
        let of_thread = progress.clone();
        self.start_thread(move || {
            let outcome = leaving.go(plan, &of_thread);
            // The client that sees the end may send another request.
            leaving.applications = Applications::Stay;
            leaving
                .control
                .ask(move |control| control.sent(number, outcome));
        })?;
        self.migrations.job = Job::Outgoing {
            number,
            progress,
            decision,
            preserve: request.preserve_source,
            leaves: Leaves::default(),
        };
        // A client that watches it may poll for the first time after it is over.
        self.migrations.asked = Some(Instant::now());
        self.monitor.emit("vm", "migration-started", &[]);
        Ok(Response::Empty)
    }

    /// Starts a migration's thread, or a thread that waits for workers in the same way.
    pub(super) fn start_thread(
        &self,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), ApiError> {
        self.start_thread_as(ThreadRole::Migration, THREAD, Box::new(body))
    }

    pub(super) fn start_thread_as(
        &self,
        role: ThreadRole,
        name: &str,
        body: Body,
    ) -> Result<(), ApiError> {
        let spawner = Spawner::new(self.filters.clone())
            .map_err(|error| host_error("start a thread", &error))?;
        spawner
            .spawn(role, name, body)
            .map(drop)
            .map_err(|error| host_error("start a thread", &error))
    }

    /// Handles the end of an outgoing migration.
    fn sent(&mut self, number: u64, outcome: Outcome) {
        if !self.migrations.is_current(number) {
            return;
        }
        let Job::Outgoing {
            progress,
            preserve,
            leaves,
            ..
        } = mem::replace(&mut self.migrations.job, Job::None)
        else {
            return;
        };
        let event = match outcome {
            Outcome::Moved => {
                log::info!("the VM has moved: {}", summary(&progress.info()));
                end(&progress, Phase::Completed, None);
                let is_watched = self
                    .migrations
                    .asked
                    .is_some_and(|at| at.elapsed() < WATCHED);
                match preserve {
                    true => {}
                    false if is_watched => {
                        self.migrations.leave_at = Some(Instant::now() + WATCHED);
                    }
                    false => self.exit = Some(ExitReason::Request),
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
                // Another process has a disk; resuming the VM tries to lock it again.
                if let Life::Live { machine, run, .. } = &mut self.life
                    && machine.is_unlocked()
                {
                    *run = RunState::Paused;
                }
                end(&progress, Phase::Failed, Some(error));
                self.bring_back(&leaves);
                "migration-failed"
            }
        };
        self.migrations.last = Some(progress.info());
        self.monitor.emit("vm", event, &[]);
    }
}

/// Whether a request is allowed during a migration, a wait for workers, or while a snapshot is written, because it
/// changes nothing.
pub(super) fn is_allowed(request: &Request) -> bool {
    matches!(
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
    )
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn words(error: MachineError) -> String {
    Chain(&error).to_string()
}

fn end(progress: &Progress, phase: Phase, error: Option<String>) {
    // The time that has elapsed until now is the final duration.
    let elapsed = progress.info().elapsed_ms;
    progress.update(|info| {
        info.phase = phase;
        info.error = error;
        info.elapsed_ms = elapsed;
        info.remaining_bytes = 0;
        info.accel_remaining_bytes = 0;
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

pub(super) fn host_error(action: &str, error: &io::Error) -> ApiError {
    ApiError::internal(error).context(format!("cannot {action}"))
}
