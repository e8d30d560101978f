//! Devices that leave a VM before it is migrated, and that it gets back if it stays: accelerators (`accel=Detach`), and
//! physical devices (`passthrough=Remote`, `Park` or `Detach`).
//!
//! ```text
//!   a question   would the destination take the VM without it?        nothing has changed
//!   Seats        applications go from the devices to the host's pool  they come back
//!                (Remote), or wait in the guest's memory (Park)
//!   Detach       the guest gives up what leaves, as by                it gets all of it back
//!                vm.remove-device
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use devices::accel::moving::{Address, Seat};
use vmm_api::{
    AccelMigration, ApiError, PassthroughMigration, SendMigration, Status, VmRemoveDevice,
};
use vmm_config::{AccelConfig, Device, DeviceConfig, HasCommonConfig, VmConfig};
use vmm_machine::{Machine, kinds::Handle};
use vmm_memory::data::Pagemap;
use vmm_migration::{
    Error, Result,
    connection::Connection,
    offer::Offer,
    progress::{Phase, Progress},
    source::{Outcome, Source, Wishes},
};

use super::{
    super::{Control, accel, life::Life, removals::Fate},
    Job, Leaving, OVER,
    plan::Plan,
    returns::{Return, Seats},
};

/// Time limit for the guest.
const PATIENCE: Duration = Duration::from_secs(30);

/// Polling interval for whether the devices are gone.
const LOOK: Duration = Duration::from_millis(50);

/// Progress of the removal.
enum Gone {
    All,
    Some,
    /// The guest keeps the device with this name.
    Not(String),
}

/// The devices that leave.
#[derive(Clone, Default)]
pub(in super::super) struct Leaves {
    physical: Vec<DeviceConfig>,
    accels: Vec<AccelConfig>,
    seats: Vec<Seats>,
    /// The NUMA nodes, by index, that had one of them as initiator.
    initiators: Vec<(usize, String)>,
    /// Names of devices that were already being removed before: they do not come back.
    unwanted: BTreeSet<String>,
}

fn name(device: &impl HasCommonConfig) -> String {
    device.common().id.clone().unwrap_or_default()
}

/// Checks whether the requested options can be combined.
pub(super) fn check(request: &SendMigration) -> std::result::Result<(), ApiError> {
    let bad = |message: &str| Err(ApiError::message(Status::BadRequest, message));
    match (request.passthrough, request.accel) {
        (PassthroughMigration::Remote | PassthroughMigration::Park, AccelMigration::Detach) => bad(
            "passthrough=Remote and Park need the accelerators that accel=Detach takes away: leave \
             accel out",
        ),
        _ => Ok(()),
    }
}

/// Removes physical devices from a configuration, and accelerators if they are to be detached, with all that refers to
/// them.
fn take_devices(config: &mut VmConfig, accel: AccelMigration) -> Leaves {
    let accels = match accel {
        AccelMigration::Detach => config.accels.take().unwrap_or_default(),
        AccelMigration::Refuse | AccelMigration::Move => Vec::new(),
    };
    let physical = config.devices.take().unwrap_or_default();
    let commons = physical.iter().map(|device| &device.common);
    let mut initiators = Vec::new();
    for common in commons.chain(accels.iter().map(|accel| &accel.common)) {
        if let Some(id) = &common.id {
            let nodes = config.numa.iter().flatten().enumerate();
            let has = nodes.filter(|(_, node)| node.device_id.as_ref() == Some(id));
            initiators.extend(has.map(|(index, _)| (index, id.clone())));
            config.forget(id);
        }
    }
    Leaves {
        physical,
        accels,
        initiators,
        ..Leaves::default()
    }
}

impl Leaves {
    /// Removes the devices that are to leave from the configuration of a VM that is to be migrated; appends the reasons
    /// why something cannot leave.
    pub(super) fn take_from(
        config: &mut VmConfig,
        machine: &Machine,
        request: &SendMigration,
        reasons: &mut Vec<String>,
    ) -> Self {
        let mut leaves = take_devices(config, request.accel);
        let physical = &leaves.physical;
        for device in physical {
            reasons.extend(obstacle(device, request.passthrough));
        }
        leaves.seats = match request.passthrough {
            PassthroughMigration::Remote => seats(physical, machine, Seat::Away, reasons),
            PassthroughMigration::Park => {
                let parked = |devices| Seat::Parked(Some(devices));
                seats(physical, machine, parked, reasons)
            }
            PassthroughMigration::Refuse | PassthroughMigration::Detach => Vec::new(),
        };
        leaves
    }

