//! The implementation of each API call.

use std::{
    collections::BTreeMap, error::Error as StdError, fs, mem, path::Path, sync::Arc, time::Duration,
};

use vmm_api::{
    AccelInSnapshot, ApiError, DeviceNode, Handler, InProgress, PciDeviceInfo, Reply, Request,
    Response, Status, VmCounters, VmInfo, VmResize, VmState, VmmPingResponse,
    metrics::{Metrics, VmMetrics},
};
use vmm_config::{Device, FileAccess, FileUse, Refused, VmConfig};
use vmm_confinement::{landlock, seccomp::Spawner};
use vmm_machine::{
    Machine,
    error::MachineError,
    host::{Host, Shell},
    images::Images,
    resize::no_balloon,
};

use super::{
    Advance, Control, ExitReason,
    booting::{Booter, SOON},
    early_resets::EarlyResets,
    life::{Life, RunState},
    migration::{Job, OVER, host_error},
    storage,
};

type Answer = Result<Response, ApiError>;

impl Handler for Control {
    fn take(&mut self, request: Request, reply: Reply) {
        let Some((request, reply)) = self.wait_for_memory(request, reply) else {
            return;
        };
        if let Err(error) = self.is_allowed_now(&request) {
            return reply.send(Err(error));
        }
        match request {
            request if storage::waits(&request) => self.when_quiet(request, reply),
            Request::VmReceiveMigration(request) => self.receive_migration(request, reply),
            Request::VmMoveAccel(request) => self.move_accel(request, reply),
            Request::VmSnapshot(_) if let Err(error) = self.check_can_be_saved() => {
                reply.send(Err(error));
            }
            Request::VmSnapshot(snapshot) if snapshot.accel == AccelInSnapshot::Save => {
                self.save_with_applications(&snapshot, reply);
            }
            Request::VmSnapshot(snapshot) => self.snapshot_later(&snapshot, reply),
            Request::VmCoredump(dump) => {
                let file = place(dump.file(), &dump.destination_url).map(Path::to_owned);
                self.coredump_later(file, reply);
            }
            Request::VmRestore(config, fds) => self.restore_later(config, fds, reply),
            Request::VmResizeDisk(resize) => self.resize_disk_later(&resize, reply),
            Request::VmBoot => self.boot_later(Booter::Client(reply)),
            Request::VmAdd(device) => self.add_later(device, reply),
            request => reply.send(self.handle(request)),
        }
    }

    fn handle(&mut self, request: Request) -> Answer {
        self.refuse_if_frozen(&request)?;
        self.refuse_if_migrating(&request)?;
        match request {
            Request::VmmPing => Ok(Response::Ping(VmmPingResponse::current())),
            Request::VmmShutdown => {
                self.exit = Some(ExitReason::Request);
                Ok(Response::Empty)
            }
            Request::VmmMetrics => Ok(Response::Metrics(self.metrics())),
            Request::VmCreate(config) => self.create(config),
            Request::VmDelete => self.delete(),
            Request::VmPause => self.pause(),
            Request::VmResume => self.resume(),
            Request::VmShutdown => self.shutdown(),
            Request::VmPowerButton => self.on_live(|machine, _| machine.power_button()),
            Request::VmNmi => self.on_live(|machine, _| machine.nmi()),
            Request::VmInfo => self.info(),
            Request::VmCounters => self.counters().map(Response::Counters),
            Request::VmResize(resize) => self.resize(&resize),
            Request::VmResizeZone(resize) => self.on_live(|machine, config| {
                machine.resize_zone(config, &resize.id, resize.desired_ram)
            }),
            Request::VmRemoveDevice(device) => {
                // Cancelling a removal removes nothing.
                if !device.cancel {
                    self.refuse_if_tracking(&device.id)?;
                }
                self.remove(&device)
            }
            Request::VmSwapDevice(swap) => self.swap(&swap),
            Request::VmSendMigration(request) => self.send_migration(&request),
            // Answered later, like the next ones: see `take`, and `go_on` for a VM that is rebooted.
            Request::VmReboot => Err(self.not_live()),
            Request::VmBoot | Request::VmAdd(_) => Err(ApiError::message(
                Status::Internal,
                "a VM can only be booted, and given devices, over the API, or when the VMM starts",
            )),
            Request::VmSnapshot(_) | Request::VmCoredump(_) => Err(ApiError::message(
                Status::Internal,
                "a VM can only be saved over the API",
            )),
            Request::VmResizeDisk(_) => Err(ApiError::message(
                Status::Internal,
                "a disk can only be resized over the API",
            )),
            Request::VmMoveAccel(_) => Err(ApiError::message(
                Status::Internal,
                "applications can only be moved over the API",
            )),
            Request::VmRestore(..) => Err(ApiError::message(
                Status::Internal,
                "a VM can only be restored over the API, or when the VMM starts",
            )),
            // Answered later: see `take`.
            Request::VmReceiveMigration(_) => Err(ApiError::message(
                Status::Internal,
                "a VM can only be received over the API",
            )),
            Request::VmMigration => self.migration_info(),
            Request::VmCancelMigration => self.cancel_migration(),
            Request::VmResolveMigration(resolve) => self.resolve_migration(&resolve),
        }
    }
}

