//! Devices that are being removed: the guest was asked, and has not answered yet.
//!
//! ```text
//!   vm.remove-device ──> removing ──guest ejects──> removed
//!        │ force            │ time limit ──────────> it stays
//!        └──> removed       └ (a swap plugs the other device in, or this one again)
//! ```
//!
//! A slot with several functions is removed as a whole: removing one of them removes all. Swapping one of them brings
//! the others back, too.

use std::{
    collections::BTreeMap,
    io, mem,
    os::fd::{AsRawFd, RawFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base::Chain;
use devices::{pci::Bdf, vfio::Model};
use vmm_api::{ApiError, OnFailure, Response, Status, VmRemoveDevice, VmSwapDevice};
use vmm_config::{Device, DeviceConfig, VmConfig};
use vmm_machine::{alarms::Alarm, error::MachineError};
use vmm_sys_util::timerfd::TimerFd;

use super::{Control, Life, requests::failed};
use crate::events::EventMonitor;

/// What to plug in when a device is gone.
enum Next {
    Nothing,
    /// The same device: it was to stay, or another one in its slot is swapped.
    Same(Box<dyn Device>),
    /// A replacement.
    Other {
        old: DeviceConfig,
        new: PathBuf,
        on_failure: OnFailure,
    },
}

impl Next {
    /// The devices to try, one after the other until one works, each with the event to report.
    fn attempts(self) -> Vec<(&'static str, Box<dyn Device>)> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Same(device) => vec![("device-added", device)],
            Self::Other {
                old,
                new,
                on_failure,
            } => {
                let other = DeviceConfig {
                    path: Some(new),
                    ..old.clone()
                };
                let mut attempts: Vec<(_, Box<dyn Device>)> =
                    vec![("device-swapped", Box::new(other))];
                if on_failure == OnFailure::Restore {
                    attempts.push(("device-swap-undone", Box::new(old)));
                }
                attempts
            }
        }
    }
}

/// A device that the guest was asked to give up.
struct Removal {
    deadline: Option<Instant>,
    next: Next,
    /// The time limit has expired or the removal was cancelled, but the guest may still answer.
    overdue: bool,
    /// The guest has not answered an earlier request either.
    asked_before: bool,
}

/// The fate of a device whose removal is no longer pursued.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Fate {
    /// It is gone, or has been replaced.
    Left,
    Stays,
    /// The guest has seen the request and has not answered yet.
    Open,
}

/// All pending removals, by device name.
pub struct Removals {
    pending: BTreeMap<String, Removal>,
    timer: TimerFd,
}