    pub(super) fn is_empty(&self) -> bool {
        self.physical.is_empty() && self.accels.is_empty()
    }

    /// All of them, each device before the one that it refers to.
    fn devices(&self) -> Vec<Box<dyn Device>> {
        let physical = self
            .physical
            .iter()
            .map(|device| Box::new(device.clone()) as _);
        let accels = self.accels.iter().map(|accel| Box::new(accel.clone()) as _);
        physical.chain(accels).collect()
    }

    /// The physical devices, each tracked by its accelerator if the VM has that.
    fn physical_in(&self, vm: &VmConfig) -> Vec<DeviceConfig> {
        let mut devices = self.physical.clone();
        for device in &mut devices {
            device.tracked.take_if(|accel| !vm.has_device(accel));
        }
        devices
    }

    /// Restores the tracking of devices that have stayed meanwhile by accelerators that have come back.
    fn track_again(&self, vm: &mut VmConfig) {
        for known in self.physical_in(vm) {
            let mut devices = vm.devices.iter_mut().flatten();
            let stayed = devices.find(|device| device.common.id == known.common.id);
            if let Some(stayed) = stayed
                && known.tracked.is_some()
            {
                stayed.tracked = known.tracked;
            }
        }
    }

    /// Makes devices that are back, or have stayed, initiators of their NUMA nodes again.
    fn initiate_again(&self, vm: &mut VmConfig) {
        for (index, id) in &self.initiators {
            let is_there = vm.has_device(id);
            let nodes = vm.numa.as_deref_mut().unwrap_or_default();
            if is_there && let Some(node) = nodes.get_mut(*index) {
                node.device_id.get_or_insert_with(|| id.clone());
            }
        }
    }
}

/// Why a device cannot leave, if so.
fn obstacle(device: &DeviceConfig, wish: PassthroughMigration) -> Option<String> {
    let id = name(device);
    match (wish, &device.tracked) {
        (PassthroughMigration::Refuse, None) => Some(format!(
            "physical device {id:?} cannot move: remove it first (vm.remove-device), or have the guest \
             give it up for the move (passthrough=Detach)"
        )),
        (PassthroughMigration::Refuse, Some(accel)) => Some(format!(
            "physical device {id:?} cannot move: have its applications go on by {accel:?} meanwhile \
             (passthrough=Remote) or wait for a device there (passthrough=Park), or remove it first \
             (vm.remove-device)"
        )),
        (PassthroughMigration::Remote | PassthroughMigration::Park, None) => Some(format!(
            "no accelerator tracks physical device {id:?} (tracked=ACCEL), so that its applications \
             would lose it: remove it first (vm.remove-device), or use passthrough=Detach"
        )),
        (PassthroughMigration::Remote | PassthroughMigration::Park, Some(_))
        | (PassthroughMigration::Detach, _) => None,
    }
}

/// The applications of each accelerator that tracks some of these devices; `away` is where they are served until the
/// devices are back.
fn seats(
    physical: &[DeviceConfig],
    machine: &Machine,
    away: impl Fn(Address) -> Seat,
    reasons: &mut Vec<String>,
) -> Vec<Seats> {
    let mut trackers: Vec<_> = physical
        .iter()
        .filter_map(|it| it.tracked.clone())
        .collect();
    trackers.sort();
    trackers.dedup();
    let mut all = Vec::new();
    for id in trackers {
        let tracked = physical
            .iter()
            .filter(|it| it.tracked.as_ref() == Some(&id));
        let devices: Vec<_> = tracked.map(name).collect();
        let plugged = machine.devices();
        let Some(Handle::Accel(port)) = plugged.get(&id).map(|plugged| &plugged.handle) else {
            reasons.push(format!(
                "accelerator {id:?}, which tracks {devices:?}, is not plugged in: add it (vm.add-accel)"
            ));
            continue;
        };
        let places = devices.iter().filter_map(|device| plugged.get(device));
        let places: Vec<_> = places.map(|device| device.bdf.to_string()).collect();
        match Address::new(places.join(",")) {
            Ok(address) => all.push(Seats {
                id,
                port: port.clone(),
                devices,
                away: away(address),
            }),
            Err(_) => reasons.push(format!(
                "{id:?} tracks more devices than a guest can be told of at once: {devices:?}"
            )),
        }
    }
    all
}

