//! Resizing of running machines.

use devices::acpi::{CpuSlot, Notification};
use vmm_config::{HotplugMethod, VmConfig, syntax::write_size};
use vmm_memory::RegionKind;

use super::{Machine, error::MachineError, kinds::Handle, placement};

/// Granularity of memory hot-plug in bytes: Linux manages memory blocks of this size.
const MEMORY_BLOCK: u64 = 128 << 20;

/// The error for resizing a balloon that does not exist.
pub fn no_balloon() -> MachineError {
    MachineError::Invalid(
        "the machine has no balloon: configure one (balloon, --balloon)".to_owned(),
    )
}

impl Machine {
    /// Sets the number of vCPUs to `wanted`: plugs vCPUs in, or asks the guest to give up those
    /// with the highest numbers.
    pub fn resize_cpus(&mut self, wanted: u32) -> Result<(), MachineError> {
        let max = self.cpus.max();
        if !(1..=max).contains(&wanted) {
            return Err(MachineError::Invalid(format!(
                "{wanted} vCPUs are not possible: this machine can have 1 to {max} (cpus.max_vcpus, --cpus \
                 max=N, says how many when it is created)"
            )));
        }
        let removing = |slot| matches!(slot, CpuSlot::RemovalRequested | CpuSlot::RemovalSeen);
        if (0..max).any(|vcpu| self.platform.cpus.slot(vcpu).is_some_and(removing)) {
            return Err(MachineError::CpuRemovalPending);
        }
        let present: Vec<u32> = (0..max)
            .filter(|&vcpu| self.cpus.is_present(vcpu))
            .collect();
        let missing = (wanted as usize).saturating_sub(present.len());
        let missing: Vec<u32> = (0..max)
            .filter(|vcpu| !present.contains(vcpu))
            .take(missing)
            .collect();
        // Before the first one is there.
        for &vcpu in &missing {
            self.cpus.check_plug(vcpu)?;
        }
        let mut changed = false;
        let change = || {
            for vcpu in missing {
                self.cpus.plug(vcpu)?;
                self.platform.cpus.insert(vcpu)?;
                changed = true;
            }
            for &vcpu in present.iter().skip(wanted as usize) {
                self.platform.cpus.remove(vcpu)?;
                changed = true;
            }
            Ok(())
        };
        let done: Result<(), MachineError> = change();
        // Of those before one that failed, too.
        match changed {
            true => done.and(self.notify(Notification::CPU)),
            false => done,
        }
    }

    /// Removes a vCPU that the guest has given up: [`Machine::left_cpus`] says when it is gone.
    pub fn cpu_ejected(&mut self, vcpu: u32) {
        self.cpus.unplug(vcpu);
    }

    /// The vCPUs that have left since the last call, and whether others are still in an access.
    pub fn left_cpus(&mut self) -> (Vec<u32>, bool) {
        self.cpus.left()
    }

    /// Asks the guest to give up `bytes` of memory through its balloon.
    pub fn resize_balloon(
        &mut self,
        config: &mut VmConfig,
        bytes: u64,
    ) -> Result<(), MachineError> {
        let memory = config.memory.total();
        let (Some(balloon), Some(handle)) = (&mut config.balloon, self.balloon()) else {
            return Err(no_balloon());
        };
        if bytes >= memory {
            return Err(MachineError::Invalid(format!(
                "a balloon of {bytes} bytes leaves the guest nothing of its {memory} bytes of memory"
            )));
        }
        handle.set_size(bytes);
        balloon.size = bytes;
        Ok(())
    }

    fn balloon(&self) -> Option<&devices::virtio::balloon::Handle> {
        self.devices
            .iter()
            .find_map(|(_, device)| match &device.handle {
                Handle::Balloon(handle) => Some(handle),
                _ => None,
            })
    }

