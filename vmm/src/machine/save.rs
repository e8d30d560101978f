//! Snapshots: a paused machine to a directory, and back.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use devices::{accel::saved::Archive, pci::Bdf};
use hypervisor::VmState;
use serde::{Deserialize, Serialize};

use super::{
    Machine, devices::SavedDevice, error::MachineError, host::Host, placement,
    platform::PlatformState,
};
use crate::{
    config::VmConfig,
    cpu::SavedCpu,
    memory::RegionKind,
    snapshot::{
        self,
        lazy::LazyRestore,
        lock::DirectoryLock,
        memory_file::{self, MemoryRange},
        staged::Staged,
        state_file,
    },
};

/// Everything of a machine but its memory and its configuration.
#[derive(Serialize, Deserialize)]
pub struct SavedMachine {
    vm: VmState,
    cpus: Vec<SavedCpu>,
    platform: PlatformState,
    devices: Vec<SavedDevice>,
    /// Address latch of PCI's configuration ports.
    config_address: u32,
    /// Slots whose device was taken away, which the guest has yet to eject.
    torn_out: BTreeSet<Bdf>,
    memory: Vec<MemoryRange>,
}

/// How memory comes back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MemorySource {
    /// All of it before the guest goes on.
    Copy,
    /// When it is touched.
    OnDemand,
}

/// A snapshot that is being written. What there is of it is removed unless it is completed.
pub struct Saving {
    staged: Staged,
    directory: PathBuf,
    /// Nobody else writes or reads there meanwhile.
    _alone: DirectoryLock,
}

impl Saving {
    /// In a directory, which is created if need be.
    pub fn new(directory: &Path) -> Result<Self, MachineError> {
        fs::create_dir_all(directory).map_err(io_at(directory))?;
        let alone = DirectoryLock::exclusive(directory)?;
        Ok(Self {
            staged: Staged::new(directory).map_err(io_at(directory))?,
            directory: directory.to_owned(),
            _alone: alone,
        })
    }

    /// Where accelerators' applications are written before the machine is: what their workers still
    /// signal until they stand still is in the state of the interrupt controllers.
    pub fn archive(&self) -> Result<Archive, MachineError> {
        let path = self.staged.path(snapshot::APPLICATIONS);
        let file = memory_file::create_private(&path).map_err(io_at(&path))?;
        Ok(Archive::new(file))
    }
}

fn io_at(path: &Path) -> impl FnOnce(std::io::Error) -> MachineError + use<> {
    let path = path.to_owned();
    move |source| MachineError::ConfigFile { path, source }
}

impl Machine {
    /// Writes the paused machine, all of it now. An older snapshot there stays until this one is complete
    /// and on stable storage: there must be room for both.
    pub fn save(&self, config: &VmConfig, saving: Saving) -> Result<(), MachineError> {
        let Saving {
            staged,
            directory,
            _alone,
        } = saving;
        let mut state = self.state()?;
        state.memory = memory_file::write(&staged.path(snapshot::MEMORY), &self.ram)?;
        let config_path = staged.path(snapshot::CONFIG);
        let text = serde_json::to_vec_pretty(config).map_err(std::io::Error::from);
        text.and_then(|text| {
            let mut file = fs::File::create_new(&config_path)?;
            file.write_all(&text)?;
            file.sync_all()
        })
        .map_err(io_at(&config_path))?;
        let state_path = staged.path(snapshot::STATE);
        state_file::write(&state_path, &state).map_err(|source| MachineError::StateFile {
            path: state_path,
            source,
        })?;
        staged.commit().map_err(io_at(&directory))
    }

    /// The configuration of a snapshot.
    pub fn saved_config(directory: &Path) -> Result<VmConfig, MachineError> {
        /// Larger configurations are refused.
        const MAX_BYTES: u64 = 16 << 20;
        let path = directory.join(snapshot::CONFIG);
        let read = || {
            let len = fs::metadata(&path)?.len();
            if len > MAX_BYTES {
                return Err(std::io::Error::other(format!("{len} bytes are too many")));
            }
            Ok(serde_json::from_slice(&fs::read(&path)?)?)
        };
        read().map_err(|source| MachineError::ConfigFile {
            path: path.clone(),
            source,
        })
    }