impl Removals {
    /// No removals yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            pending: BTreeMap::new(),
            timer: TimerFd::new()?,
        })
    }

    /// Becomes readable when a time limit has expired.
    pub fn timer(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// State of a device for `vm.info`.
    pub fn state(&self, id: &str) -> Option<&'static str> {
        let removal = self.pending.get(id).filter(|removal| !removal.overdue)?;
        Some(match removal.next {
            Next::Nothing => "removing",
            Next::Same(_) | Next::Other { .. } => "swapping",
        })
    }

    fn insert(&mut self, id: &str, limit: Option<Duration>, next: Next) {
        // A limit too large to represent means no limit.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let removal = Removal {
            deadline,
            next,
            overdue: false,
            asked_before: self.pending.contains_key(id),
        };
        self.pending.insert(id.to_owned(), removal);
        self.arm();
    }

    /// Stops pursuing a removal. If the guest gives the device up after all, it gets the device back. A guest that has
    /// not read the request will not give it up.
    fn keep(&mut self, id: &str, device: Box<dyn Device>, was_unread: bool) {
        let Some(removal) = self.pending.get_mut(id) else {
            return;
        };
        if was_unread && !removal.asked_before {
            self.pending.remove(id);
        } else {
            removal.deadline = None;
            removal.overdue = true;
            removal.next = Next::Same(device);
        }
        self.arm();
    }

    /// Behaves as if a machine's guest had been asked for a device.
    #[cfg(test)]
    pub(super) fn ask_for(&mut self, id: &str) {
        self.insert(id, None, Next::Nothing);
    }

    /// Handles a device that is gone without the guest's answer; returns whether that ends a swap that is still wanted.
    fn torn_out(&mut self, id: &str) -> bool {
        let removal = self.pending.remove(id);
        removal
            .is_some_and(|removal| !removal.overdue && matches!(removal.next, Next::Other { .. }))
    }

    fn is_swapping(&self, id: &str) -> bool {
        self.state(id) == Some("swapping")
    }

    /// Sets the timer to the next deadline.
    fn arm(&mut self) {
        let next = self.pending.values().filter_map(|removal| removal.deadline);
        let armed = match next.min() {
            // A timer value of zero would disarm it.
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                self.timer.reset(left.max(Duration::from_millis(1)), None)
            }
            None => self.timer.clear(),
        };
        if let Err(error) = armed {
            log::error!("time limits of removals do not work: {error}");
        }
    }

    /// Finishes all removals, because the machine is gone: devices that were to be removed are not part of the next
    /// one. A pending swap is abandoned.
    pub fn finish(&mut self, config: &mut VmConfig, monitor: &mut EventMonitor) {
        for (id, removal) in std::mem::take(&mut self.pending) {
            match removal.next {
                // It was to stay.
                _ if removal.overdue => {}
                Next::Same(_) => {}
                Next::Other { .. } => {
                    let why = "the VM was switched off before the guest gave the device up";
                    log::warn!("device {id:?} is not swapped: {why}");
                    monitor.emit("vm", "device-swap-failed", &[("id", &id), ("reason", why)]);
                }
                Next::Nothing => {
                    if config.take_device(&id) {
                        config.forget(&id);
                        log::info!("device {id:?} has been removed with the machine");
                        monitor.emit("vm", "device-removed", &[("id", &id)]);
                    }
                }
            }
        }
        self.arm();
    }

    fn take_overdue(&mut self) -> Vec<String> {
        // Clears the timer; it is armed again below.
        let _ = self.timer.wait();
        let now = Instant::now();
        let over = |removal: &Removal| removal.deadline.is_some_and(|deadline| deadline <= now);
        let ids: Vec<_> = self
            .pending
            .iter()
            .filter(|(_, removal)| over(removal))
            .map(|(id, _)| id.clone())
            .collect();
        for id in &ids {
            if let Some(removal) = self.pending.get_mut(id) {
                removal.deadline = None;
                removal.overdue = true;
                // The old device was to stay, so a guest that gives it up after all gets it back.
                removal.next = match mem::replace(&mut removal.next, Next::Nothing) {
                    Next::Other { old, .. } => Next::Same(Box::new(old)),
                    other => other,
                };
            }
        }
        self.arm();
        ids
    }
}

impl Control {
    pub(super) fn remove(&mut self, request: &VmRemoveDevice) -> Result<Response, ApiError> {
        let id = &request.id;
        match &mut self.life {
            Life::None => Err(ApiError::not_created()),
            _ if request.cancel => self.cancel_removal(id),
            Life::Created(vm) | Life::Shutdown(vm) => {
                if vm.take_device(id) {
                    vm.forget(id);
                    Ok(Response::Empty)
                } else {
                    Err(failed(&MachineError::NoDevice(id.clone())))
                }
            }
            Life::Live { machine, .. } => {
                if !request.force && self.removals.is_swapping(id) {
                    let message = format!("{id:?} is being swapped: wait for that, or use force");
                    return Err(ApiError::message(Status::BadRequest, message));
                }
                if request.force {
                    self.tear_out(id)?;
                } else {
                    let leaving = machine.remove_device(id).map_err(|e| failed(&e))?;
                    let limit = request.timeout.map(Duration::from_secs);
                    for id in &leaving {
                        self.removals.insert(id, limit, Next::Nothing);
                        self.monitor.emit("vm", "device-removing", &[("id", id)]);
                    }
                }
                Ok(Response::Empty)
            }
        }
    }