    /// Bytes of memory that the guest has.
    pub fn memory_size(&self) -> u64 {
        let given_up = self
            .balloon()
            .map_or(0, devices::virtio::balloon::Handle::actual);
        let plugged = |handle: &Handle| match handle {
            Handle::Memory { device, .. } => device.plugged(),
            _ => 0,
        };
        let by_devices: u64 = self
            .devices
            .iter()
            .map(|(_, device)| plugged(&device.handle))
            .sum();
        (self.ram.size() + by_devices).saturating_sub(given_up)
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> u32 {
        self.cpus.count()
    }

    /// Resizes memory to `wanted` bytes in total, by the configured method. Updates `config`.
    pub fn resize_memory(
        &mut self,
        config: &mut VmConfig,
        wanted: u64,
    ) -> Result<(), MachineError> {
        match config.memory.hotplug_method {
            HotplugMethod::Acpi => {
                if self.add_memory(config, wanted)? {
                    self.notify(Notification::MEMORY)?;
                }
                Ok(())
            }
            HotplugMethod::VirtioMem => self.resize_zone(config, placement::DEFAULT_ZONE, wanted),
        }
    }

    /// Adds memory that is described by ACPI, up to `wanted` bytes in total; returns whether any
    /// had to be added. The caller must notify a running guest.
    pub(super) fn add_memory(
        &mut self,
        config: &mut VmConfig,
        wanted: u64,
    ) -> Result<bool, MachineError> {
        let now = self.ram.size();
        if wanted == now {
            return Ok(false);
        }
        let Some(more) = wanted.checked_sub(now) else {
            return Err(MachineError::Invalid(format!(
                "memory cannot shrink from {} to {}: \
                 use memory.hotplug_method=VirtioMem or a balloon for that",
                write_size(now),
                write_size(wanted)
            )));
        };
        if !more.is_multiple_of(MEMORY_BLOCK) {
            return Err(MachineError::Invalid(format!(
                "memory grows in multiples of {}: from {} to {} it would grow by {}",
                write_size(MEMORY_BLOCK),
                write_size(now),
                write_size(wanted),
                write_size(more)
            )));
        }
        let plugged = now - placement::boot_size(config);
        let limit = config.memory.hotplug_size.unwrap_or(0);
        if plugged + more > limit {
            return Err(MachineError::Invalid(format!(
                "memory cannot grow to {}: memory.hotplug_size allows {}",
                write_size(wanted),
                write_size(placement::boot_size(config).saturating_add(limit))
            )));
        }
        let zones = placement::zones(&config.memory);
        let backing = zones
            .first()
            .map(|zone| placement::backing(&config.memory, zone))
            .unwrap_or_default();
        let base = self.map.hotplug().start + plugged;
        if self.platform.memory.slots().len() >= devices::acpi::MEMORY_SLOTS as usize {
            return Err(devices::acpi::MemoryHotplugError::NoSlot.into());
        }
        self.devices.check_regions(self.ram.regions().len() + 1)?;
        self.ram.add(
            placement::DEFAULT_ZONE,
            RegionKind::Hotplugged,
            base,
            more,
            &backing,
        )?;
        if let Err(error) = self.devices.memory_changed() {
            // The guest has not been told about it yet.
            self.ram.withdraw_last();
            // Unmap it from devices that can already access it; the first error is the one to
            // report.
            let _ = self.devices.memory_changed();
            return Err(error);
        }
        self.platform.memory.insert(base, more, 0)?;
        config.memory.hotplugged_size = Some(plugged + more);
        Ok(true)
    }

    /// Resizes a memory zone to `wanted` bytes in total, through its virtio-mem device.
    pub fn resize_zone(
        &mut self,
        config: &mut VmConfig,
        zone: &str,
        wanted: u64,
    ) -> Result<(), MachineError> {
        let zones = placement::zones(&config.memory);
        let Some(found) = zones.iter().find(|candidate| candidate.id == zone) else {
            return Err(MachineError::NoDevice(zone.to_owned()));
        };
        let limit = found.hotplug_size.unwrap_or(0);
        let Some(more) = wanted.checked_sub(found.size).filter(|more| *more <= limit) else {
            return Err(MachineError::Invalid(format!(
                "memory zone {zone:?} can have {} to {}, not {}",
                write_size(found.size),
                write_size(found.size + limit),
                write_size(wanted)
            )));
        };
        let device = self
            .devices
            .iter()
            .find_map(|(_, device)| match &device.handle {
                Handle::Memory { zone: of, device } if of == zone => Some(device),
                _ => None,
            });
        let Some(device) = device else {
            return Err(MachineError::NoDevice(zone.to_owned()));
        };
        if !more.is_multiple_of(device.block()) {
            return Err(MachineError::Invalid(format!(
                "memory zone {zone:?} grows in multiples of {} bytes: {more} bytes are none",
                device.block()
            )));
        }
        device.resize(more);
        match &mut config.memory.zones {
            Some(zones) => {
                for found in zones.iter_mut().filter(|found| found.id == zone) {
                    found.hotplugged_size = Some(more);
                }
            }
            None => config.memory.hotplugged_size = Some(more),
        }
        Ok(())
    }

    /// What changes the size of a disk, and takes as long as its storage likes.
    pub fn disk_growth(
        &self,
        id: &str,
        bytes: u64,
    ) -> Result<impl FnOnce() -> Result<(), MachineError> + Send + use<>, MachineError> {
        let device = self
            .devices
            .get(id)
            .ok_or_else(|| MachineError::NoDevice(id.to_owned()))?;
        let Handle::Disk(disk) = &device.handle else {
            return Err(MachineError::WrongKind {
                id: id.to_owned(),
                expected: "disk",
            });
        };
        let id = id.to_owned();
        let failed = move |source| MachineError::ResizeDisk { id, source };
        let grow = match disk.growth(bytes) {
            Ok(grow) => grow,
            Err(error) => return Err(failed(error)),
        };
        Ok(move || grow().map_err(failed))
    }
}
