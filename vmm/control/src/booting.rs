//! What needs files that are not open: boots, resets, and disks that are plugged in. Separate threads open them, because that
//! takes as long as the storage likes. Meanwhile the control thread serves requests. Those that need a VM that is being
//! booted wait for it.
//!
//! ```text
//!   control thread                     thread
//!                               ──>    images of the VM's disks are opened
//!                               ──>    the machine is made: its kernel is read, its other files are opened
//!   it runs                     <──
//! ```

use std::{
    any::Any,
    mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use base::Cancel;
use devices::thread::ThreadRole;
use vmm_api::{ApiError, InProgress, Operation, Reply, Request, Response};
use vmm_config::{Device, DiskConfig, FileUse};
use vmm_machine::{
    Machine, consoles, devices::DeviceKind, error::MachineError, host::Host, images::Images,
};

use super::{
    Advance, Control, ExitReason,
    life::{Life, RunState},
    migration::{Job, host_error},
    queue::{Made, Place},
    requests::{check_files, failed},
    restore::{Awaited, Begun},
};

/// What a VM that is being booted, or is given a disk, waits for.
const WAITS_FOR: &str = "images of its disks";

/// Storage that works answers by then: requests come before or after a boot, and not amid it.
pub(super) const SOON: Duration = Duration::from_millis(50);

/// A VM that is being booted.
pub(super) struct Booting {
    /// Number of the boot's stage.
    pub(super) number: u64,
    cancel: Cancel,
    stage: Stage,
    /// Images of its disks.
    images: Arc<Images>,
    booter: Booter,
    /// Requests that need the VM.
    waiting: Vec<(Request, Reply)>,
}

/// What a boot waits for.
enum Stage {
    /// Images of disks.
    Images(Awaited<()>),
    /// All else that a machine consists of.
    Machine(Awaited<Made>),
}

/// Who has asked for a boot.
pub(super) enum Booter {
    /// A client, by `vm.boot`.
    Client(Reply),
    /// A client, by `vm.reboot`.
    Reboot(Reply),
    /// The guest, or its watchdog, by a reset.
    Guest,
}

/// Opens the file of a device that is added.
type Open = Box<dyn FnOnce(&Images) -> Result<(), MachineError> + Send>;

/// A request for a device whose file is being opened.
pub(super) type Adding = (Request, Reply, Arc<Images>);

impl Booting {
    /// The activity, as the beginning of a sentence.
    pub(super) fn what(&self) -> String {
        format!("the VM is being booted, and waits for {}", self.waits_for())
    }

    fn waits_for(&self) -> &'static str {
        match self.stage {
            Stage::Images(_) => WAITS_FOR,
            Stage::Machine(_) => "its kernel and other files",
        }
    }

    /// What `vm.info` says about it.
    pub(super) fn progress(&self) -> InProgress {
        InProgress {
            operation: Operation::Boot,
            done_bytes: None,
            total_bytes: None,
            waits_for: Some(self.waits_for().to_owned()),
        }
    }

    /// Keeps a request until the boot is over.
    pub(super) fn keep(&mut self, request: Request, reply: Reply) {
        self.waiting.push((request, reply));
    }
}

impl Control {
    /// Boots the VM when its files are open.
    pub(super) fn boot_later(&mut self, booter: Booter) {
        // A disk that has grown may not have been answered for.
        self.end_writing();
        let begun = Begun {
            number: self.migrations.number(),
            cancel: Cancel::default(),
        };
        let images = Arc::<Images>::default();
        let stage = match self.open_images(&begun, &images) {
            Ok(Some(opening)) => {
                // The thread needs none of this.
                if !matches!(self.advance, Advance::Made(_)) {
                    self.advance = Advance::make();
                }
                Ok(Stage::Images(opening))
            }
            Ok(None) => self.make_machine(&begun, &images).map(Stage::Machine),
            Err(error) => Err(error),
        };
        match stage {
            Ok(stage) => self.go_on_booting(Booting {
                number: begun.number,
                cancel: begun.cancel,
                stage,
                images,
                booter,
                waiting: Vec::new(),
            }),
            Err(error) => self.has_booted(booter, Err(error)),
        }
    }