impl Control {
    /// Refuses requests for which it is not the time.
    pub(super) fn is_allowed_now(&self, request: &Request) -> Result<(), ApiError> {
        self.refuse_if_migrating(request)?;
        self.refuse_if_waiting(request)?;
        self.refuse_if_frozen(request)
    }

    fn create(&mut self, config: Box<VmConfig>) -> Answer {
        if self.life.config().is_some() {
            return Err(ApiError::message(
                Status::Internal,
                "there is a VM already: delete it first (vm.delete)",
            ));
        }
        restrict(&config, None)?;
        self.life = Life::Created(config);
        Ok(Response::Empty)
    }

    fn delete(&mut self) -> Answer {
        if self.life.config().is_none() {
            return Err(ApiError::not_created());
        }
        self.end_machine()?;
        // The watchdog's reset may have been under way.
        self.sender.watchdog().forget_reset();
        self.life = Life::None;
        self.early_resets = EarlyResets::default();
        self.forget_disks(OVER);
        self.monitor.emit("vm", "deleted", &[]);
        Ok(Response::Empty)
    }

    /// The configuration of a VM that may be booted.
    pub(super) fn bootable(&self) -> Result<&VmConfig, ApiError> {
        match &self.life {
            Life::None => Err(ApiError::not_created()),
            Life::Live { .. } => Err(ApiError::wrong_state("the VM has booted already")),
            Life::Created(config) | Life::Shutdown(config) => Ok(config),
        }
    }

    fn pause(&mut self) -> Answer {
        let Life::Live { machine, run, .. } = &mut self.life else {
            return Err(self.not_live());
        };
        if *run == RunState::Paused {
            return Err(ApiError::wrong_state("the VM is paused already"));
        }
        machine.pause().map_err(|e| failed(&e))?;
        *run = RunState::Paused;
        self.monitor.emit("vm", "paused", &[]);
        Ok(Response::Empty)
    }

    fn resume(&mut self) -> Answer {
        let Life::Live { machine, run, .. } = &mut self.life else {
            return Err(self.not_live());
        };
        let frozen = machine.is_frozen();
        if *run == RunState::Running && !frozen {
            return Err(ApiError::wrong_state("the VM is not paused"));
        }
        self.monitor.emit("vm", "resuming", &[]);
        if *run == RunState::Paused {
            machine.resume().map_err(|e| failed(&e))?;
        }
        *run = RunState::Running;
        if frozen {
            self.give_up_server();
        }
        self.monitor.emit("vm", "resumed", &[]);
        Ok(Response::Empty)
    }

    fn shutdown(&mut self) -> Answer {
        if self.life.machine_mut().is_none() {
            return Err(self.not_live());
        }
        self.end_machine()?;
        self.sender.watchdog().forget_reset();
        self.monitor.emit("vm", "shutdown", &[]);
        Ok(Response::Empty)
    }

    /// Powers the machine off, so that the same configuration can be booted again.
    pub(super) fn end_for_reboot(&mut self) -> Result<(), ApiError> {
        if self.life.machine_mut().is_none() {
            return Err(self.not_live());
        }
        self.monitor.emit("vm", "rebooting", &[]);
        self.end_machine()
    }

    /// Powers the machine off. Its memory is unmapped, so a machine whose storage does not respond
    /// stays as it is.
    fn end_machine(&mut self) -> Result<(), ApiError> {
        if let Some(machine) = self.life.machine_mut() {
            machine.quiesce().map_err(|e| failed(&e))?;
        }
        self.drop_machine();
        Ok(())
    }