    /// Removes a device, and everything in its slot, without asking the guest.
    fn tear_out(&mut self, id: &str) -> Result<(), ApiError> {
        // Clients of the guest access its memory, which may include a device's.
        self.give_up_server();
        if let Life::Live {
            machine, config, ..
        } = &mut self.life
        {
            for id in machine.tear_out(id).map_err(|e| failed(&e))? {
                config.take_device(&id);
                config.forget(&id);
                let was_swap = self.removals.torn_out(&id);
                self.migrations.decide(&id, Fate::Left);
                log::info!("device {id:?} has been removed without the guest");
                self.monitor.emit("vm", "device-removed", &[("id", &id)]);
                if was_swap {
                    let why = "its slot was taken from the guest meanwhile";
                    let properties = [("id", id.as_str()), ("reason", why)];
                    self.monitor.emit("vm", "device-swap-failed", &properties);
                }
            }
            self.removals.arm();
        }
        Ok(())
    }

    /// Cancels a removal or a swap; a guest that gives the device up anyway gets it back.
    fn cancel_removal(&mut self, id: &str) -> Result<Response, ApiError> {
        if self.removals.state(id).is_none() {
            let message = format!("{id:?} is not on its way out: there is nothing to cancel");
            return Err(ApiError::message(Status::BadRequest, message));
        }
        for id in self.withdraw(id)? {
            log::info!("device {id:?} stays: its removal was cancelled");
            self.monitor
                .emit("vm", "device-removal-cancelled", &[("id", &id)]);
        }
        Ok(Response::Empty)
    }

    /// Withdraws the request for a device; returns the names of all devices in its slot, which stay with it.
    fn withdraw(&mut self, id: &str) -> Result<Vec<String>, ApiError> {
        let not_live = self.not_live();
        let Life::Live {
            machine, config, ..
        } = &mut self.life
        else {
            return Err(not_live);
        };
        let (stay, was_unread) = machine.keep_device(id).map_err(|e| failed(&e))?;
        for (_, device) in config.all_devices() {
            if let Some(id) = &device.common().id
                && stay.contains(id)
            {
                self.removals.keep(id, device.boxed(), was_unread);
            }
        }
        Ok(stay)
    }

    /// Keeps a device, even if the guest was asked for it.
    pub(super) fn keep(&mut self, id: &str) -> Fate {
        if self.fate(id) == Fate::Open
            && let Err(error) = self.withdraw(id)
        {
            log::warn!("the guest is still asked for {id:?}: {error}");
        }
        self.fate(id)
    }

    /// The fate of a device that was to be removed, as far as it is known.
    pub(super) fn fate(&self, id: &str) -> Fate {
        let config = self.life.config();
        if config.is_none_or(|config| !config.has_device(id)) {
            return Fate::Left;
        }
        match self.removals.pending.contains_key(id) {
            true => Fate::Open,
            false => Fate::Stays,
        }
    }

    /// Refuses to remove an accelerator before the devices that it tracks, also as part of its slot.
    pub(super) fn refuse_if_tracking(&self, id: &str) -> Result<(), ApiError> {
        let leaving = match &self.life {
            Life::Live { machine, .. } => {
                let devices = machine.devices();
                let slot = devices.get(id).map(|device| device.bdf.slot());
                slot.map_or_else(Vec::new, |slot| devices.ids_in(slot))
            }
            _ => vec![id.to_owned()],
        };
        let config = self.life.config();
        let Some((accel, device)) = config.and_then(|config| config.tracker_among(&leaving)) else {
            return Ok(());
        };
        let message = format!("{accel:?} tracks physical device {device:?}: remove that first");
        Err(ApiError::message(Status::BadRequest, message))
    }

    /// Refuses to add a device that needs one that is being removed.
    pub(super) fn refuse_if_leaving(&self, needed: Option<&str>) -> Result<(), ApiError> {
        match needed.filter(|id| self.removals.state(id).is_some()) {
            None => Ok(()),
            Some(id) => {
                let message = format!(
                    "tracked: {id:?} is on its way out: cancel that (vm.remove-device with cancel), or \
                     add another one first"
                );
                Err(ApiError::message(Status::BadRequest, message))
            }
        }
    }

