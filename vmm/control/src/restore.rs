//! Restores a VM from a snapshot. A separate thread does what waits for storage or for workers of accelerators.
//! Meanwhile the control thread serves requests. Those that need what the VM lacks wait for it.
//!
//! ```text
//!   control thread                     thread
//!                               ──>    the VM's configuration is read
//!   the process is restricted   <──
//!                               ──>    its state is read, images of its disks are opened
//!                               ──>    the machine is made; on demand, with its vCPUs
//!                               ──>    its memory is read, unless that is done on demand
//!   its vCPUs are made          <──
//!                               ──>    workers take its applications up
//!   the machine goes on         <──
//! ```

use std::{
    mem,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use base::Cancel;
use devices::thread::ThreadRole;
use vmm_api::{
    ApiError, Handler, InProgress, MemoryRestoreMode, Operation, Reply, Request, Response,
    RestoreConfig, RestoredClock, Status,
};
use vmm_config::{Descriptor, VmConfig};
use vmm_machine::{
    Machine, applications,
    error::MachineError,
    images::Images,
    save::{ClockSource, Contents, Folder, MemorySource, Rest, Snapshot},
};
use vmm_migration::lanes::Body;

use super::{
    Control,
    accel::{check_selection, ring},
    host_names::renamed,
    life::{Life, RunState},
    migration::{Job, OVER, host_error, is_allowed},
    queue::Made,
    requests::{failed, place, restrict, validate},
};

/// A VM that is being restored.
pub(super) struct Restoring {
    /// Number of the restore.
    pub(super) number: u64,
    cancel: Cancel,
    stage: Stage,
    asked: Asked,
}

/// What a restore waits for.
enum Stage {
    /// Its configuration.
    Config(Awaited<(Box<VmConfig>, Folder)>),
    /// The other files of the snapshot, except its memory, and images of its disks.
    Files {
        config: Box<VmConfig>,
        images: Arc<Images>,
        read: Awaited<Snapshot>,
    },
    /// Its machine, and what that lacks.
    Machine {
        images: Arc<Images>,
        made: Awaited<(Made, Option<Lacks>)>,
        /// To be cancelled if nobody waits for it any more.
        unwanted: Cancel,
    },
    /// Its memory.
    Memory {
        /// What the machine lacks but for its applications.
        rest: Box<Rest>,
        /// How much has been read, in bytes, and how much there is.
        read: (Arc<AtomicU64>, u64),
        is_read: Awaited<()>,
    },
    /// Workers of its accelerators.
    Applications(Awaited<()>),
}

/// What a machine lacks whose memory is read before it runs.
struct Lacks {
    contents: Contents,
    rest: Box<Rest>,
}

/// What a thread brings; it is there when the thread says that the stage is over.
pub(super) struct Awaited<T>(mpsc::Receiver<Result<T, MachineError>>);

impl<T> Awaited<T> {
    pub(super) fn take(self) -> Result<T, ApiError> {
        let brought = self.0.recv().map_err(|_| ApiError::wrong_state(OVER))?;
        brought.map_err(|error| failed(&error))
    }

    /// The same, if it is there within this time.
    pub(super) fn within(&self, time: Duration) -> Option<Result<T, ApiError>> {
        match self.0.recv_timeout(time) {
            Ok(brought) => Some(brought.map_err(|error| failed(&error))),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(ApiError::wrong_state(OVER))),
        }
    }
}

/// What a client has asked for.
struct Asked {
    request: RestoreConfig,
    /// Descriptors that came with the request.
    fds: Vec<OwnedFd>,
    at: Instant,
    reply: Reply,
    /// Requests that need what the VM lacks.
    waiting: Vec<(Request, Reply)>,
}

