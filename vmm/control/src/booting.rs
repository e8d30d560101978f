//! What needs images of disks that are not open: boots, resets, and disks that are plugged in. Separate threads open them,
//! because that takes as long as the storage likes. Meanwhile the control thread serves requests. Those that need a VM
//! that is being booted wait for it.

use std::{any::Any, mem, sync::Arc, time::Duration};

use base::Cancel;
use devices::thread::ThreadRole;
use vmm_api::{ApiError, InProgress, Operation, Reply, Request, Response};
use vmm_config::{Device, DiskConfig};
use vmm_machine::{devices::DeviceKind, images::Images};

use super::{
    Advance, Control, ExitReason,
    life::Life,
    migration::{Job, host_error},
    requests::{check_files, failed},
    restore::{Awaited, Begun},
};

/// What a VM that is being booted, or is given a disk, waits for.
const WAITS_FOR: &str = "images of its disks";

/// Storage that works answers by then: requests come before or after a boot, and not amid it.
const SOON: Duration = Duration::from_millis(50);

/// A VM that is being booted.
pub(super) struct Booting {
    /// Number of the boot.
    pub(super) number: u64,
    opening: Opening,
    booter: Booter,
    /// Requests that need the VM.
    waiting: Vec<(Request, Reply)>,
}

/// Images that a thread opens.
struct Opening {
    number: u64,
    images: Arc<Images>,
    are_open: Awaited<()>,
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

/// A request for a disk whose image is being opened.
pub(super) type Adding = (Request, Reply, Arc<Images>);

impl Booting {
    /// The activity, as the beginning of a sentence.
    pub(super) fn what() -> &'static str {
        "the VM is being booted, and waits for images of its disks"
    }

    /// What `vm.info` says about it.
    pub(super) fn progress() -> InProgress {
        InProgress {
            operation: Operation::Boot,
            done_bytes: None,
            total_bytes: None,
            waits_for: Some(WAITS_FOR.to_owned()),
        }
    }

    /// Keeps a request until the boot is over.
    pub(super) fn keep(&mut self, request: Request, reply: Reply) {
        self.waiting.push((request, reply));
    }
}

impl Control {
    /// Boots the VM when the images of its disks are open.
    pub(super) fn boot_later(&mut self, booter: Booter) {
        // A disk that has grown may not have been answered for.
        self.end_writing();
        match self.open_images() {
            Ok(Some(opening)) => {
                // The thread needs none of this.
                if !matches!(self.advance, Advance::Made(_)) {
                    self.advance = Advance::make();
                }
                match opening.are_open.within(SOON) {
                    Some(opened) => {
                        let booted = self.boot_with(opened, opening.images);
                        self.has_booted(booter, booted);
                    }
                    None => {
                        self.migrations.job = Job::Booting(Booting {
                            number: opening.number,
                            opening,
                            booter,
                            waiting: Vec::new(),
                        });
                    }
                }
            }
            Ok(None) => {
                let booted = self.boot(Arc::default());
                self.has_booted(booter, booted);
            }
            Err(error) => self.has_booted(booter, Err(error)),
        }
    }

    /// Starts to open the images of the VM's disks, if it has any.
    fn open_images(&mut self) -> Result<Option<Opening>, ApiError> {
        let config = self.bootable()?;
        let disks = config.disks.clone().unwrap_or_default();
        self.monitor.emit("vm", "booting", &[]);
        if !disks.iter().any(DiskConfig::is_present) {
            return Ok(None);
        }
        let begun = Begun {
            number: self.migrations.number(),
            cancel: Cancel::default(),
        };
        let images = Arc::<Images>::default();
        let opens = Arc::clone(&images);
        let are_open = self.spawn(&begun, ThreadRole::Restore, move |_| {
            opens.open(&disks, false)
        })?;
        Ok(Some(Opening {
            number: begun.number,
            images,
            are_open,
        }))
    }

    /// Handles that the images are open, or that one of them cannot be opened.
    pub(super) fn images_are_open(&mut self, booting: Booting) {
        let Booting {
            opening,
            booter,
            waiting,
            ..
        } = booting;
        let opened = opening.are_open.take();
        let booted = self.boot_with(opened, opening.images);
        self.has_booted(booter, booted);
        self.take_all(waiting);
    }

    /// Boots the VM if its images are open, and leaves those that it has not taken to a thread.
    fn boot_with(
        &mut self,
        opened: Result<(), ApiError>,
        images: Arc<Images>,
    ) -> Result<(), ApiError> {
        let booted = opened.and_then(|()| self.boot(Arc::clone(&images)));
        self.close(images);
        booted
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
                self.close(booting.opening.images);
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

    /// Carries out a request for a device. If it is a disk of a live VM, its image is opened before.
    pub(super) fn add_later(&mut self, device: Box<dyn Device>, reply: Reply) {
        let any: &dyn Any = &*device;
        let disk = match (&self.life, any.downcast_ref::<DiskConfig>()) {
            (Life::Live { machine, .. }, Some(disk)) if disk.is_present() => {
                let mut disk = disk.clone();
                let free = || machine.devices().free_id(DiskConfig::NAME);
                disk.common.id.get_or_insert_with(free);
                disk
            }
            _ => return reply.send(self.add(device, None)),
        };
        let started = self
            .check_joins(&*device)
            .and_then(|()| self.refuse_if_opening(&disk))
            .and_then(|()| self.start_to_open(disk));
        match started {
            Ok((number, images)) => {
                let request = Request::VmAdd(device);
                self.adding.insert(number, (request, reply, images));
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// Refuses a disk whose image is being opened for an earlier request: each would leave a thread behind.
    fn refuse_if_opening(&self, disk: &DiskConfig) -> Result<(), ApiError> {
        let is_same = |request: &Request| match request {
            Request::VmAdd(device) => {
                let any: &dyn Any = &**device;
                any.downcast_ref::<DiskConfig>()
                    .is_some_and(|other| other.path == disk.path)
            }
            _ => false,
        };
        match (
            &disk.path,
            self.adding.values().any(|(request, ..)| is_same(request)),
        ) {
            (Some(path), true) => Err(ApiError::wrong_state(format!(
                "{} is being opened for an earlier request, and its storage has not answered: wait for that one, or end it \
                 with vm.cancel-migration",
                path.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Starts to open the image of a disk.
    fn start_to_open(&mut self, disk: DiskConfig) -> Result<(u64, Arc<Images>), ApiError> {
        let number = self.migrations.number();
        let control = self.migrations.on_control();
        let control = control.map_err(|error| host_error("open a disk", &error))?;
        let images = Arc::<Images>::default();
        let opening = Arc::clone(&images);
        let open = move || {
            let opened = check_files(&disk).and_then(|()| {
                let opened = opening.open(std::slice::from_ref(&disk), false);
                opened.map_err(|error| failed(&error))
            });
            control.tell(move |control| control.is_open(number, opened));
        };
        self.start_thread_as(ThreadRole::Restore, "_open", Box::new(open))?;
        Ok((number, images))
    }

    /// Plugs in a disk whose image is open, unless its VM is gone. Images that nobody takes may take long to close.
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

    /// What `vm.info` says about disks whose images are being opened.
    pub(super) fn adding_progress(&self) -> Option<InProgress> {
        (!self.adding.is_empty()).then(|| InProgress {
            operation: Operation::AddDisk,
            done_bytes: None,
            total_bytes: None,
            waits_for: Some(WAITS_FOR.to_owned()),
        })
    }
}