    /// Handles that the guest refuses to give up a slot.
    pub(super) fn refused(&mut self, slot: Bdf, status: u32) {
        let Life::Live { machine, .. } = &mut self.life else {
            return;
        };
        // A guest that was not asked has nothing to refuse.
        for id in machine.devices().ids_in(slot) {
            let Some(removal) = self.removals.pending.remove(&id) else {
                continue;
            };
            self.removals.arm();
            self.migrations.decide(&id, Fate::Stays);
            log::warn!("the guest will not give up device {id:?} (_OST status {status:#x})");
            // The failure has already been reported.
            if removal.overdue {
                continue;
            }
            let status = format!("{status:#x}");
            let properties = [("id", id.as_str()), ("status", status.as_str())];
            self.monitor
                .emit("vm", "device-removal-refused", &properties);
        }
    }

    /// Removes all physical devices from the guest, which is notified when it continues.
    pub(super) fn detach_physical(&mut self) -> Result<(), ApiError> {
        let Life::Live { config, .. } = &self.life else {
            return Err(self.not_live());
        };
        let devices = config.devices.iter().flatten();
        let ids: Vec<_> = devices
            .filter_map(|device| device.common.id.clone())
            .collect();
        for id in ids {
            // It may already be gone, together with others in its slot.
            let machine = self.life.machine_mut();
            if machine.is_some_and(|machine| machine.devices().get(&id).is_some()) {
                self.tear_out(&id)?;
            }
        }
        Ok(())
    }

    pub(super) fn swap(&mut self, request: &VmSwapDevice) -> Result<Response, ApiError> {
        let id = &request.id;
        let not_live = self.not_live();
        let Life::Live {
            machine, config, ..
        } = &mut self.life
        else {
            return Err(not_live);
        };
        if self.removals.state(id).is_some() {
            let message = format!("{id:?} is on its way out already");
            return Err(ApiError::message(Status::BadRequest, message));
        }
        let configured = |id: &str| {
            let mut devices = config.devices.iter().flatten();
            devices.find(|device| device.common.id.as_deref() == Some(id))
        };
        let Some(old) = configured(id) else {
            return Err(failed(&MachineError::NoDevice(id.clone())));
        };
        let refused = |why: &str| {
            let path = request.path.display();
            let message = format!("path: {path} {why}: {id:?} stays where it is");
            ApiError::message(Status::BadRequest, message)
        };
        if old.files.is_some() {
            // Their process would have to open those of the other one.
            return Err(refused(
                "cannot replace a device that was given by descriptors (remove it, and add the other one)",
            ));
        }
        let Ok(new) = Model::of(&request.path) else {
            return Err(refused("is no PCI device and no mediated device"));
        };
        // A driver that finds another model in its slot fails in unpredictable ways.
        let old_path = old.path.as_deref().unwrap_or(Path::new(""));
        if let Some(difference) = Model::of(old_path)
            .ok()
            .and_then(|old| old.difference(&new))
        {
            return Err(refused(&format!("is not of the same model, {difference}")));
        }
        let slot = machine.devices().removable(id).map_err(|e| failed(&e))?;
        let mut leaving = vec![(
            id.clone(),
            Next::Other {
                old: old.clone(),
                new: request.path.clone(),
                on_failure: request.on_failure,
            },
        )];
        let others = machine.devices().ids_in(slot);
        for other in others.into_iter().filter(|other| other != id) {
            let Some(device) = configured(&other) else {
                let message = format!(
                    "{id:?} cannot be swapped: {other:?} would leave with it, because they share a \
                     slot, and only devices of the host come back; remove both, and add what is to \
                     be there"
                );
                return Err(ApiError::message(Status::BadRequest, message));
            };
            leaving.push((other, Next::Same(Box::new(device.clone()))));
        }
        machine.remove_device(id).map_err(|e| failed(&e))?;
        let limit = Duration::from_secs(request.timeout);
        for (id, next) in leaving {
            self.monitor.emit("vm", "device-swapping", &[("id", &id)]);
            self.removals.insert(&id, Some(limit), next);
        }
        Ok(Response::Empty)
    }

    /// Handles expired time limits: the device stays, and the guest may still give it up later.
    pub(super) fn removals_overdue(&mut self) {
        for id in self.removals.take_overdue() {
            log::warn!("the guest has not given up device {id:?} in time; it stays");
            self.monitor
                .emit("vm", "device-removal-timed-out", &[("id", &id)]);
        }
    }

