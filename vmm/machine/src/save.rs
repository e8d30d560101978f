//! Snapshots: saves a paused machine to a directory, and restores it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use base::{
    Cancel,
    regular_file::{self, Links},
};
use devices::{accel::saved::Archive, pci::Bdf, virtio::blk};
use hypervisor::VmState;
use serde::{Deserialize, Serialize};
use vmm_config::{DiskConfig, VmConfig};
use vmm_memory::{Region, RegionKind};
use vmm_snapshot::{
    lazy::{LazyError, LazyRestore, OnLoss},
    lock::DirectoryLock,
    memory_file::{self, MemoryRange, Untouched},
    staged::Staged,
    state_file,
    writing::Writing,
};

use super::{
    EXIT_GUEST_LOST, Frame, Machine, devices::SavedDevice, error::MachineError,
    events::MachineEvent, generation::Generation, host::Host, images::Images, placement,
    platform::PlatformState,
};
use crate::cpu::SavedCpu;

/// Age beyond which a snapshot's time, or the host's clock, is considered wrong.
const MAX_AGE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long the control loop may take to end a VM whose memory is lost. It takes longer only if it waits for lost memory
/// itself.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The complete state of a machine except its memory and its configuration.
#[derive(Serialize, Deserialize)]
pub struct SavedMachine {
    vm: VmState,
    cpus: Vec<SavedCpu>,
    platform: PlatformState,
    devices: Vec<SavedDevice>,
    /// Address latch of the PCI configuration ports.
    config_address: u32,
    /// Slots whose device was removed and which the guest has yet to eject.
    torn_out: BTreeSet<Bdf>,
    memory: Vec<MemoryRange>,
    /// When it was saved, in nanoseconds since 1970 by the host's clock. States before version 5 do not say it.
    #[serde(default)]
    saved_at: Option<u64>,
    /// The place of the generation ID. Guests that were saved before version 5 do not know of it.
    #[serde(default)]
    generation: Option<Generation>,
    /// It has booted firmware.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    firmware: bool,
    /// Network cards whose taps came as descriptors, of which its configuration says nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unnamed_taps: Vec<String>,
}

/// How the guest's clocks continue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ClockSource {
    /// As if the guest had run since it was saved.
    Advance,
    /// From where they were.
    Continue,
}

/// How memory is restored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MemorySource {
    /// All of it before the guest resumes.
    Copy,
    /// When it is first accessed.
    OnDemand,
}

/// The directory of a snapshot, which others do not write meanwhile.
pub struct Folder {
    path: PathBuf,
    alone: DirectoryLock,
}

impl Folder {
    /// Locks it, and reads the configuration of the snapshot's VM, at the speed of the disk.
    ///
    /// # Errors
    /// Another process uses it, or it has no snapshot that this version can read.
    pub fn open(path: PathBuf) -> Result<(Box<VmConfig>, Self), MachineError> {
        // Memory that is loaded on demand is safe without the lock, too: a new snapshot replaces the file.
        let alone = DirectoryLock::shared(&path)?;
        let config = saved_config(&path)?;
        Ok((config, Self { path, alone }))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the other files, except memory, and opens the images of the VM's disks, at the speed of the storage.
    ///
    /// # Errors
    /// A file is missing or invalid, or an image cannot be opened.
    pub fn read(self, disks: &[DiskConfig], images: Arc<Images>) -> Result<Snapshot, MachineError> {
        let path = self.path.join(vmm_snapshot::STATE);
        let state: SavedMachine =
            state_file::read(&path).map_err(|source| MachineError::StateFile { path, source })?;
        let path = self.path.join(vmm_snapshot::APPLICATIONS);
        let archive = match regular_file::open(&path, Links::Refuse) {
            Ok(archive) => Some(archive),
            // The state says whether the archive is needed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(io_at(&path)(error)),
        };
        images.open(disks, false)?;
        Ok(Snapshot {
            folder: self,
            state,
            archive,
            images,
        })
    }
}

/// A snapshot whose files were read, except its memory.
pub struct Snapshot {
    folder: Folder,
    state: SavedMachine,
    /// The archive of its accelerators' applications.
    archive: Option<File>,
    images: Arc<Images>,
}

impl Snapshot {
    /// A network card whose tap came as a descriptor, and for which the configuration has none.
    pub fn card_without_tap(&self, config: &VmConfig) -> Option<&str> {
        card_without_tap(&self.state.unnamed_taps, config)
    }
}

fn card_without_tap<'a>(unnamed: &'a [String], config: &VmConfig) -> Option<&'a str> {
    let has_tap = |name: &&String| {
        let mut cards = config.net.iter().flatten();
        let card = cards.find(|card| card.common.id.as_ref() == Some(*name));
        card.is_none_or(|card| !card.fds.is_empty())
    };
    let mut unnamed = unnamed.iter();
    unnamed.find(|name| !has_tap(name)).map(String::as_str)
}