    /// Ends a machine whose requests are held, or that never ran, on a thread: it takes long to free much memory, and storage
    /// may not answer when files are closed, or bring memory that is being restored on demand. Meanwhile its files stay in use.
    pub(super) fn end(&self, machine: Box<Machine>) {
        machine.needs_no_memory();
        self.end_later(machine);
        // Most are gone by then.
        self.ends.is_empty_within(SOON);
    }

    fn end_later(&self, machine: Box<Machine>) {
        // The places are left when the machine is gone.
        self.forget((machine, self.queue.place(), self.ends.place()));
    }

    /// Ends the machine, if there is one, because the process ends.
    pub(super) fn end_with_process(&mut self) {
        /// Time for disks of machines that end on threads, whose storage may work.
        const PATIENCE: Duration = Duration::from_secs(3);
        if let Life::Live { machine, .. } = mem::take(&mut self.life)
            && !machine.has_its_memory()
        {
            self.end_later(machine);
        }
        self.ends.is_empty_within(PATIENCE);
    }

    /// Drops the machine; only its configuration remains.
    pub(super) fn drop_machine(&mut self) {
        self.life = match mem::take(&mut self.life) {
            Life::Live {
                mut config,
                machine,
                ..
            } => {
                self.end(machine);
                // Events that the old machine has left must not reach a new one.
                self.receiver.clear();
                self.abandon_storage_waits();
                self.abandon_moves();
                self.migrations.returns.clear();
                self.removals.finish(&mut config, &mut self.monitor);
                Life::Shutdown(config)
            }
            other => other,
        };
    }

    /// Prepares a snapshot of a paused machine, whose folder is ready.
    pub(super) fn begin_snapshot(&mut self, detach: bool) -> Result<(), ApiError> {
        self.on_paused("saved", |_, _| Ok(()))?;
        if detach {
            // Only after it is certain that a snapshot is possible: they do not come back.
            self.detach_physical()?;
            self.on_paused("saved", |machine, _| machine.devices().detach())?;
        }
        self.monitor.emit("vm", "snapshotting", &[]);
        Ok(())
    }

    /// The process's resources for a new machine. Threads inherit the confinement that the control
    /// thread has by now.
    pub(super) fn host(&mut self) -> Result<Host, ApiError> {
        let failed = |error: &dyn StdError| {
            ApiError::internal(error).context("cannot prepare the host for a VM")
        };
        let shell = match mem::replace(&mut self.advance, Advance::No) {
            Advance::Made(shell) => shell,
            Advance::No | Advance::Due => Shell::new().map_err(|e| failed(&e))?,
        };
        Ok(Host {
            shell,
            spawner: Arc::new(
                Spawner::new(self.filters.clone())
                    .map_err(|error| failed(&host_error("start a thread", &error)))?,
            ),
            events: self.sender.clone(),
            arriving: false,
            archive: None,
            images: Arc::default(),
            memory: None,
            given: Arc::default(),
            start: self.started,
        })
    }

    fn info(&mut self) -> Answer {
        let (Some(config), Some(state)) = (self.life.config(), self.life.state()) else {
            return Err(match &self.migrations.job {
                Job::Restoring(restoring) => ApiError::wrong_state(restoring.what()),
                _ => ApiError::not_created(),
            });
        };
        let config = Box::new(config.clone());
        let (memory_actual_size, device_tree) = match &self.life {
            Life::Live { machine, .. } => (
                machine.memory_size(),
                Some(device_tree(machine, &self.removals)),
            ),
            _ => (vmm_machine::placement::boot_size(&config), None),
        };
        Ok(Response::Info(Box::new(VmInfo {
            config,
            state,
            memory_actual_size,
            device_tree,
            in_progress: self.in_progress(),
        })))
    }

    /// What is being done that takes a while.
    fn in_progress(&self) -> Option<InProgress> {
        match &self.migrations.job {
            Job::Writing(written) => Some(written.progress()),
            Job::Restoring(restoring) if restoring.progress().is_some() => restoring.progress(),
            Job::Booting(booting) => Some(booting.progress()),
            _ => self.storage.progress().or_else(|| self.adding_progress()),
        }
    }