    /// Handles alarms of physical devices.
    pub(super) fn alarms(&mut self) {
        for alarm in self.sender.alarms().take() {
            match alarm {
                Alarm::Wanted(id) => self.wanted_back(&id),
                Alarm::Failed(id) => self.failed(&id),
                Alarm::Fault { id, count, text } => {
                    log::error!(
                        "device {id:?} was kept from memory that the guest does not have, or has \
                         not mapped for it (fault {count}): {text}"
                    );
                    let properties = [("id", id.as_str()), ("reason", text.as_str())];
                    self.monitor.emit("vm", "device-dma-fault", &properties);
                }
            }
        }
    }

    /// Handles a device with an uncorrectable error, which the host may reset at any time: it is removed from the
    /// guest, whose driver is not told about the reset.
    fn failed(&mut self, id: &str) {
        log::error!("device {id:?} has an error that cannot be corrected (AER): it is taken away");
        self.monitor.emit("vm", "device-failed", &[("id", id)]);
        if let Err(error) = self.tear_out(id) {
            log::error!("device {id:?} cannot be taken away: {error}");
        }
    }

    /// Handles that the host wants a device back, which it repeats every ten seconds: the guest is asked for the
    /// device, and loses it if it has not answered by the next time.
    fn wanted_back(&mut self, id: &str) {
        let Some(machine) = self.life.machine_mut() else {
            return;
        };
        let given = if self.removals.state(id).is_some() {
            self.tear_out(id)
        } else {
            log::warn!("the host wants device {id:?} back: the guest is asked for it");
            machine
                .remove_device(id)
                .map_err(|e| failed(&e))
                .map(|leaving| {
                    for id in &leaving {
                        self.removals.insert(id, None, Next::Nothing);
                        self.monitor.emit("vm", "device-removing", &[("id", id)]);
                    }
                })
        };
        if let Err(error) = given {
            log::error!("device {id:?} cannot be given back: {error}");
        }
    }

    /// Handles that the guest has given up what is in a slot.
    pub(super) fn ejected(&mut self, slot: Bdf) {
        let Life::Live {
            config, machine, ..
        } = &mut self.life
        else {
            return;
        };
        let gone = match machine.ejected(slot) {
            Ok(gone) => gone,
            Err(error) => {
                let why = Chain(&error).to_string();
                return log::error!("an ejected device stays: {why}");
            }
        };
        if gone.is_empty() {
            // A device that was plugged into the slot after the guest was told to release another one may be wanted
            // back, too: the guest has not heard of that.
            let mut waiting = machine.devices().ids_in(slot);
            waiting.retain(|id| self.removals.state(id).is_some());
            let asked = waiting.first().map(|id| machine.remove_device(id));
            match asked {
                Some(Ok(_)) => {}
                Some(Err(error)) => log::error!("the guest is not asked for {slot}: {error}"),
                None => log::debug!("the guest ejects an empty PCI slot {slot}"),
            }
        }
        let left = gone.clone();
        let mut coming = Vec::new();
        for id in gone {
            config.take_device(&id);
            log::info!("device {id:?} has been removed");
            self.monitor.emit("vm", "device-removed", &[("id", &id)]);
            let next = self.removals.pending.remove(&id);
            let attempts = next.map_or_else(Vec::new, |removal| removal.next.attempts());
            if !attempts.is_empty() {
                coming.push((id, attempts));
            }
        }
        self.removals.arm();
        let is_swap = !coming.is_empty();
        // Function 0 last: when it arrives, the guest looks for the others.
        for (id, attempts) in coming {
            self.plug_one_of(&id, slot, attempts);
        }
        for id in left {
            if let Life::Live { config, .. } = &mut self.life
                && !config.has_device(&id)
            {
                config.forget(&id);
            }
            self.migrations.decide(&id, Fate::Left);
        }
        if is_swap {
            self.check_visible(slot);
        }
    }