impl Restoring {
    /// The activity, as the beginning of a sentence.
    pub(super) fn what(&self) -> &'static str {
        match self.stage {
            Stage::Config(_) => "the VM is being restored, and waits for its configuration",
            Stage::Files { .. } => {
                "the VM is being restored, and waits for its state and its disks"
            }
            Stage::Machine { .. } => "the VM is being restored, and waits for its machine",
            Stage::Memory { .. } => "the VM is being restored, and waits for its memory",
            Stage::Applications(_) => {
                "the VM is being restored, and waits for workers of accelerators"
            }
        }
    }

    /// What `vm.info` says about it.
    pub(super) fn progress(&self) -> Option<InProgress> {
        let Stage::Memory {
            read: (done, total),
            ..
        } = &self.stage
        else {
            return None;
        };
        Some(InProgress {
            operation: Operation::Restore,
            done_bytes: Some(done.load(Ordering::Relaxed)),
            total_bytes: Some(*total),
            waits_for: None,
        })
    }

    /// Whether the VM lacks more than its applications.
    fn is_incomplete(&self) -> bool {
        !matches!(self.stage, Stage::Applications(_))
    }
}

/// A restore or a boot as its threads see it.
pub(super) struct Begun {
    pub(super) number: u64,
    pub(super) cancel: Cancel,
}

impl Control {
    /// `vm.restore`: replies when the machine has everything that it needs.
    pub(super) fn restore_later(
        &mut self,
        request: RestoreConfig,
        fds: Vec<OwnedFd>,
        reply: Reply,
    ) {
        let begun = Begun {
            number: self.migrations.number(),
            cancel: Cancel::default(),
        };
        let asked = Asked {
            request,
            fds,
            at: Instant::now(),
            reply,
            waiting: Vec::new(),
        };
        match self.read_config(&begun, &asked.request) {
            Ok(stage) => self.wait_for(begun, stage, asked),
            Err(error) => asked.reply.send(Err(error)),
        }
    }

    fn wait_for(&mut self, begun: Begun, stage: Stage, asked: Asked) {
        let Begun { number, cancel } = begun;
        self.migrations.job = Job::Restoring(Restoring {
            number,
            cancel,
            stage,
            asked,
        });
    }