impl Leaving {
    /// Migrates the machine, without the devices that leave first.
    pub(super) fn go(&mut self, plan: Plan, progress: &Progress) -> Outcome {
        let Plan {
            offer,
            wishes,
            mut pagemap,
            leaves,
        } = plan;
        if !leaves.is_empty() {
            // If the destination would refuse the VM, finding that out must not affect the guest.
            let question = Offer {
                dry_run: true,
                ..offer.clone()
            };
            match self.talk(question, wishes.clone(), None, progress) {
                Outcome::Acceptable => {}
                other => return other,
            }
            if let Err(error) = self.take_away(&leaves, progress) {
                return Outcome::Stayed(error);
            }
        }
        self.talk(offer, wishes, pagemap.take(), progress)
    }

    fn talk(
        &mut self,
        offer: Offer,
        wishes: Wishes,
        pagemap: Option<Pagemap>,
        progress: &Progress,
    ) -> Outcome {
        let (url, tls) = &wishes.to;
        match Connection::connect(url, tls.as_ref(), progress) {
            Ok(connection) => {
                let shown = progress.clone();
                Source::new(connection, self, offer, wishes, shown, pagemap).run()
            }
            Err(error) => Outcome::Stayed(error),
        }
    }

    /// Makes the guest give up the devices that leave, and waits until it has.
    fn take_away(&self, leaves: &Leaves, progress: &Progress) -> Result<()> {
        let (number, noted) = (self.number, leaves.clone());
        let over = || Error::Machine(OVER.to_owned());
        let work = move |control: &mut Control| control.note_leaves(number, noted);
        let noted = self.control.ask(work).ok_or_else(over)?;
        noted.map_err(Error::Machine)?;
        for seats in &leaves.seats {
            progress.update(|info| info.phase = Phase::Seats);
            self.leave_seats(seats, progress)?;
        }
        progress.update(|info| info.phase = Phase::Detach);
        let work = move |control: &mut Control| control.ask_for_leaves(number);
        let asked = self.control.ask(work).ok_or_else(over)?;
        asked.map_err(Error::Machine)?;
        // The control thread has a timeout of its own; this covers the case that it does not respond.
        let deadline = Instant::now() + PATIENCE + Duration::from_secs(5);
        loop {
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            match self.control.ask(|control| control.have_leaves_gone()) {
                None => return Err(over()),
                Some(Gone::All) => return Ok(()),
                Some(Gone::Some) if Instant::now() < deadline => thread::sleep(LOOK),
                Some(Gone::Some) => {
                    return Err(Error::Stays(vec!["devices have not left".to_owned()]));
                }
                Some(Gone::Not(id)) => {
                    return Err(Error::Stays(vec![format!(
                        "the guest does not give {id:?} up: see what uses it there, or take it away \
                         without asking (vm.remove-device with force)"
                    )]));
                }
            }
        }
    }

    /// Makes applications leave the guest's own devices, for the host's pool or to be suspended, and waits until the
    /// devices are unused.
    fn leave_seats(&self, seats: &Seats, progress: &Progress) -> Result<()> {
        let answer = seats
            .port
            .ask_seats(&seats.away, accel::SEATED, &self.cancel);
        if progress.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let id = seats.id.clone();
        match accel::applications_served(&seats.away, answer) {
            Ok(count) => {
                let away = seats.away.clone();
                self.control
                    .ask(move |control| control.tell_accel_moved(&id, count, &away));
                Ok(())
            }
            Err(why) => Err(Error::Stays(vec![format!("{id:?}: {why}")])),
        }
    }
}

impl Control {
    /// Records what leaves. From here on, ending the migration brings these devices back, except those that the user
    /// removes.
    fn note_leaves(&mut self, of: u64, mut all: Leaves) -> std::result::Result<(), String> {
        let devices = all.devices();
        let names = devices
            .iter()
            .filter_map(|device| device.common().id.clone());
        all.unwanted = names
            .filter(|id| self.fate(id) == Fate::Left || self.removals.state(id).is_some())
            .collect();
        match &mut self.migrations.job {
            Job::Outgoing { number, leaves, .. } if *number == of => {
                for seats in &all.seats {
                    self.migrations.returns.retain(|it| !it.is_by(&seats.id));
                }
                *leaves = all;
                Ok(())
            }
            _ => Err(OVER.to_owned()),
        }
    }