    /// Plugs the first available one of several devices into a slot.
    fn plug_one_of(&mut self, id: &str, slot: Bdf, attempts: Vec<(&'static str, Box<dyn Device>)>) {
        let Life::Live {
            config, machine, ..
        } = &mut self.life
        else {
            return;
        };
        for (event, mut device) in attempts {
            // A root port has only one slot.
            let is_behind_port = device.placement().parent.is_some();
            device.common_mut().pci_device_id = (!is_behind_port).then_some(slot.device);
            match machine.add_device(&mut *device) {
                Ok(_) => {
                    config.put_device(device);
                    log::info!("device {id:?}: {event}");
                    self.monitor.emit("vm", event, &[("id", id)]);
                    return;
                }
                Err(error) => {
                    let why = Chain(&error).to_string();
                    log::error!("device {id:?} cannot be plugged in: {why}");
                    let properties = [("id", id), ("reason", why.as_str())];
                    self.monitor.emit("vm", "device-swap-failed", &properties);
                }
            }
        }
    }

    /// Reports if a guest cannot find what is in a slot.
    fn check_visible(&mut self, slot: Bdf) {
        let Some(machine) = self.life.machine_mut() else {
            return;
        };
        let devices = machine.devices();
        let ids = devices.ids_in(slot);
        let last = ids.last().and_then(|id| devices.get(id));
        if last.is_some_and(|last| last.bdf != slot) {
            log::warn!(
                "the guest does not see {ids:?} before there is a device at {slot}: add one"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swap() -> Next {
        Next::Other {
            old: DeviceConfig::default(),
            new: "/sys/bus/pci/devices/0000:01:00.0".into(),
            on_failure: OnFailure::Restore,
        }
    }

    #[test]
    fn a_swap_ends_when_its_device_is_torn_out_and_nothing_else_does() {
        let mut removals = Removals::new().unwrap();
        removals.insert("gpu", None, swap());
        assert!(removals.torn_out("gpu"));
        assert!(!removals.torn_out("gpu"), "it has ended once");
        removals.insert("gpu", None, Next::Nothing);
        assert!(!removals.torn_out("gpu"));
        // The failure of this one has already been reported.
        removals.insert("gpu", None, swap());
        removals.pending.get_mut("gpu").unwrap().overdue = true;
        assert!(!removals.torn_out("gpu"));
        assert!(removals.pending.is_empty());
    }

    #[test]
    fn a_device_of_any_kind_that_was_to_stay_is_plugged_in_again() {
        let mut removals = Removals::new().unwrap();
        let accel = vmm_config::AccelConfig::default();
        removals.insert("a", Some(Duration::ZERO), Next::Nothing);
        assert_eq!(removals.take_overdue(), ["a"]);
        removals.keep("a", Box::new(accel.clone()), false);
        assert_eq!(removals.state("a"), None, "nobody waits for it");
        let next = removals.pending.remove("a").unwrap().next;
        let [("device-added", device)] = &next.attempts()[..] else {
            panic!("it is lost");
        };
        assert!(device.equals(&accel));
        // A device that no guest was asked for is not being removed.
        removals.keep("b", Box::new(accel), false);
        assert!(removals.pending.is_empty());
    }

    #[test]
    fn a_guest_that_has_not_read_of_a_removal_does_not_answer_it() {
        let mut removals = Removals::new().unwrap();
        let keep = |removals: &mut Removals, was_unread| {
            let device = Box::new(DeviceConfig::default());
            removals.keep("gpu", device, was_unread);
            !removals.pending.is_empty()
        };
        removals.insert("gpu", None, Next::Nothing);
        assert!(keep(&mut removals, false));
        // The guest may still answer the earlier request.
        removals.insert("gpu", None, Next::Nothing);
        assert!(keep(&mut removals, true));
        removals.pending.clear();
        removals.insert("gpu", None, Next::Nothing);
        assert!(!keep(&mut removals, true));
    }

    #[test]
    fn any_time_limit_can_be_asked_for() {
        for limit in [0, u64::from(u32::MAX), i64::MAX as u64, u64::MAX] {
            let mut removals = Removals::new().unwrap();
            removals.insert("gpu", Some(Duration::from_secs(limit)), Next::Nothing);
            assert_eq!(removals.state("gpu"), Some("removing"), "{limit}");
            let ends = limit <= u64::from(u32::MAX);
            assert_eq!(removals.timer.is_armed().unwrap(), ends, "{limit}");
        }
    }
}