    /// Runs work that may block on a thread of its own.
    pub(super) fn spawn<T: Send + 'static>(
        &self,
        begun: &Begun,
        role: ThreadRole,
        work: impl FnOnce(&Cancel) -> Result<T, MachineError> + Send + 'static,
    ) -> Result<Awaited<T>, ApiError> {
        let (body, brought) = self.stage(begun, work)?;
        self.start_thread_as(role, "_restore", body)?;
        Ok(brought)
    }

    /// What a thread is to do for such work.
    pub(super) fn stage<T: Send + 'static>(
        &self,
        begun: &Begun,
        work: impl FnOnce(&Cancel) -> Result<T, MachineError> + Send + 'static,
    ) -> Result<(Body, Awaited<T>), ApiError> {
        let host = |error| host_error("wait for what a VM lacks", &error);
        let control = self.migrations.on_control().map_err(host)?;
        let (number, cancel) = (begun.number, begun.cancel.clone());
        let (sender, brought) = mpsc::channel();
        let body = move || {
            // Nobody waits for what was cancelled.
            let _ = sender.send(work(&cancel));
            control.tell(move |control| control.stage_is_over(number));
        };
        Ok((Box::new(body), Awaited(brought)))
    }

    /// Handles the end of a wait.
    fn stage_is_over(&mut self, number: u64) {
        if !self.migrations.is_current(number) {
            return;
        }
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Restoring(Restoring {
                number,
                cancel,
                stage,
                mut asked,
            }) => {
                let waiting = mem::take(&mut asked.waiting);
                let begun = Begun { number, cancel };
                match self.next_stage(&begun, stage, &mut asked) {
                    Ok(Some(stage)) => self.wait_for(begun, stage, asked),
                    Ok(None) => asked.reply.send(Ok(Response::Empty)),
                    Err(error) => self.give_up_restore(asked.reply, error),
                }
                self.take_all(waiting);
            }
            Job::Booting(booting) => self.go_on_booting(booting),
            other => self.migrations.job = other,
        }
    }

    /// Takes requests in their order, each in the state that the one before has left.
    pub(super) fn take_all(&mut self, requests: Vec<(Request, Reply)>) {
        for (request, reply) in requests {
            self.take(request, reply);
        }
    }

    fn give_up_restore(&mut self, reply: Reply, error: ApiError) {
        if let Life::Live { machine, .. } = mem::take(&mut self.life) {
            self.end(machine);
        }
        self.receiver.clear();
        reply.send(Err(error));
    }

    /// Goes on with a restore whose wait is over, up to the next wait, if there is one.
    fn next_stage(
        &mut self,
        begun: &Begun,
        stage: Stage,
        asked: &mut Asked,
    ) -> Result<Option<Stage>, ApiError> {
        match stage {
            Stage::Config(read) => {
                let (mut config, folder) = read.take()?;
                let fds = mem::take(&mut asked.fds);
                self.prepare(&mut config, &folder, &asked.request, fds)?;
                let disks = config.disks.clone().unwrap_or_default();
                let images = Arc::<Images>::default();
                let opens = Arc::clone(&images);
                let place = self.queue.place();
                let read = move |cancel: &Cancel| {
                    // An earlier machine may have the images.
                    if !place.wait(cancel) {
                        return Err(MachineError::Cancelled);
                    }
                    drop(place);
                    folder.read(&disks, opens)
                };
                let read = self.spawn(begun, ThreadRole::Restore, read)?;
                Ok(Some(Stage::Files {
                    config,
                    images,
                    read,
                }))
            }
            Stage::Files {
                config,
                images,
                read,
            } => {
                let made = read
                    .take()
                    .and_then(|snapshot| self.make(begun, config, snapshot, asked));
                match made {
                    Ok((made, unwanted)) => Ok(Some(Stage::Machine {
                        images,
                        made,
                        unwanted,
                    })),
                    Err(error) => {
                        self.close(images);
                        Err(error)
                    }
                }
            }
            Stage::Machine { images, made, .. } => {
                let made = made.take();
                // What the machine has not taken.
                self.close(images);
                let (made, lacks) = made?;
                let Made {
                    config, machine, ..
                } = made;
                self.life = Life::Live {
                    config,
                    machine,
                    run: RunState::Paused,
                };
                match lacks {
                    Some(lacks) => self.read_memory(begun, lacks).map(Some),
                    None => self.take_applications_up(begun, asked),
                }
            }
            Stage::Memory { rest, is_read, .. } => {
                is_read.take()?;
                self.complete(*rest)?;
                self.take_applications_up(begun, asked)
            }
            Stage::Applications(are_up) => {
                are_up.take()?;
                self.finish_restore(asked)?;
                Ok(None)
            }
        }
    }

    /// Starts to read the configuration of a snapshot.
    fn read_config(&mut self, begun: &Begun, request: &RestoreConfig) -> Result<Stage, ApiError> {
        if self.life.config().is_some() {
            return Err(ApiError::message(
                Status::NotFound,
                "there is a VM already: delete it first (vm.delete)",
            ));
        }
        let directory = place(request.directory(), &request.source_url)?.to_owned();
        let read = move |_: &Cancel| Folder::open(directory);
        Ok(Stage::Config(self.spawn(
            begun,
            ThreadRole::Restore,
            read,
        )?))
    }

    /// Changes the configuration of a snapshot as the request says, and restricts the process as it says.
    fn prepare(
        &mut self,
        config: &mut VmConfig,
        folder: &Folder,
        request: &RestoreConfig,
        fds: Vec<OwnedFd>,
    ) -> Result<(), ApiError> {
        if let Some(renames) = &request.renames {
            let unreadable = |error| bad(format!("the snapshot's configuration: {error}"));
            let (here, unused) = renamed(config, renames).map_err(unreadable)?;
            if let Some(rename) = unused.first() {
                return Err(bad(format!("the snapshot's VM has no {}", rename.from)));
            }
            *config = *here;
        }
        config.confine(request.landlock_enable, request.landlock_rules.as_deref());
        // Whoever wrote the directory is not trusted to have validated the configuration.
        validate(config)?;
        assign_fds(config, request, fds)?;
        for update in request.zone_updates.iter().flatten() {
            let zones = config.memory.zones.iter_mut().flatten();
            match zones.into_iter().find(|zone| zone.id == update.id) {
                Some(zone) => zone.host_numa_node = Some(update.host_numa_node),
                None => {
                    return Err(bad(format!(
                        "the snapshot has no memory zone {:?}",
                        update.id
                    )));
                }
            }
        }
        restored_accels(config, request)?;
        if request.prefault {
            config.memory.prefault = true;
            let zones = config.memory.zones.iter_mut().flatten();
            zones.for_each(|zone| zone.prefault = true);
        }
        restrict(config, Some(folder.path()))?;
        self.monitor.emit("vm", "restoring", &[]);
        Ok(())
    }

    /// Starts to make the machine of a snapshot, paused, and without vCPUs unless its memory is read on demand.
    fn make(
        &mut self,
        begun: &Begun,
        mut config: Box<VmConfig>,
        snapshot: Snapshot,
        asked: &Asked,
    ) -> Result<(Awaited<(Made, Option<Lacks>)>, Cancel), ApiError> {
        let request = &asked.request;
        if let Some(card) = snapshot.card_without_tap(&config) {
            return Err(bad(format!(
                "the tap of network card {card:?} came as a descriptor, which a snapshot does not contain: give one for it \
                 (net_fds=[{card}@[FD]])"
            )));
        }
        let source = match request.memory_restore_mode {
            MemoryRestoreMode::Copy => MemorySource::Copy,
            MemoryRestoreMode::OnDemand => MemorySource::OnDemand,
        };
        let clock = match request.clock {
            RestoredClock::Advance => ClockSource::Advance,
            RestoredClock::Continue => ClockSource::Continue,
        };
        let host = self.host()?;
        let unwanted = Cancel::default();
        let of_machine = unwanted.clone();
        let made = self.spawn_maker(begun, move |place| {
            let (machine, mut rest) =
                Machine::restore(&mut config, snapshot, source, clock, host, of_machine)?;
            let mut made = Made {
                config,
                machine: Box::new(machine),
                _place: place,
            };
            let lacks = match rest.contents.take() {
                Some(contents) => Some(Lacks {
                    contents,
                    rest: Box::new(rest),
                }),
                // As soon as any of its memory is used, its storage is waited for.
                None => {
                    made.machine.complete(rest)?;
                    None
                }
            };
            Ok((made, lacks))
        })?;
        Ok((made, unwanted))
    }

    /// Starts to read the memory of a machine.
    fn read_memory(&mut self, begun: &Begun, lacks: Lacks) -> Result<Stage, ApiError> {
        let Lacks { contents, rest } = lacks;
        let total = contents.memory();
        let done = Arc::<AtomicU64>::default();
        let advanced = Arc::clone(&done);
        let read = move |cancel: &Cancel| {
            let advance = |bytes| {
                advanced.fetch_add(bytes, Ordering::Relaxed);
            };
            contents.read(cancel, advance)
        };
        Ok(Stage::Memory {
            rest,
            read: (done, total),
            is_read: self.spawn(begun, ThreadRole::Restore, read)?,
        })
    }

    /// Restores what a machine lacks whose memory has been read.
    fn complete(&mut self, rest: Rest) -> Result<(), ApiError> {
        let Life::Live { machine, .. } = &mut self.life else {
            return Err(self.not_live());
        };
        machine.complete(rest).map_err(|error| failed(&error))
    }

    /// Has workers take up the applications of the machine's accelerators.
    fn take_applications_up(
        &mut self,
        begun: &Begun,
        asked: &Asked,
    ) -> Result<Option<Stage>, ApiError> {
        let Life::Live { machine, .. } = &self.life else {
            return Err(self.not_live());
        };
        let ports = machine.ports_to_take_up();
        if ports.is_empty() {
            self.finish_restore(asked)?;
            return Ok(None);
        }
        let take_up = move |cancel: &Cancel| applications::take_up(&ports, cancel.clone());
        let are_up = self.spawn(begun, ThreadRole::Migration, take_up)?;
        Ok(Some(Stage::Applications(are_up)))
    }

    /// Finishes restoring a machine that has everything it needs.
    fn finish_restore(&mut self, asked: &Asked) -> Result<(), ApiError> {
        let Life::Live { machine, run, .. } = &mut self.life else {
            return Err(self.not_live());
        };
        if asked.request.resume {
            machine.resume().map_err(|e| failed(&e))?;
            *run = RunState::Running;
        }
        log::info!("the VM has been restored in {:?}", asked.at.elapsed());
        self.monitor.emit("vm", "restored", &[]);
        Ok(())
    }

    /// Keeps a request that comes before a VM that is being restored or booted has its memory and its vCPUs; returns others.
    pub(super) fn wait_for_memory(
        &mut self,
        request: Request,
        reply: Reply,
    ) -> Option<(Request, Reply)> {
        let needs_vcpus = matches!(request, Request::VmPowerButton | Request::VmNmi);
        match &mut self.migrations.job {
            Job::Restoring(restoring)
                if restoring.is_incomplete() && (needs_vcpus || !is_allowed(&request)) =>
            {
                restoring.asked.waiting.push((request, reply));
                None
            }
            Job::Booting(booting) if needs_vcpus || !is_allowed(&request) => {
                booting.keep(request, reply);
                None
            }
            _ => Some((request, reply)),
        }
    }

    /// Cancels the restore. Workers notice it, and answer. A thread that waits for storage may hang: nobody waits for it.
    pub(super) fn cancel_restore(&mut self) {
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Restoring(restoring) if restoring.is_incomplete() => {
                restoring.cancel.cancel();
                self.forget_stage(restoring.stage);
                let error = ApiError::wrong_state("the VM is not restored: it was cancelled");
                let Asked { reply, waiting, .. } = restoring.asked;
                self.give_up_restore(reply, error);
                self.take_all(waiting);
            }
            other => {
                if let Job::Restoring(restoring) = &other {
                    restoring.cancel.cancel();
                }
                self.migrations.job = other;
            }
        }
    }

    /// Drops what the thread of a stage brings.
    fn forget_stage(&self, stage: Stage) {
        match stage {
            Stage::Files { images, .. } => self.close(images),
            Stage::Machine {
                images,
                made,
                unwanted,
            } => {
                unwanted.cancel();
                self.close(images);
                self.forget(made);
            }
            _ => {}
        }
    }

    /// Abandons the restore, because the machine is replaced.
    pub(super) fn abandon_restore(&mut self) {
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Restoring(Restoring {
                cancel,
                asked,
                stage,
                ..
            }) => {
                cancel.cancel();
                self.forget_stage(stage);
                let waiting = asked.waiting.into_iter().map(|(_, reply)| reply);
                for reply in [asked.reply].into_iter().chain(waiting) {
                    reply.send(Err(ApiError::wrong_state(OVER)));
                }
            }
            other => self.migrations.job = other,
        }
    }
}