    /// The names of the devices that leave in the current migration, and whether the guest had already been asked for
    /// them before.
    fn leaving_names(&self) -> Vec<(String, bool)> {
        let Job::Outgoing { leaves, .. } = &self.migrations.job else {
            return Vec::new();
        };
        let devices = leaves.devices().into_iter();
        let names = devices.filter_map(|device| device.common().id.clone());
        names
            .map(|id| (id.clone(), leaves.unwanted.contains(&id)))
            .collect()
    }

    /// Asks the guest for the devices that leave.
    fn ask_for_leaves(&mut self, of: u64) -> std::result::Result<(), String> {
        if !self.migrations.is_current(of) {
            return Err(OVER.to_owned());
        }
        let names = self.leaving_names().into_iter();
        for (id, _) in names.filter(|(_, was_asked)| !was_asked) {
            let request = VmRemoveDevice {
                id,
                timeout: Some(PATIENCE.as_secs()),
                ..Default::default()
            };
            // A device that shares the slot of another one is already being removed.
            if self.removals.state(&request.id).is_none() {
                self.remove(&request).map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    fn have_leaves_gone(&self) -> Gone {
        let mut gone = Gone::All;
        for (id, _) in self.leaving_names() {
            let config = self.life.config();
            if config.is_none_or(|config| !config.has_device(&id)) {
                continue;
            }
            if self.removals.state(&id).is_none() {
                return Gone::Not(id);
            }
            gone = Gone::Some;
        }
        gone
    }

    /// The VM stays: gives back the devices that were removed, and lets applications return to them once it is certain
    /// that the devices stay.
    pub(super) fn bring_back(&mut self, leaves: &Leaves) {
        if !matches!(self.life, Life::Live { .. }) {
            return;
        }
        // Accelerators first, because devices refer to them.
        for accel in leaves.accels.iter().rev() {
            self.bring_one_back(leaves, Box::new(accel.clone()));
        }
        let Life::Live { config, .. } = &mut self.life else {
            return;
        };
        leaves.track_again(config);
        let mut fates = BTreeMap::new();
        for device in leaves.physical_in(config).into_iter().rev() {
            let id = name(&device);
            fates.insert(id, self.bring_one_back(leaves, Box::new(device)));
        }
        if let Life::Live { config, .. } = &mut self.life {
            leaves.initiate_again(config);
        }
        for seats in leaves.seats.iter().cloned() {
            // An agent that starts later does nothing.
            seats.port.withdraw_seats();
            let fate = |id: &str| fates.get(id).copied().unwrap_or(Fate::Left);
            let returning = Return::new(seats, fate);
            self.migrations.returns.extend(returning.unless_due());
        }
    }

    /// Determines the fate of a device, and plugs it in again if it has left.
    fn bring_one_back(&mut self, leaves: &Leaves, device: Box<dyn Device>) -> Fate {
        let id = device.common().id.clone().unwrap_or_default();
        if leaves.unwanted.contains(&id) {
            return self.fate(&id);
        }
        let fate = self.keep(&id);
        if fate == Fate::Left
            && let Err(error) = self.add(device, None)
        {
            log::error!("the VM stays, and does not get {id:?} back: {error}");
        }
        fate
    }

    /// The guest reboots: its next machine has the devices that this one was asked for.
    pub(super) fn keep_for_next_boot(&mut self, leaves: &Leaves) {
        for accel in &leaves.accels {
            self.put_for_next_boot(leaves, Box::new(accel.clone()));
        }
        let Life::Live { config, .. } = &mut self.life else {
            return;
        };
        leaves.track_again(config);
        for device in leaves.physical_in(config) {
            self.put_for_next_boot(leaves, Box::new(device));
        }
        if let Life::Live { config, .. } = &mut self.life {
            leaves.initiate_again(config);
        }
    }

    fn put_for_next_boot(&mut self, leaves: &Leaves, device: Box<dyn Device>) {
        let id = device.common().id.clone().unwrap_or_default();
        if !leaves.unwanted.contains(&id)
            && self.keep(&id) == Fate::Left
            && let Life::Live { config, .. } = &mut self.life
        {
            config.put_device(device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::life::Life, *};
    use crate::tests::control;

    #[test]
    fn a_device_that_left_for_a_move_that_failed_comes_back() {
        use vmm_config::{Configured, DiskConfig};

        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!("path={},id=left", file.path().display());
        let mut control = control();
        let config = serde_json::json!({"payload": {"kernel": "/k"}});
        control.life = Life::Created(serde_json::from_value(config).unwrap());
        let device = Box::new(DiskConfig::parse(&text).unwrap());
        let fate = control.bring_one_back(&Leaves::default(), device);
        assert!(matches!(fate, Fate::Left));
        assert!(control.life.config().unwrap().has_device("left"));
    }

    #[test]
    fn nothing_refers_to_devices_that_leave() {
        use vmm_config::{Configured, NumaConfig};

        let node = "guest_numa_id=0,device_id=gpu";
        let mut config = VmConfig {
            devices: Some(vec![DeviceConfig::parse("01:00.0,id=gpu").unwrap()]),
            numa: Some(vec![NumaConfig::parse(node).unwrap()]),
            ..VmConfig::default()
        };
        let before = config.clone();
        let leaves = take_devices(&mut config, AccelMigration::Detach);
        assert_eq!((leaves.physical.len(), leaves.accels.len()), (1, 0));
        assert_eq!(config.devices, None);
        let of_node = |config: &VmConfig| config.numa.clone().unwrap()[0].device_id.clone();
        assert_eq!(of_node(&config), None);
        leaves.initiate_again(&mut config);
        assert_eq!(of_node(&config), None, "it is not back");
        config.put_device(Box::new(leaves.physical[0].clone()));
        leaves.initiate_again(&mut config);
        assert_eq!(config, before);
    }

    #[test]
    fn a_device_that_cannot_leave_says_what_to_do_instead() {
        use PassthroughMigration as Wish;

        let device = |text| <DeviceConfig as vmm_config::Configured>::parse(text).unwrap();
        let plain = device("01:00.0,id=nic");
        let tracked = device("01:00.0,id=gpu,tracked=a");
        for (device, wish, advice) in [
            (&plain, Wish::Refuse, Some("passthrough=Detach")),
            (&tracked, Wish::Refuse, Some("passthrough=Remote")),
            (&tracked, Wish::Refuse, Some("passthrough=Park")),
            (&plain, Wish::Park, Some("tracked=ACCEL")),
            (&tracked, Wish::Park, None),
            (&plain, Wish::Remote, Some("tracked=ACCEL")),
            (&tracked, Wish::Remote, None),
            (&plain, Wish::Detach, None),
            (&tracked, Wish::Detach, None),
        ] {
            let said = obstacle(device, wish);
            assert_eq!(said.is_some(), advice.is_some(), "{said:?}");
            let said = said.unwrap_or_default();
            assert!(said.contains(advice.unwrap_or_default()), "{said}");
        }
    }

    #[test]
    fn wishes_that_exclude_each_other_are_refused() {
        use AccelMigration as Accel;
        use PassthroughMigration as Wish;

        let request = |passthrough, accel| SendMigration {
            passthrough,
            accel,
            ..SendMigration::to("unix:/x")
        };
        for passthrough in [Wish::Remote, Wish::Park] {
            let error = check(&request(passthrough, Accel::Detach)).unwrap_err();
            assert!(error.to_string().contains("accel=Detach"), "{error}");
            let alone = request(passthrough, Accel::Refuse);
            assert!(check(&alone).is_ok());
            assert_eq!(alone.accel(), Accel::Move);
        }
        assert_eq!(request(Wish::Detach, Accel::Refuse).accel(), Accel::Refuse);
    }

    #[test]
    fn what_an_accelerator_tracked_it_tracks_again_when_it_is_back() {
        let config = |text| {
            let device = <DeviceConfig as vmm_config::Configured>::parse(text).unwrap();
            VmConfig {
                devices: Some(vec![device]),
                accels: Some(vec![
                    <AccelConfig as vmm_config::Configured>::parse("id=a").unwrap(),
                ]),
                ..VmConfig::default()
            }
        };
        let before = config("01:00.0,id=gpu,tracked=a");
        let leaves = Leaves {
            physical: before.devices.clone().unwrap(),
            accels: before.accels.clone().unwrap(),
            ..Leaves::default()
        };
        let mut vm = before.clone();
        assert!(vm.take_device("a"));
        vm.forget("a");
        leaves.track_again(&mut vm);
        assert_eq!(vm.tracker_among(&["a".to_owned()]), None, "it is not back");
        assert_eq!(
            leaves.physical_in(&vm),
            config("01:00.0,id=gpu").devices.unwrap()
        );
        vm.put_device(Box::new(leaves.accels[0].clone()));
        leaves.track_again(&mut vm);
        assert_eq!(vm, before);
    }
}
