//! Machines that leave for another host, or come from one.

use ::devices::{
    disk::Scope,
    memory::{GuestMemory, GuestRegion},
};
use hypervisor::{CpuNeeds, DirtyLog, Vm};
use std::{fs::File, sync::Arc, time::Duration};

use super::{Machine, error::MachineError, host::Host, save::SavedMachine};
use crate::{
    config::VmConfig,
    memory::{Mapping, RegionKind},
    snapshot::state_file,
};

/// A region of RAM that moves.
pub struct MovingRegion {
    /// Guest-physical address.
    pub guest: u64,
    /// Plugged in at run time by ACPI.
    pub hotplugged: bool,
    /// The memory; it stays mapped.
    pub mapping: Arc<Mapping>,
    memory: GuestMemory,
    vm: Arc<Vm>,
    slot: hypervisor::SlotId,
}

impl MovingRegion {
    /// Starts KVM's log of what the guest writes there.
    pub fn watch(&self) -> hypervisor::Result<DirtyLog> {
        self.vm.watch(self.slot)
    }

    /// Has `work` look at the log of what devices write there; `None` if the region is gone.
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
    /// All RAM.
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

    /// Everything that keeps the machine here, in words for users; empty if it can move.
    pub fn reasons_to_stay(&self, config: &VmConfig) -> Vec<String> {
        let devices = config.all_devices().into_iter();
        let stuck = devices.filter_map(|(_, device)| Some((device.cannot_move()?, device)));
        let mut reasons: Vec<String> = stuck
            .map(|(what, device)| {
                let id = device.common().id.as_deref().unwrap_or_default();
                format!("{what} {id:?} cannot move: remove it first (vm.remove-device)")
            })
            .collect();
        if self.lazy.as_ref().is_some_and(|lazy| !lazy.is_finished()) {
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

    /// Why the memory cannot be handed over to another process; empty if it can.
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

    /// Takes so many percent of their time away from the vCPUs; 0: none.
    pub fn throttle(&mut self, percent: u8) {
        if let Err(error) = self.cpus.throttle(percent) {
            log::warn!("the guest is not slowed down: {error}");
        }
    }

    /// What another host has to have for the guest's vCPUs.
    pub fn cpu_needs(&self) -> Result<CpuNeeds, MachineError> {
        Ok(self.cpus.needs()?)
    }

    /// The state of the paused machine, in the form that a file would have, when all that it wrote
    /// to its disks is where another host finds it.
    pub fn departing_state(&self) -> Result<Vec<u8>, MachineError> {
        self.devices.flush_disks()?;
        state_file::encode(&self.state()?).map_err(|source| MachineError::StateFile {
            path: "of the migration".into(),
            source,
        })
    }

    /// A machine with the memory of one that is on its way here: without devices, and with vCPUs that wait for their
    /// states. `plugged` is base and length of what ACPI has plugged in.
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

    /// Devices and vCPUs as they were when they left, `away` ago; paused, without the locks of the
    /// disks. The memory has its last contents. The state is untrusted. Workers have yet to take up what
    /// comes with it ([`Machine::ports_to_take_up`]).
    pub fn arrive(
        &mut self,
        config: &mut VmConfig,
        state: &[u8],
        away: Duration,
        applications: Option<File>,
    ) -> Result<(), MachineError> {
        self.devices.set_archive(applications);
        let arrived = self.take_over(config, state, away);
        self.devices.set_archive(None);
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
        state.advance(away);
        self.restore_devices(config, &mut state)?;
        self.devices.close_given();
        self.restore_rest(state)
    }

    /// The machine has moved, which has cost it so long beside its memory.
    pub fn set_last_move(&mut self, cost: Duration) {
        self.last_move = Some(cost);
    }

    /// What its last move has cost beside its memory, if it has moved.
    pub fn last_move(&self) -> Option<Duration> {
        self.last_move
    }

    /// Takes the locks of all disks, or none: whoever has them may run the machine.
    pub fn take_locks(&mut self) -> Result<(), MachineError> {
        self.devices.lock_disks()?;
        self.unlocked = false;
        Ok(())
    }

    /// Gives the locks of all disks up. The paused machine does not go on without them.
    pub fn release_locks(&mut self) -> Result<(), MachineError> {
        self.unlocked = true;
        self.devices.unlock_disks()
    }

    /// Whether the machine needs the locks of its disks before it can run.
    pub fn is_unlocked(&self) -> bool {
        self.unlocked
    }

    /// The disks whose locks tell who may run the machine, as far as `among` goes.
    pub fn exclusive_disks(&self, among: Scope) -> Vec<String> {
        self.devices.exclusive_disks(among).cloned().collect()
    }
}