/// What a machine that is made from a snapshot lacks.
pub struct Rest {
    /// Its memory, unless that is read on demand.
    pub contents: Option<Contents>,
    state: SavedMachine,
    clock: ClockSource,
    /// Until it is complete, nobody else writes the snapshot.
    _alone: DirectoryLock,
}

/// Memory that is to be read from a snapshot before anything runs.
pub struct Contents {
    path: PathBuf,
    ranges: Vec<MemoryRange>,
    regions: Vec<Region>,
}

impl Contents {
    /// Number of bytes of memory.
    pub fn memory(&self) -> u64 {
        memory_file::total(&self.regions)
    }

    /// Reads it, at the speed of the disk, and tells of bytes that are there.
    pub fn read(self, cancel: &Cancel, advance: impl Fn(u64)) -> Result<(), MachineError> {
        let Self {
            path,
            ranges,
            regions,
        } = self;
        Ok(memory_file::read(
            &path, &regions, &ranges, cancel, advance,
        )?)
    }
}

/// A snapshot that is being written. It is removed unless it is completed.
pub struct Saving {
    /// Keeps others from reading or writing the directory meanwhile.
    staged: Staged,
    directory: PathBuf,
}

impl Saving {
    /// Starts a snapshot in a directory, which is created if needed.
    pub fn new(directory: &Path) -> Result<Self, MachineError> {
        fs::create_dir_all(directory).map_err(io_at(directory))?;
        let alone = DirectoryLock::exclusive(directory)?;
        Ok(Self {
            staged: Staged::new(directory, alone).map_err(io_at(directory))?,
            directory: directory.to_owned(),
        })
    }

    /// Checks that files can be made there.
    pub fn try_out(&self) -> Result<(), MachineError> {
        let path = self.staged.path(vmm_snapshot::APPLICATIONS);
        let made = memory_file::create_private(&path).map(drop);
        made.and_then(|()| fs::remove_file(&path))
            .map_err(io_at(&path))
    }

    /// Makes the archive, at the speed of the storage, to which accelerators' applications are written before the machine is saved: workers may signal
    /// until they are stopped, and those signals are part of the state of the interrupt controllers.
    pub fn archive(&self) -> impl FnOnce() -> Result<Archive, MachineError> + Send + use<> {
        let path = self.staged.path(vmm_snapshot::APPLICATIONS);
        move || {
            let file = memory_file::create_private(&path).map_err(io_at(&path))?;
            Ok(Archive::new(file))
        }
    }
}

/// Everything of a paused machine that a snapshot consists of. Another thread may write it, as long as the machine stays
/// paused.
pub struct Image {
    state: SavedMachine,
    /// Version of the state.
    version: u32,
    config: VmConfig,
    regions: Vec<Region>,
    untouched: Untouched,
    disks: Vec<blk::Flush>,
}

impl Image {
    /// Number of bytes of memory.
    pub fn memory(&self) -> u64 {
        memory_file::total(&self.regions)
    }

    /// Writes the snapshot. An older one in the directory stays until this one is complete and on stable storage, so
    /// there must be room for both.
    pub fn write(mut self, saving: Saving, writing: &Writing) -> Result<(), MachineError> {
        // The guest that is restored has seen its writes completed.
        let mut disks = std::mem::take(&mut self.disks).into_iter();
        let flushed = disks.try_for_each(|flush| flush());
        flushed.map_err(MachineError::FlushDisks)?;
        let Saving { staged, directory } = saving;
        let memory = staged.path(vmm_snapshot::MEMORY);
        self.state.memory = memory_file::write(&memory, &self.regions, &self.untouched, writing)?;
        let config_path = staged.path(vmm_snapshot::CONFIG);
        let text = serde_json::to_vec_pretty(&self.config).map_err(io::Error::from);
        text.and_then(|text| {
            let mut file = File::create_new(&config_path)?;
            file.write_all(&text)?;
            file.sync_all()
        })
        .map_err(io_at(&config_path))?;
        let state_path = staged.path(vmm_snapshot::STATE);
        state_file::write(&state_path, &self.state, self.version).map_err(|source| {
            MachineError::StateFile {
                path: state_path,
                source,
            }
        })?;
        let _seal = writing.seal().map_err(io_at(&directory))?;
        staged.commit().map_err(io_at(&directory))
    }
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> MachineError + use<> {
    let path = path.to_owned();
    move |source| MachineError::ConfigFile { path, source }
}

impl Machine {
    /// What a snapshot of the paused machine consists of.
    pub fn image(&self, config: &VmConfig) -> Result<Image, MachineError> {
        let mut state = self.state()?;
        state.unnamed_taps = config.unnamed_taps();
        Ok(Image {
            state,
            version: self.state_version(),
            config: config.clone(),
            regions: self.ram.regions().to_vec(),
            untouched: self.untouched(),
            disks: self.devices.disk_flushes(),
        })
    }