    fn counters(&mut self) -> Result<VmCounters, ApiError> {
        let Life::Live { machine, .. } = &self.life else {
            return Err(self.not_live());
        };
        let named = |counters: BTreeMap<&'static str, u64>| {
            counters
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()
        };
        Ok(machine
            .counters()
            .into_iter()
            .map(|(id, counters)| (id, named(counters)))
            .collect())
    }

    fn metrics(&mut self) -> Metrics {
        let Some(state) = self.life.state() else {
            return Metrics { vm: None };
        };
        let counters = self.counters().unwrap_or_default();
        let (vcpus, memory_bytes) = match &self.life {
            Life::Live { machine, .. } => (machine.vcpus(), machine.memory_size()),
            _ => (0, 0),
        };
        Metrics {
            vm: Some(VmMetrics {
                state,
                vcpus,
                memory_bytes,
                counters,
            }),
        }
    }

    fn resize(&mut self, resize: &VmResize) -> Answer {
        if let Life::Created(config) | Life::Shutdown(config) = &mut self.life {
            // Takes effect at the next boot.
            return change(config, |config| {
                if let Some(vcpus) = resize.desired_vcpus {
                    config.cpus.boot_vcpus = vcpus;
                }
                if let Some(size) = resize.desired_ram {
                    config.memory.size = size;
                }
                if let Some(size) = resize.desired_balloon {
                    let balloon = config.balloon.as_mut().ok_or_else(no_balloon)?;
                    balloon.size = size;
                }
                Ok(())
            });
        }
        self.monitor.emit("vm", "resizing", &[]);
        self.on_live(|machine, config| {
            if let Some(vcpus) = resize.desired_vcpus {
                machine.resize_cpus(vcpus)?;
                config.cpus.boot_vcpus = vcpus;
            }
            if let Some(size) = resize.desired_ram {
                machine.resize_memory(config, size)?;
            }
            if let Some(size) = resize.desired_balloon {
                machine.resize_balloon(config, size)?;
            }
            Ok(())
        })?;
        self.monitor.emit("vm", "resized", &[]);
        Ok(Response::Empty)
    }

    /// Checks a request for a device against the VM's configuration.
    pub(super) fn check_joins(&self, device: &dyn Device) -> Result<(), ApiError> {
        self.refuse_if_leaving(device.needs())?;
        if let Some(vm) = self.life.config() {
            let running = matches!(self.life, Life::Live { .. });
            device
                .check_joins(vm, running)
                .map_err(|Refused(why)| ApiError::message(Status::BadRequest, why))?;
            if let Some(id) = &device.common().id
                && vm.has_device(id)
            {
                return Err(match self.removals.state(id) {
                    None => failed(&MachineError::DuplicateId(id.clone())),
                    Some(_) => ApiError::message(
                        Status::Conflict,
                        format!(
                            "device {id:?} is being removed, and the guest has yet to give it up: wait for that, \
                             remove it with force, or choose another id"
                        ),
                    ),
                });
            }
            if !vm.has_room_for(device) {
                return Err(ApiError::message(
                    Status::Conflict,
                    "the VM has a device of this kind already, and can have only one",
                ));
            }
        }
        Ok(())
    }

    /// Plugs a device into a live machine, or adds it to the configuration for the next boot. Its files may be known to be
    /// there, and open.
    pub(super) fn add(
        &mut self,
        mut device: Box<dyn Device>,
        images: Option<Arc<Images>>,
    ) -> Answer {
        self.check_joins(&*device)?;
        if images.is_none() && self.life.config().is_some() && device.descriptors().is_empty() {
            // A wrong file name is reported to the client that made the error, not to the one that
            // boots the VM.
            check_files(&device.files())?;
        }
        match &mut self.life {
            Life::None => Err(ApiError::not_created()),
            Life::Created(vm) | Life::Shutdown(vm) => change(vm, |vm| {
                vm.put_device(device);
                Ok(())
            }),
            Life::Live {
                config: vm,
                machine,
                ..
            } => {
                // Which segments are behind the virtual IOMMU is undecided until the machine boots.
                device.normalize_segment(vm.iommu_segments());
                let added = match images {
                    Some(images) => machine.add_open(&mut *device, images),
                    None => machine.add_device(&mut *device),
                };
                let (id, bdf) = added.map_err(|e| failed(&e))?;
                vm.put_device(device);
                self.monitor.emit("vm", "device-added", &[("id", &id)]);
                Ok(Response::Device(PciDeviceInfo {
                    id,
                    bdf: bdf.to_string(),
                }))
            }
        }
    }

    fn on_live(
        &mut self,
        work: impl FnOnce(&mut Machine, &mut VmConfig) -> Result<(), MachineError>,
    ) -> Answer {
        self.of_live(work).map(|()| Response::Empty)
    }

    pub(super) fn of_live<R>(
        &mut self,
        work: impl FnOnce(&mut Machine, &mut VmConfig) -> Result<R, MachineError>,
    ) -> Result<R, ApiError> {
        match &mut self.life {
            Life::Live {
                machine, config, ..
            } => work(machine, config).map_err(|e| failed(&e)),
            _ => Err(self.not_live()),
        }
    }

    pub(super) fn on_paused<R>(
        &mut self,
        what: &str,
        work: impl FnOnce(&mut Machine, &mut VmConfig) -> Result<R, MachineError>,
    ) -> Result<R, ApiError> {
        if matches!(self.life.state(), Some(VmState::Running | VmState::Frozen)) {
            let message = format!("a running VM cannot be {what}: pause it first (vm.pause)");
            return Err(ApiError::wrong_state(message));
        }
        self.of_live(work)
    }

    pub(super) fn not_live(&self) -> ApiError {
        match self.life {
            Life::None => ApiError::not_created(),
            _ => ApiError::wrong_state("the VM has not booted: use vm.boot (gantry ctl boot)"),
        }
    }
}