    /// The machine of a snapshot, paused. Workers have yet to take up what it has of accelerators'
    /// applications ([`Machine::ports_to_take_up`]).
    pub fn restore(
        config: &mut VmConfig,
        directory: &Path,
        source: MemorySource,
        mut host: Host,
    ) -> Result<Self, MachineError> {
        let path = directory.join(snapshot::STATE);
        let state: SavedMachine =
            state_file::read(&path).map_err(|source| MachineError::StateFile { path, source })?;
        let spawner = Arc::clone(&host.spawner);
        // Whether one is needed is in the state.
        let archive = fs::File::open(directory.join(snapshot::APPLICATIONS));
        host.archive = archive.ok().map(Arc::new);
        let mut machine = Self::shell(config, &state.plugged_memory(), host)?;
        let mut state = state;
        let ranges = std::mem::take(&mut state.memory);
        machine.restore_devices(config, &mut state)?;
        machine.devices.set_archive(None);
        let memory = directory.join(snapshot::MEMORY);
        match source {
            MemorySource::Copy => memory_file::read(&memory, &machine.ram, &ranges)?,
            MemorySource::OnDemand => {
                let lazy = LazyRestore::start(&memory, &machine.ram, &ranges, &*spawner)?;
                machine.lazy = Some(lazy);
            }
        }
        machine.restore_rest(state)?;
        Ok(machine)
    }

    /// The state of the paused machine, without its memory.
    pub(super) fn state(&self) -> Result<SavedMachine, MachineError> {
        let cpus = self.cpus.save()?;
        let devices = self.devices.save()?;
        Ok(SavedMachine {
            vm: self.vm.save()?,
            cpus,
            platform: self.platform.save(),
            devices,
            config_address: self.devices.config_address(),
            torn_out: self.torn_out.clone(),
            memory: Vec::new(),
        })
    }

    /// A machine with its memory, that which was plugged in at run time included, and without
    /// devices and vCPUs.
    pub(super) fn shell(
        config: &mut VmConfig,
        plugged: &[(u64, u64)],
        host: Host,
    ) -> Result<Self, MachineError> {
        let mut machine = Self::assemble(config, host)?;
        for &(base, length) in plugged {
            let zones = placement::zones(&config.memory);
            let backing = zones
                .first()
                .map(|zone| placement::backing(&config.memory, zone));
            machine.ram.add(
                placement::DEFAULT_ZONE,
                RegionKind::Hotplugged,
                base,
                length,
                &backing.unwrap_or_default(),
            )?;
        }
        machine.ram.all_given()?;
        Ok(machine)
    }

    /// Devices as they were saved.
    pub(super) fn restore_devices(
        &mut self,
        config: &mut VmConfig,
        state: &mut SavedMachine,
    ) -> Result<(), MachineError> {
        let mut saved: BTreeMap<_, _> = std::mem::take(&mut state.devices)
            .into_iter()
            .map(|device| (device.id.clone(), device))
            .collect();
        let gsis = Arc::clone(self.vm.gsis());
        gsis.together(|| self.restore_all(config, &mut saved))??;
        if let Some(id) = saved.keys().next() {
            return Err(MachineError::SnapshotMismatch(format!(
                "device {id:?} is not in the configuration"
            )));
        }
        self.devices.set_config_address(state.config_address);
        self.torn_out = std::mem::take(&mut state.torn_out);
        Ok(())
    }

    /// vCPUs and interrupt controllers as they were saved, after memory.
    pub(super) fn restore_rest(&mut self, state: SavedMachine) -> Result<(), MachineError> {
        self.cpus.restore(state.cpus)?;
        self.vm.restore(&state.vm)?;
        // Last, because it may raise an interrupt.
        self.platform.restore(state.platform)
    }
}

impl SavedMachine {
    /// Clocks go on as if the machine had run for so long since it was saved.
    pub(super) fn advance(&mut self, by: Duration) {
        self.vm.advance(by);
        for cpu in &mut self.cpus {
            cpu.state.advance(by);
        }
    }

    /// Base and length of memory that ACPI has plugged in.
    fn plugged_memory(&self) -> Vec<(u64, u64)> {
        self.platform.plugged_memory().collect()
    }
}