    /// Starts to open the images of the VM's disks, if it has any.
    fn open_images(
        &mut self,
        begun: &Begun,
        images: &Arc<Images>,
    ) -> Result<Option<Awaited<()>>, ApiError> {
        let disks = self.bootable()?.disks.clone().unwrap_or_default();
        self.monitor.emit("vm", "booting", &[]);
        if !disks.iter().any(DiskConfig::has_image) {
            return Ok(None);
        }
        let (images, place) = (Arc::clone(images), self.queue.place());
        let open = move |cancel: &Cancel| {
            // An earlier machine may have them.
            if place.wait(cancel) {
                drop(place);
                images.open(&disks, false)?;
            }
            Ok(())
        };
        self.spawn(begun, ThreadRole::Restore, open).map(Some)
    }

    /// Starts to make the machine, the images of whose disks are open.
    fn make_machine(
        &mut self,
        begun: &Begun,
        images: &Arc<Images>,
    ) -> Result<Awaited<Made>, ApiError> {
        let mut config = Box::new(self.bootable()?.clone());
        let is_first = matches!(self.life, Life::Created(_));
        let host = Host {
            images: Arc::clone(images),
            ..self.host()?
        };
        self.spawn_maker(begun, move |place| {
            if is_first {
                consoles::empty_files(&config);
            }
            Ok(Made {
                machine: Box::new(Machine::boot(&mut config, host)?),
                config,
                _place: place,
            })
        })
    }