/// The request does not fit the snapshot.
fn bad(why: String) -> ApiError {
    ApiError::message(Status::BadRequest, why)
}

/// Changes the pools of the accelerators that the request names.
fn restored_accels(config: &mut VmConfig, request: &RestoreConfig) -> Result<(), ApiError> {
    for update in request.accels.iter().flatten() {
        let Some(ring) = ring(config, &update.id) else {
            return Err(bad(format!(
                "the snapshot has no accelerator {:?} that a pool serves",
                update.id
            )));
        };
        check_selection(update.device.as_deref())?;
        ring.socket.clone_from(&update.socket);
        if let Some(device) = &update.device {
            ring.device = Some(device.clone()).filter(|device| !device.is_empty());
        }
    }
    Ok(())
}

/// Assigns the descriptors that came with the request to the network cards of a snapshot.
fn assign_fds(
    config: &mut VmConfig,
    request: &RestoreConfig,
    fds: Vec<OwnedFd>,
) -> Result<(), ApiError> {
    let mut fds = fds.into_iter();
    for restored in request.net_fds.iter().flatten() {
        let cards = config.net.iter_mut().flatten();
        let card = cards
            .into_iter()
            .find(|net| net.common.id.as_deref() == Some(&restored.id));
        let own: Vec<_> = if restored.fds.is_empty() {
            let own = fds.by_ref().take(restored.num_fds);
            own.map(Descriptor::from).collect()
        } else {
            restored
                .fds
                .iter()
                .copied()
                .map(Descriptor::Inherited)
                .collect()
        };
        match card {
            Some(card) if own.len() == restored.num_fds => card.fds = own,
            _ => {
                return Err(bad(format!(
                    "network card {:?} of net_fds is not in the snapshot, or came with \
                     {} descriptors instead of {}",
                    restored.id,
                    own.len(),
                    restored.num_fds
                )));
            }
        }
    }
    Ok(())
}