    /// Makes the machine of a snapshot, without vCPUs. What is left to do: its memory is read, possibly by another thread
    /// ([`Contents::read`]), then the rest is restored ([`Machine::complete`]). A caller that does not want it any more cancels
    /// `unwanted`.
    pub fn restore(
        config: &mut VmConfig,
        snapshot: Snapshot,
        source: MemorySource,
        clock: ClockSource,
        mut host: Host,
        unwanted: Cancel,
    ) -> Result<(Self, Rest), MachineError> {
        let Snapshot {
            folder,
            mut state,
            archive,
            images,
        } = snapshot;
        if source == MemorySource::OnDemand && placement::is_prefaulted(&config.memory) {
            return Err(LazyError::Prefault.into());
        }
        let spawner = Arc::clone(&host.spawner);
        let events = host.events.clone();
        host.archive = archive.map(Arc::new);
        host.images = images;
        let mut machine = Self::shell(config, &state.plugged_memory(), host)?;
        let ranges = std::mem::take(&mut state.memory);
        let memory = folder.path.join(vmm_snapshot::MEMORY);
        if source == MemorySource::OnDemand {
            let on_loss = OnLoss {
                report: Box::new(move |lost| events.send(MachineEvent::MemoryLost(lost))),
                patience: END_PATIENCE,
                end: end_process,
                unwanted,
            };
            // Before devices access the memory: pages that they touch first would stay as they are then.
            let lazy = LazyRestore::start(&memory, &machine.ram, &ranges, &*spawner, on_loss)?;
            machine.lazy = Some(lazy);
        }
        machine.restore_devices(config, &mut state)?;
        machine.devices.set_archive(None);
        machine.devices.set_images(Arc::default());
        let contents = (source == MemorySource::Copy).then(|| Contents {
            path: memory,
            ranges,
            regions: machine.ram.regions().to_vec(),
        });
        let rest = Rest {
            contents,
            state,
            clock,
            _alone: folder.alone,
        };
        Ok((machine, rest))
    }

    /// Restores what is left when a snapshot's memory has been read. Workers have yet to restore its accelerators'
    /// applications ([`Machine::ports_to_take_up`]).
    pub fn complete(&mut self, rest: Rest) -> Result<(), MachineError> {
        let mut state = rest.state;
        let mut since = None;
        if rest.clock == ClockSource::Advance
            && let Some(age) = age(state.saved_at, wall_time())?
        {
            since = Some(Instant::now());
            state.advance(age);
        }
        self.restore_rest(state, since)?;
        self.renew_generation()?;
        self.announce_generation()
    }

    /// The version of its state: the oldest that has all of it.
    pub fn state_version(&self) -> u32 {
        match self.firmware || self.devices.are_reached() {
            true => state_file::VERSION,
            false => state_file::WITHOUT_FIRMWARE,
        }
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
            saved_at: Some(wall_time()),
            generation: self.generation,
            firmware: self.firmware,
            unnamed_taps: Vec::new(),
        })
    }

    /// Creates a machine with its memory, including memory that was hot-plugged, but without devices and vCPUs.
    pub(super) fn shell(
        config: &mut VmConfig,
        plugged: &[(u64, u64)],
        mut host: Host,
    ) -> Result<Self, MachineError> {
        let frame = Frame::new(config, &mut host)?;
        let mut machine = Self::assemble(frame, config, host)?;
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

    /// Restores the devices.
    pub(super) fn restore_devices(
        &mut self,
        config: &mut VmConfig,
        state: &mut SavedMachine,
    ) -> Result<(), MachineError> {
        self.show_firmware(state.firmware);
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
        self.generation = state.generation;
        Ok(())
    }

    /// Restores vCPUs and interrupt controllers; the memory must have been restored before. If the guest's time goes on,
    /// the state is as of `since`.
    pub(super) fn restore_rest(
        &mut self,
        mut state: SavedMachine,
        since: Option<Instant>,
    ) -> Result<(), MachineError> {
        // May take a while: vCPUs wait for memory that is restored on demand.
        self.cpus.restore(state.cpus, since)?;
        if let Some(since) = since {
            state.vm.advance(since.elapsed());
            state.platform.advance(since.elapsed());
        }
        self.vm.restore(&state.vm)?;
        // Last, because it may raise an interrupt.
        self.platform.restore(state.platform)
    }
}