    /// Runs what makes a machine on a thread that may do what the control thread may, when earlier machines are gone.
    pub(super) fn spawn_maker<T: Send + 'static>(
        &self,
        begun: &Begun,
        make: impl FnOnce(Place) -> Result<T, MachineError> + Send + 'static,
    ) -> Result<Awaited<T>, ApiError> {
        let place = self.queue.place();
        let (body, made) = self.stage(begun, move |cancel| match place.wait(cancel) {
            true => make(place),
            false => Err(MachineError::Cancelled),
        })?;
        thread::Builder::new()
            .name("_machine".to_owned())
            .spawn(body)
            .map_err(|error| host_error("start a thread", &error))?;
        Ok(made)
    }

    /// Handles that a stage of a boot is over, or may be soon.
    pub(super) fn go_on_booting(&mut self, mut booting: Booting) {
        let booted = match &booting.stage {
            Stage::Images(are_open) => match are_open.within(SOON) {
                Some(Ok(())) => {
                    // A number of its own: the end of the first stage may still be told.
                    let begun = Begun {
                        number: self.migrations.number(),
                        cancel: booting.cancel.clone(),
                    };
                    match self.make_machine(&begun, &booting.images) {
                        Ok(made) => {
                            booting.number = begun.number;
                            booting.stage = Stage::Machine(made);
                            return self.go_on_booting(booting);
                        }
                        Err(error) => Some(Err(error)),
                    }
                }
                Some(Err(error)) => Some(Err(error)),
                None => None,
            },
            Stage::Machine(made) => {
                let made = made.within(SOON);
                made.map(|made| made.and_then(|made| self.start_machine(made)))
            }
        };
        let Some(booted) = booted else {
            self.migrations.job = Job::Booting(booting);
            return;
        };
        // What the machine has not taken.
        self.close(booting.images);
        self.has_booted(booting.booter, booted);
        self.take_all(booting.waiting);
    }

    /// Lets a machine run that was made for a boot.
    fn start_machine(&mut self, made: Made) -> Result<(), ApiError> {
        let Made {
            config,
            mut machine,
            ..
        } = made;
        machine.resume().map_err(|e| failed(&e))?;
        log::info!("the VM has booted after {:?}", self.started.elapsed());
        self.early_resets.booted(Instant::now());
        self.life = Life::Live {
            config,
            machine,
            run: RunState::Running,
        };
        self.monitor.emit("vm", "booted", &[]);
        Ok(())
    }

    fn has_booted(&mut self, booter: Booter, booted: Result<(), ApiError>) {
        match (booter, booted) {
            (Booter::Client(reply), booted) => reply.send(booted.map(|()| Response::Empty)),
            (Booter::Reboot(reply), Ok(())) => {
                self.monitor.emit("vm", "rebooted", &[]);
                reply.send(Ok(Response::Empty));
            }
            (Booter::Reboot(reply), Err(error)) => reply.send(Err(error)),
            (Booter::Guest, Ok(())) => self.monitor.emit("vm", "rebooted", &[]),
            (Booter::Guest, Err(error)) => self.guest_has_no_machine(&error),
        }
    }

    /// Ends the process, as the machine that the guest has asked for is not to be had.
    pub(super) fn guest_has_no_machine(&mut self, error: &ApiError) {
        log::error!("the guest cannot be reset or powered off: {error}");
        self.exit = Some(ExitReason::GuestFailed);
    }

    /// Cancels the boot: the VM stays off. The thread may hang: nobody waits for it.
    pub(super) fn cancel_boot(&mut self) {
        match mem::replace(&mut self.migrations.job, Job::None) {
            Job::Booting(booting) => {
                booting.cancel.cancel();
                self.close(booting.images);
                self.forget(booting.stage);
                let error = ApiError::wrong_state("the VM is not booted: it was cancelled");
                if !matches!(booting.booter, Booter::Client(_)) {
                    self.monitor.emit("vm", "shutdown", &[]);
                }
                match booting.booter {
                    Booter::Client(reply) | Booter::Reboot(reply) => reply.send(Err(error)),
                    Booter::Guest => log::warn!("after its reset, {error}"),
                }
                self.take_all(booting.waiting);
            }
            other => self.migrations.job = other,
        }
    }

    /// Drops what a thread brings that nobody waits for any more. If it is a machine, its end may take long.
    pub(super) fn forget<T: Send + 'static>(&self, awaited: T) {
        let drops = thread::Builder::new().name("_close".to_owned());
        if let Err(error) = drops.spawn(move || drop(awaited)) {
            log::warn!("a machine that was cancelled has ended here: {error}");
        }
    }

    /// Gives up images that nobody waits for any more, which are unlocked and closed on a thread that may hang.
    pub(super) fn close(&self, images: Arc<Images>) {
        if !images.give_up() {
            return;
        }
        let close = Box::new(move || images.close());
        if let Err(error) = self.start_thread_as(ThreadRole::Restore, "_close", close) {
            log::warn!("images of disks stay open: {error}");
        }
    }

    /// Carries out a request for a device. The file of a disk or of persistent memory is looked for before, and opened for a
    /// live VM.
    pub(super) fn add_later(&mut self, device: Box<dyn Device>, reply: Reply) {
        let Some(open) = self.to_open(&*device) else {
            return reply.send(self.add(device, None));
        };
        let started = self
            .check_joins(&*device)
            .and_then(|()| self.refuse_if_opening(&*device))
            .and_then(|()| self.start_to_open(device.files(), open));
        match started {
            Ok((number, images)) => {
                let request = Request::VmAdd(device);
                self.adding.insert(number, (request, reply, images));
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// What opens the file of a device, if it has one on storage and there is a VM.
    fn to_open(&self, device: &dyn Device) -> Option<Open> {
        let any: &dyn Any = device;
        let machine = match &self.life {
            Life::None => return None,
            Life::Live { machine, .. } => Some(machine),
            Life::Created(_) | Life::Shutdown(_) => None,
        };
        let id = |kind, machine: &Machine| {
            let id = device.common().id.clone();
            id.unwrap_or_else(|| machine.devices().free_id(kind))
        };
        let disk = any.downcast_ref::<DiskConfig>();
        if let Some(disk) = disk.filter(|disk| disk.has_image()) {
            let disk = machine.map(|machine| {
                let mut disk = disk.clone();
                disk.common.id = Some(id(DiskConfig::NAME, machine));
                disk
            });
            return Some(Box::new(move |images| images.open(disk.as_slice(), false)));
        }
        let (kind, open) = vmm_machine::kinds::opener(device)?;
        let id = machine.map(|machine| id(kind, machine));
        Some(Box::new(move |images| match id {
            Some(id) => open(&id, images),
            None => Ok(()),
        }))
    }

    /// Refuses a device whose file is being opened for an earlier request: each would leave a thread behind.
    fn refuse_if_opening(&self, device: &dyn Device) -> Result<(), ApiError> {
        let opening = self
            .adding
            .values()
            .filter_map(|(request, ..)| match request {
                Request::VmAdd(device) => Some(device.files()),
                _ => None,
            });
        let opening: Vec<_> = opening.flatten().map(|file| file.path).collect();
        let files = device.files();
        match files.iter().find(|file| opening.contains(&file.path)) {
            Some(file) => Err(ApiError::wrong_state(format!(
                "{} is being opened for an earlier request, and its storage has not answered: wait for that one, or end it \
                 with vm.cancel-migration",
                file.path.display()
            ))),
            None => Ok(()),
        }
    }

    /// Starts to look for the files of a device, and to open them.
    fn start_to_open(
        &mut self,
        files: Vec<FileUse>,
        open: Open,
    ) -> Result<(u64, Arc<Images>), ApiError> {
        let number = self.migrations.number();
        let control = self.migrations.on_control();
        let control = control.map_err(|error| host_error("open a file", &error))?;
        let images = Arc::<Images>::default();
        let opening = Arc::clone(&images);
        let open = move || {
            let opened =
                check_files(&files).and_then(|()| open(&opening).map_err(|error| failed(&error)));
            control.tell(move |control| control.is_open(number, opened));
        };
        self.start_thread_as(ThreadRole::Restore, "_open", Box::new(open))?;
        Ok((number, images))
    }

    /// Adds a device whose file is open, unless its VM is gone. Files that nobody takes may take long to close.
    fn is_open(&mut self, number: u64, opened: Result<(), ApiError>) {
        let Some((request, reply, images)) = self.adding.remove(&number) else {
            return;
        };
        if let Err(error) = opened {
            self.close(images);
            return reply.send(Err(error));
        }
        if let Job::Booting(booting) = &mut self.migrations.job {
            // It is opened again when the VM is there.
            booting.keep(request, reply);
            return self.close(images);
        }
        let allowed = self.is_allowed_now(&request);
        let Request::VmAdd(device) = request else {
            return;
        };
        let added = allowed.and_then(|()| self.add(device, Some(Arc::clone(&images))));
        // What a machine has not taken, as where the VM is off by now.
        self.close(images);
        reply.send(added);
    }

    /// Refuses the disks whose images are being opened, for this reason. Returns whether there are any.
    pub(super) fn forget_disks(&mut self, why: &str) -> bool {
        let all = mem::take(&mut self.adding);
        let any = !all.is_empty();
        for (_, reply, images) in all.into_values() {
            self.close(images);
            reply.send(Err(ApiError::wrong_state(why)));
        }
        any
    }

    /// What `vm.info` says about devices whose files are being opened.
    pub(super) fn adding_progress(&self) -> Option<InProgress> {
        let is_disk = |request: &Request| match request {
            Request::VmAdd(device) => {
                let disk = (&**device as &dyn Any).downcast_ref::<DiskConfig>();
                disk.is_some_and(DiskConfig::has_image)
            }
            _ => false,
        };
        let (request, ..) = self.adding.values().next()?;
        let (operation, waits_for) = match is_disk(request) {
            true => (Operation::AddDisk, WAITS_FOR),
            false => (
                Operation::AddDevice,
                "the file or the back end of the device",
            ),
        };
        Some(InProgress {
            operation,
            done_bytes: None,
            total_bytes: None,
            waits_for: Some(waits_for.to_owned()),
        })
    }
}