/// Restricts this process to the VM's files for good, if its configuration says so.
pub(super) fn restrict(config: &VmConfig, source: Option<&Path>) -> Result<(), ApiError> {
    if !config.landlock_enable {
        return Ok(());
    }
    landlock::restrict(config, source).map_err(|error| ApiError::internal(&error))
}

/// Checks that the files of a device exist.
pub(super) fn check_files(files: &[FileUse]) -> Result<(), ApiError> {
    for file in files {
        if file.access == FileAccess::Create {
            continue;
        }
        if let Err(error) = fs::metadata(&file.path) {
            let why = format!("cannot use {}: {error}", file.path.display());
            return Err(ApiError::message(Status::BadRequest, why));
        }
    }
    Ok(())
}

/// Changes the configuration of a VM that is powered off, if the result is valid.
fn change(
    config: &mut VmConfig,
    work: impl FnOnce(&mut VmConfig) -> Result<(), MachineError>,
) -> Answer {
    let mut changed = config.clone();
    work(&mut changed).map_err(|e| failed(&e))?;
    changed.normalize();
    validate(&changed)?;
    *config = changed;
    Ok(Response::Empty)
}

pub(super) fn validate(config: &VmConfig) -> Result<(), ApiError> {
    config.validate().map_err(|error| {
        ApiError::new(Status::BadRequest, &error).context("the configuration is not valid")
    })
}

pub(super) fn place<'a>(path: Option<&'a Path>, url: &str) -> Result<&'a Path, ApiError> {
    path.ok_or_else(|| {
        failed(&MachineError::Url {
            url: url.to_owned(),
        })
    })
}

/// Converts an error to an API error with the appropriate status.
pub(super) fn failed(error: &MachineError) -> ApiError {
    let status = match error {
        MachineError::NoDevice(_) => Status::NotFound,
        MachineError::DuplicateId(_) => Status::Conflict,
        MachineError::CpuRemovalPending => Status::TooManyRequests,
        MachineError::Invalid(_)
        | MachineError::Url { .. }
        | MachineError::NoSegment { .. }
        | MachineError::BehindIommu { .. }
        | MachineError::NoIommu
        | MachineError::NotBehindIommu { .. }
        | MachineError::NoRootPort(_)
        | MachineError::TooLate { .. }
        | MachineError::NotRemovable(_)
        | MachineError::WrongKind { .. } => Status::BadRequest,
        _ => Status::Internal,
    };
    ApiError::new(status, error)
}

fn device_tree(
    machine: &Machine,
    removals: &super::removals::Removals,
) -> BTreeMap<String, DeviceNode> {
    machine
        .devices()
        .iter()
        .map(|(id, device)| {
            let node = DeviceNode {
                id: id.clone(),
                pci_bdf: Some(device.bdf.to_string()),
                children: machine.devices().behind(device),
                state: removals
                    .state(id)
                    .or_else(|| device.is_lost().then_some("lost"))
                    .map(str::to_owned),
                ..Default::default()
            };
            (id.clone(), node)
        })
        .collect()
}