/// Reads the configuration of a snapshot.
fn saved_config(directory: &Path) -> Result<Box<VmConfig>, MachineError> {
    /// Upper limit; larger configurations are refused.
    const MAX_BYTES: u64 = 16 << 20;
    let path = directory.join(vmm_snapshot::CONFIG);
    let text = regular_file::read(&path, Links::Refuse, MAX_BYTES).map_err(io_at(&path))?;
    serde_json::from_slice(&text).map_err(|error| io_at(&path)(error.into()))
}

/// The host's clock: nanoseconds since 1970.
fn wall_time() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The age of a snapshot that was saved at that time and is restored `now`, both as [`wall_time`]. `None` if it is unknown
/// or the clock is wrong, which is logged.
fn age(saved_at: Option<u64>, now: u64) -> Result<Option<Duration>, MachineError> {
    let Some(saved_at) = saved_at else {
        log::warn!(
            "the snapshot does not say when it was made: the guest's clock continues from where it was"
        );
        return Ok(None);
    };
    let Some(age) = now.checked_sub(saved_at).map(Duration::from_nanos) else {
        let ahead = Duration::from_nanos(saved_at - now);
        log::warn!(
            "this host's clock is {ahead:?} behind that of the snapshot's host: the guest's clock continues from \
             where it was"
        );
        return Ok(None);
    };
    if age > MAX_AGE {
        let days = age.as_secs() / (24 * 3600);
        return Err(MachineError::Invalid(format!(
            "the snapshot is {days} days old by this host's clock: correct the clock, or restore the snapshot with \
             clock=continue"
        )));
    }
    log::info!("the guest's clock advances by the age of the snapshot, {age:?}");
    Ok(Some(age))
}

/// Ends the process because the control loop, too, waits for memory that is lost. It says nothing: the log may be on the
/// storage that does not answer.
fn end_process() {
    devices::console::restore_terminal();
    // SAFETY: ends the process, so nothing of it is used any more.
    unsafe { libc::_exit(EXIT_GUEST_LOST.into()) };
}

impl SavedMachine {
    /// Advances the clocks as if the machine had run for this long since it was saved.
    pub(super) fn advance(&mut self, by: Duration) {
        self.vm.advance(by);
        self.platform.advance(by);
        for cpu in &mut self.cpus {
            cpu.state.advance(by);
        }
    }

    /// Base and length of the memory that was hot-plugged by ACPI.
    fn plugged_memory(&self) -> Vec<(u64, u64)> {
        self.platform.plugged_memory().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_gets_no_other_tap_than_descriptors() {
        use std::os::fd::OwnedFd;
        let card = |id: &str, fds| vmm_config::NetConfig {
            common: vmm_config::CommonConfig {
                id: Some(id.to_owned()),
                ..Default::default()
            },
            fds,
            ..Default::default()
        };
        let given = || vec![OwnedFd::from(File::open("/dev/null").unwrap()).into()];
        let mut config = VmConfig {
            net: Some(vec![card("a", given()), card("b", Vec::new())]),
            ..Default::default()
        };
        let unnamed = config.unnamed_taps();
        assert_eq!(unnamed, ["a"]);
        assert_eq!(card_without_tap(&unnamed, &config), None);
        config.net = Some(vec![card("a", Vec::new()), card("b", Vec::new())]);
        assert_eq!(card_without_tap(&unnamed, &config), Some("a"));
        config.net = None;
        assert_eq!(card_without_tap(&unnamed, &config), None);
    }

    #[test]
    fn the_clock_advances_by_a_credible_age_only() {
        let now = wall_time();
        let month = Duration::from_secs(30 * 24 * 3600);
        let ago = |age: Duration| Some(now - age.as_nanos() as u64);
        assert_eq!(age(ago(month), now).unwrap(), Some(month));
        assert_eq!(age(None, now).unwrap(), None);
        assert_eq!(age(Some(now + 1), now).unwrap(), None);
        assert_eq!(age(Some(u64::MAX), now).unwrap(), None);
        let error = age(Some(0), now).unwrap_err().to_string();
        assert!(
            error.contains("days old") && error.contains("clock=continue"),
            "{error}"
        );
    }
}
