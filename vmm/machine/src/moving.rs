//! Machines that leave for another host or arrive from one.

use std::{
    fs::File,
    sync::Arc,
    time::{Duration, Instant},
};

use ::devices::{
    disk::Scope,
    memory::{GuestMemory, GuestRegion},
};
use hypervisor::{CpuNeeds, DirtyLog, Vm};
use vmm_config::VmConfig;
use vmm_memory::{Mapping, RegionKind};
use vmm_snapshot::{memory_file, state_file};

use super::{Machine, error::MachineError, host::Host, images::Images, save::SavedMachine};

/// A region of RAM that is migrated.
pub struct MovingRegion {
    /// Guest-physical address.
    pub guest: u64,
    /// Hot-plugged by ACPI.
    pub hotplugged: bool,
    /// The memory; the reference keeps it mapped.
    pub mapping: Arc<Mapping>,
    memory: GuestMemory,
    vm: Arc<Vm>,
    slot: hypervisor::SlotId,
}

impl MovingRegion {
    /// Starts KVM's dirty log for this region.
    pub fn watch(&self) -> hypervisor::Result<DirtyLog> {
        self.vm.watch(self.slot)
    }

    /// Runs `work` on the log of pages that devices have written; `None` if the region no longer exists.
    pub fn with_log<R>(
        &self,
        work: impl FnOnce(&::devices::write_log::WriteLog) -> R,
    ) -> Option<R> {
        use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend};
        let memory = self.memory.memory();
        let region: &GuestRegion = memory.find_region(GuestAddress(self.guest))?;
        Some(work(region.get_mmap().bitmap()))
    }
}

impl Machine {
    /// All regions of RAM.
    pub fn moving_ram(&self) -> Vec<MovingRegion> {
        let regions = self.ram.regions().iter();
        regions
            .map(|region| MovingRegion {
                guest: region.guest,
                hotplugged: region.kind == RegionKind::Hotplugged,
                mapping: Arc::clone(&region.mapping),
                memory: self.ram.memory().clone(),
                vm: Arc::clone(&self.vm),
                slot: region.slot,
            })
            .collect()
    }

    /// All reasons why the machine cannot be migrated, as texts for users; empty if it can be.
    pub fn reasons_to_stay(&self, config: &VmConfig) -> Vec<String> {
        let devices = config.all_devices().into_iter();
        let stuck = devices.filter_map(|(_, device)| Some((device.cannot_move()?, device)));
        let mut reasons: Vec<String> = stuck
            .map(|(what, device)| {
                let id = device.common().id.as_deref().unwrap_or_default();
                format!("{what} {id:?} cannot move: remove it first (vm.remove-device)")
            })
            .collect();
        if self.is_loading() {
            reasons.push(
                "the VM's memory is still being restored on demand: wait until the log says that \
                 it is all there"
                    .to_owned(),
            );
        }
        if !self.torn_out.is_empty() {
            reasons.push("the guest has yet to eject a device that was taken away".to_owned());
        }
        reasons
    }

    /// Why the memory cannot be handed over to another process; empty if it can be.
    pub fn reasons_not_to_share(&self) -> Vec<String> {
        let regions = self.ram.regions().iter();
        let mut private: Vec<_> = regions
            .filter(|region| !region.mapping.is_shared())
            .map(|region| region.zone.as_str())
            .collect();
        private.dedup();
        let reason = |zone| {
            format!(
                "memory zone {zone:?} is private to this process, so that local=on has nothing to \
                 hand over: boot the VM with shared=on, or move it without local"
            )
        };
        private.into_iter().map(reason).collect()
    }

    /// Throttles the vCPUs by this percentage of their time; 0 disables throttling.
    pub fn throttle(&mut self, percent: u8) {
        if let Err(error) = self.cpus.throttle(percent) {
            log::warn!("the guest is not slowed down: {error}");
        }
    }

    /// The CPU requirements of the guest's vCPUs on another host.
    pub fn cpu_needs(&self) -> Result<CpuNeeds, MachineError> {
        Ok(self.cpus.needs()?)
    }

    /// The state of the paused machine, in the format of the state file.
    pub fn departing_state(&self) -> Result<Vec<u8>, MachineError> {
        state_file::encode(&self.state()?, self.state_version()).map_err(|source| {
            MachineError::StateFile {
                path: "of the migration".into(),
                source,
            }
        })
    }

    /// Creates a machine with the memory of one that is migrating to this host: without devices, and with vCPUs that
    /// wait for their states. Its memory has what its files contain. `plugged` holds base and length of each range that was hot-plugged by ACPI.
    pub fn arriving(
        config: &mut VmConfig,
        plugged: &[(u64, u64)],
        mut host: Host,
    ) -> Result<Self, MachineError> {
        host.arriving = true;
        let mut machine = Self::shell(config, plugged, host)?;
        machine.cpus.expect(config.cpus.boot_vcpus)?;
        Ok(machine)
    }

    /// Makes the memory of a machine that arrives, and of no other one, read as zeroes: the source sends no pages of
    /// zeroes that it has never touched.
    pub fn clear_memory(&self) -> Result<(), MachineError> {
        Ok(memory_file::clear_all(&self.ram)?)
    }

    /// Restores devices and vCPUs to the state in which they left, `away` ago; the machine is paused and holds no locks
    /// of its disks, whose images are open. The memory must have its final contents. The state is untrusted. Workers have
    /// yet to restore the applications that came with it ([`Machine::ports_to_take_up`]).
    pub fn arrive(
        &mut self,
        config: &mut VmConfig,
        state: &[u8],
        away: Duration,
        applications: Option<File>,
        images: Arc<Images>,
    ) -> Result<(), MachineError> {
        self.devices.set_archive(applications);
        self.devices.set_images(images);
        let arrived = self.take_over(config, state, away);
        self.devices.set_archive(None);
        self.devices.set_images(Arc::default());
        arrived
    }

    fn take_over(
        &mut self,
        config: &mut VmConfig,
        state: &[u8],
        away: Duration,
    ) -> Result<(), MachineError> {
        let mut state: SavedMachine =
            state_file::decode(state).map_err(|source| MachineError::StateFile {
                path: "of the migration".into(),
                source,
            })?;
        // The time of a machine that stays paused does not go on.
        let since = (!away.is_zero()).then(Instant::now);
        state.advance(away);
        self.restore_devices(config, &mut state)?;
        self.devices.close_given();
        self.restore_rest(state, since)
    }

    /// Records that the machine has been migrated, and the cost of the migration apart from its memory.
    pub fn set_last_move(&mut self, cost: Duration) {
        self.last_move = Some(cost);
    }

    /// The cost of the last migration apart from its memory, if there was one.
    pub fn last_move(&self) -> Option<Duration> {
        self.last_move
    }

    /// Acquires the locks of all disks, or none: the holder of the locks may run the machine.
    pub fn take_locks(&mut self) -> Result<(), MachineError> {
        self.devices.lock_disks()?;
        self.unlocked = false;
        Ok(())
    }

    /// Releases the locks of all disks. The paused machine does not resume without them.
    pub fn release_locks(&mut self) -> Result<(), MachineError> {
        self.unlocked = true;
        self.devices.unlock_disks()
    }

    /// Whether the machine has to acquire the locks of its disks before it can run.
    pub fn is_unlocked(&self) -> bool {
        self.unlocked
    }

    /// The disks whose locks decide who may run the machine, within the scope `among`.
    pub fn exclusive_disks(&self, among: Scope) -> Vec<String> {
        self.devices.exclusive_disks(among).cloned().collect()
    }
}
