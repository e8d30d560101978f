//! The machine: assembles memory, buses, processors and devices.
//!
//! ```text
//!   VmConfig ──assemble──> Machine ──load────> kernel in memory, vCPUs at its entry ─┐
//!                             │                                                       ├─ resume
//!                             └────restore───> memory, devices, vCPUs as saved ──────┘
//! ```
//!
//! - [`platform`]: fixed devices; [`devices`]: those on PCI, each kind in [`kinds`].
//! - [`boot`]: kernel or firmware, ACPI and SMBIOS; [`placement`] and [`numa`]: layout of memory.
//! - [`save`]: snapshots; [`images`]: disk images that are opened before the machine is made; `coredump`: core dumps for
//!   debuggers; `resize`: resizing a running machine; `gate`: machines that are stopped while they serve others.
//! - [`moving`]: machines that leave for another host or arrive from one; [`applications`]: the applications of their
//!   accelerators; [`handover`]: descriptors that are handed over to another process of this host.
//! - `generation`: what tells copies of a saved machine apart.
//! - `resets`: resets that the guest requests, carried out on a thread that may block.
//! - [`events`]: what a machine reports to the control loop; [`alarms`]: alarms of physical devices.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod alarms;
pub mod applications;
mod boot;
pub mod buses;
pub mod consoles;
mod coredump;
pub mod cpu;
pub mod device_pages;
pub mod devices;
pub mod error;
pub mod events;
mod gate;
mod generation;
pub mod handover;
pub mod host;
pub mod images;
pub mod interrupts;
pub mod kinds;
pub mod moving;
mod numa;
pub mod physical;
pub mod placement;
pub mod platform;
mod resets;
pub mod resize;
pub mod save;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use ::devices::{
    acpi::Notification,
    legacy::DebugConsole,
    msi::MsiController,
    pci::{Bdf, PciBuses},
    virtio::{blk::SharedRateLimiter, discard::Discards},
};
use arch::{
    cpuid::Profile,
    layout::{AddressMap, AddressRange},
    topology::Topology,
};
use hypervisor::Vm;
use kvm_bindings::kvm_cpuid_entry2;
use vmm_config::{AccelServerConfig, CpusConfig, Device, HotplugMethod, VmConfig};
use vmm_memory::{ExtraMemory, Ram, Region, RegionKind, data::Pagemap};
use vmm_snapshot::{
    lazy::{LazyRestore, Question},
    memory_file::Untouched,
};

use self::{
    boot::Payload,
    buses::Buses,
    consoles::Consoles,
    device_pages::DevicePages,
    devices::{Devices, Reach, SavedDevice, Surroundings, VirtualIommu, pluggable},
    error::MachineError,
    events::MachineEvent,
    generation::Generation,
    host::{Host, Shell},
    images::Images,
    interrupts::{KvmDoorbells, KvmMsis},
    kinds::{iommu::Iommu, mem::ZoneMemory, panic::Panic},
    physical::{Physical, Policy},
    platform::{Platform, PlatformSetup},
};
use crate::cpu::{CpuSetup, Cpus};

/// Exit status of a process whose guest failed and was lost.
pub const EXIT_GUEST_LOST: u8 = 3;

/// A virtual machine.
///
/// Fields are dropped in order of declaration: everything that accesses guest memory comes first, the memory last.
pub struct Machine {
    cpus: Cpus,
    consoles: Consoles,
    devices: Devices,
    /// Another process holds the locks of the disks, or may hold them: the machine must not run before it has acquired
    /// them.
    unlocked: bool,
    /// The downtime of the last migration, not counting its memory, if there was one.
    last_move: Option<Duration>,
    /// Memory that is still being loaded; vCPUs and devices wait for it.
    lazy: Option<LazyRestore>,
    platform: Platform,
    /// Slots whose device was removed before the guest gave it up.
    torn_out: BTreeSet<Bdf>,
    /// The generation ID, if the guest knows of it.
    generation: Option<Generation>,
    /// It boots firmware, which sees the host bridge that it expects.
    firmware: bool,
    ram: Ram,
    topology: Topology,
    map: AddressMap,
    vm: Arc<Vm>,
}

/// Memory of a machine, and what the places in it follow from.
struct Frame {
    supported_cpuid: Vec<kvm_cpuid_entry2>,
    phys_bits: u8,
    map: AddressMap,
    topology: Topology,
    profile: Profile,
    ram: Ram,
}

impl Frame {
    fn new(config: &VmConfig, host: &mut Host) -> Result<Self, MachineError> {
        if config.cpus.features.amx {
            hypervisor::permit_amx()?;
        }
        let supported = host.shell.kvm.supported_cpuid()?;
        let phys_bits = arch::cpuid::phys_bits(supported.as_slice());
        let phys_bits = phys_bits.min(config.cpus.max_phys_bits.unwrap_or(u8::MAX));
        let map = address_map(config, phys_bits)?;
        let topology = topology(&config.cpus)?;
        let profile = profile(&config.cpus)?;
        let mut ram = Ram::new(Arc::clone(&host.shell.vm));
        if let Some(memory) = host.memory.take() {
            ram.give(memory);
        }
        placement::add_boot_ram(&mut ram, &map, &config.memory)?;
        placement::add_virtio_mem(&mut ram, &map, &config.memory)?;
        Ok(Self {
            supported_cpuid: supported.as_slice().to_vec(),
            phys_bits,
            map,
            topology,
            profile,
            ram,
        })
    }
}

impl Machine {
    /// Creates a machine that is ready to boot, paused, at the speed of the storage. Devices without a name get one in
    /// `config`.
    pub fn boot(config: &mut VmConfig, mut host: Host) -> Result<Self, MachineError> {
        let mut payload = Payload::open(&config.payload)?;
        let frame = Frame::new(config, &mut host)?;
        // Before there is anything that only one machine can have: storage may take long.
        let guest = payload.load(&frame.ram, &frame.map)?;
        let mut machine = Self::assemble(frame, config, host)?;
        machine.show_firmware(payload.is_firmware());
        machine.devices.set_reach(payload.reach());
        machine.plug_all(config)?;
        machine.devices.set_reach(Reach::Nothing);
        // Memory that was plugged in before a reboot, or that the configuration starts with.
        let plugged = config.memory.hotplugged_size.unwrap_or(0);
        if config.memory.hotplug_method == HotplugMethod::Acpi && plugged > 0 {
            let wanted = placement::boot_size(config).saturating_add(plugged);
            machine.add_memory(config, wanted)?;
        }
        machine.describe(&payload, &guest, config)?;
        Ok(machine)
    }

    /// Assembles a machine without PCI devices and vCPUs.
    fn assemble(frame: Frame, config: &mut VmConfig, host: Host) -> Result<Self, MachineError> {
        let Frame {
            supported_cpuid,
            phys_bits,
            map,
            topology,
            profile,
            ram,
        } = frame;
        let Shell { kvm, vm } = host.shell;
        let buses = Arc::new(Buses::default());

        let backends = consoles::open(config, &host.given)?;
        let platform = Platform::new(PlatformSetup {
            vm: &vm,
            buses: &buses,
            events: &host.events,
            topology,
            boot_vcpus: config.cpus.boot_vcpus,
            node_of: &|vcpu| numa::node_of(config, vcpu),
            pci_buses: PciBuses::new(map.root_ports()),
            serial: backends
                .serial
                .as_ref()
                .map(|backend| Box::new(backend.output()) as Box<_>),
            watchdog: config.watchdog,
            ram: [map.low_ram(), map.high_ram()].map(|range| range.size),
            start: host.start,
        })?;
        plug_debug_console(config, &backends, &buses)?;
        let extra = map.device_memory();
        let host_error = |source| MachineError::Host {
            action: "lay out device memory",
            source,
        };
        let address_space =
            ExtraMemory::new(Arc::clone(&vm), extra.start, extra.size).map_err(host_error)?;
        // Created before any physical device: those can access only memory that is plugged in.
        let discards = discards(&ram);
        let msi: Arc<dyn MsiController> = Arc::new(KvmMsis::new(Arc::clone(&vm)));
        let device_pages = Arc::<DevicePages>::default();
        let surroundings = Surroundings {
            device_pages: Arc::clone(&device_pages),
            physical: Physical::new(
                &vm,
                Policy::of(config),
                ram.memory().clone(),
                Arc::clone(&msi),
                Arc::clone(&discards),
                host.events.clone(),
            ),
            iommu: VirtualIommu::of(config),
            discards,
            msi,
            doorbells: Arc::new(KvmDoorbells::new(Arc::clone(&vm))),
            spawner: Arc::clone(&host.spawner),
            address_space: Arc::new(address_space),
            memory: ram.memory().clone(),
            console: backends.console.as_ref().map(|backend| {
                let size = backend.terminal().and_then(|terminal| terminal.size());
                (backend.output(), size)
            }),
            rate_limit_groups: rate_limit_groups(config)?,
            events: host.events.clone(),
            arriving: host.arriving,
            archive: host.archive.clone(),
            images: host.images,
            ports: applications::Ports::default(),
            given: Arc::clone(&host.given),
        };
        let devices = Devices::new(&map, &buses, surroundings)?;
        let events = host.events.clone();
        let setup = CpuSetup {
            supported_cpuid,
            cpuid: shown_cpuid(config, topology, profile, phys_bits),
            affinity: affinity(&config.cpus),
            core_scheduling: config.cpus.core_scheduling,
            report: Arc::new(move |event| events.send(MachineEvent::Cpu(event))),
            devices: device_pages,
            spawner: Arc::clone(&host.spawner),
        };
        let cpus = Cpus::new(&kvm, Arc::clone(&vm), buses, setup)?;
        Ok(Self {
            cpus,
            consoles: Consoles::new(backends, Arc::clone(&host.spawner)),
            devices,
            unlocked: host.arriving,
            last_move: None,
            lazy: None,
            torn_out: BTreeSet::new(),
            generation: None,
            firmware: false,
            platform,
            ram,
            topology,
            map,
            vm,
        })
    }

    /// Sets whether the machine looks as firmware expects, before it runs.
    fn show_firmware(&mut self, firmware: bool) {
        self.firmware = firmware;
        if firmware {
            self.devices.show_firmware();
        }
    }

    fn plug_all(&mut self, config: &mut VmConfig) -> Result<(), MachineError> {
        let devices = &mut self.devices;
        // First, because its slot is fixed.
        if let Some(mut iommu) = Iommu::of(config) {
            devices.plug(&mut iommu)?;
        }
        for device in present(config) {
            pluggable(device).plug(devices)?;
        }
        for mut zone in zone_memory(&self.ram, config) {
            self.devices.plug(&mut zone)?;
        }
        // Last: all other devices are in the slots that they have without it.
        if let Some(mut panic) = Panic::of(config) {
            self.devices.plug(&mut panic)?;
        }
        Ok(())
    }

    fn restore_all(
        &mut self,
        config: &mut VmConfig,
        saved: &mut BTreeMap<String, SavedDevice>,
    ) -> Result<(), MachineError> {
        let devices = &mut self.devices;
        if let Some(mut iommu) = Iommu::of(config) {
            devices.restore(&mut iommu, saved)?;
        }
        for device in present(config) {
            pluggable(device).restore(devices, saved)?;
        }
        for mut zone in zone_memory(&self.ram, config) {
            self.devices.restore(&mut zone, saved)?;
        }
        if let Some(mut panic) = Panic::of(config) {
            self.devices.restore(&mut panic, saved)?;
        }
        Ok(())
    }

    /// Lets devices and vCPUs run, after acquiring the locks of all disks.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        if self.unlocked {
            self.take_locks()?;
        }
        self.devices.resume()?;
        self.consoles.start(&self.platform, &self.devices)?;
        if let Some(watchdog) = self.platform.watchdog() {
            watchdog.resume();
        }
        self.cpus.resume();
        Ok(())
    }

    /// To be called after [`Machine::resume`]: waits until each vCPU is about to enter the guest.
    pub fn wait_running(&self) -> Result<(), MachineError> {
        Ok(self.cpus.wait_running()?)
    }

    /// Stops vCPUs, before [`Machine::pause`] or the end of the machine: nothing starts new requests to devices.
    /// Resets that the guest has requested are completed, which takes a few seconds at most for each. A vCPU whose access
    /// takes long stops when that is over ([`Machine::hold`]).
    pub fn stop(&mut self) {
        if let Some(watchdog) = self.platform.watchdog() {
            watchdog.pause();
        }
        if let Err(error) = self.stop_vcpus(cpu::ACCESS) {
            log::debug!("{error}");
        }
    }

    fn stop_vcpus(&mut self, patience: Duration) -> Result<(), MachineError> {
        self.cpus.pause(patience)?;
        self.consoles.stop();
        self.devices.finish_resets();
        Ok(())
    }

    /// Holds back new requests of all devices of a machine that was [stopped](Machine::stop). Fails as long as a vCPU has
    /// not stopped, or requests are in flight, for which the caller has `waited`: to be repeated, or undone by
    /// [`Devices::carry_on`] and [`Machine::resume`].
    pub fn hold(&mut self, waited: Duration) -> Result<(), MachineError> {
        self.stop_vcpus(Duration::ZERO)?;
        self.devices.hold(waited)
    }

    /// Stops vCPUs, then devices. If one of them cannot be stopped, all continue. Resets that the guest has requested
    /// are completed first, which takes a few seconds at most for each.
    pub fn pause(&mut self) -> Result<(), MachineError> {
        self.stop();
        let stopped = self.stop_vcpus(Duration::ZERO);
        stopped
            .and_then(|()| self.devices.pause())
            .inspect_err(|_| {
                if let Err(error) = self.resume() {
                    log::error!("after a pause that failed, the guest does not go on: {error}");
                }
            })
    }

    /// Prepares the machine for its end: waits for a bounded time until no device has outstanding requests to the host.
    /// After an error all devices continue.
    pub fn quiesce(&self) -> Result<(), MachineError> {
        self.devices.quiesce()
    }

    /// Gives up a machine whose threads may wait for lost memory for ever. Nothing is freed: the process is about to end.
    pub fn abandon(self) {
        std::mem::forget(self);
    }

    /// Plugs a device into the running machine and notifies the guest. For a slot with several functions the guest is
    /// notified when function 0, which must come last, is plugged in.
    pub fn add_device(&mut self, device: &mut dyn Device) -> Result<(String, Bdf), MachineError> {
        let device = pluggable(device);
        if device.shares_ram() && self.is_loading() {
            return Err(MachineError::StillLoading);
        }
        device.check_order(&self.devices)?;
        let (id, bdf) = device.plug(&mut self.devices)?;
        if bdf.function == 0 {
            self.platform.pci.announce(bdf);
            self.notify(Notification::PCI)?;
        }
        Ok((id, bdf))
    }

    /// [`Machine::add_device`] for a device whose file is open.
    pub fn add_open(
        &mut self,
        device: &mut dyn Device,
        images: Arc<Images>,
    ) -> Result<(String, Bdf), MachineError> {
        self.devices.set_images(images);
        let added = self.add_device(device);
        self.devices.set_images(Arc::default());
        added
    }

    /// Asks the guest to give up the slot of a device; [`MachineEvent::PciEjected`] follows when it has. Returns the
    /// names of all devices in that slot, which leave together.
    pub fn remove_device(&mut self, id: &str) -> Result<Vec<String>, MachineError> {
        let slot = self.devices.removable(id)?;
        self.platform.pci.request_eject(slot);
        self.notify(Notification::PCI)?;
        Ok(self.devices.ids_in(slot))
    }

    /// Withdraws [`Machine::remove_device`] if the guest has not seen the request yet. Returns the names of all devices
    /// that stay, and whether the guest will never see the request.
    pub fn keep_device(&mut self, id: &str) -> Result<(Vec<String>, bool), MachineError> {
        let slot = self.devices.removable(id)?;
        let was_unread = self.platform.pci.withdraw_request(slot);
        Ok((self.devices.ids_in(slot), was_unread))
    }

    /// Removes everything in the slot of a device without asking the guest, which is notified afterwards. Returns the
    /// names of all removed devices.
    pub fn tear_out(&mut self, id: &str) -> Result<Vec<String>, MachineError> {
        let slot = self.devices.removable(id)?;
        let gone = self.devices.remove_in(slot)?;
        self.torn_out.insert(slot);
        self.platform.pci.request_eject(slot);
        self.notify(Notification::PCI)?;
        Ok(gone)
    }

    /// Handles that the guest has given up a slot: removes the devices in it and returns their names, that of function
    /// 0 last.
    pub fn ejected(&mut self, slot: Bdf) -> Result<Vec<String>, MachineError> {
        if !self.torn_out.remove(&slot) {
            // The request does not apply to a device that is plugged into this slot later.
            self.platform.pci.withdraw_request(slot);
            return self.devices.remove_in(slot);
        }
        // The guest's response to `tear_out`. If a device has been plugged into the slot since then, the guest mistook
        // it for the one that it has released just now, so announce it again.
        if !self.devices.ids_in(slot).is_empty() {
            self.platform.pci.announce(slot);
            self.notify(Notification::PCI)?;
        }
        Ok(Vec::new())
    }

    /// Presses the power button.
    pub fn power_button(&self) -> Result<(), MachineError> {
        self.notify(Notification::POWER_BUTTON)
    }

    /// To be called when the timer of [`EventSender::watchdog`](events::EventSender::watchdog) has ended. Returns whether
    /// the watchdog resets the machine.
    pub fn take_watchdog_expiry(&self) -> bool {
        let watchdog = self.platform.watchdog();
        watchdog.is_some_and(::devices::acpi::Watchdog::take_expiry)
    }

    /// Tells the guest the new size of the terminal that Gantry was started from, in case it has changed.
    pub fn window_changed(&self) {
        self.consoles.window_changed(&self.devices);
    }

    /// Raises a non-maskable interrupt on every vCPU.
    pub fn nmi(&mut self) -> Result<(), MachineError> {
        Ok(self.cpus.nmi()?)
    }

    /// Counters of all devices by name, and of all vCPUs as `_cpu0` and so on.
    pub fn counters(&self) -> BTreeMap<String, BTreeMap<&'static str, u64>> {
        let mut counters = self.devices.counters();
        let vcpus = self.cpus.counters();
        counters
            .extend(vcpus.map(|(index, all)| (format!("_cpu{index}"), all.into_iter().collect())));
        counters
    }

    /// Starts and finishes resets that the guest has requested, without blocking on slow ones.
    pub fn go_on_with_resets(&mut self) {
        self.devices.go_on_with_resets();
    }

    /// The devices on PCI.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Whether its end waits for nothing but what works: the snapshot's storage answers, if memory is being restored from it
    /// on demand. This waits for it for a second at most.
    pub fn has_its_memory(&self) -> bool {
        self.lazy.as_ref().is_none_or(LazyRestore::answers)
    }

    /// Fails if a device may wait for memory that is being restored on demand, and the snapshot's storage has not answered
    /// since `question` was asked first.
    pub fn check_memory_comes(&self, question: &mut Question) -> Result<(), MachineError> {
        let lazy = self.lazy.as_ref();
        match lazy.is_none_or(|lazy| lazy.brings(question)) {
            true => Ok(()),
            false => Err(MachineError::MemoryAwaited),
        }
    }

    /// To be called before the end of a machine whose requests are held: that its memory is lost concerns nobody any more.
    pub fn needs_no_memory(&self) {
        if let Some(lazy) = &self.lazy {
            lazy.give_up();
        }
    }

    /// Whether memory is still being restored on demand.
    fn is_loading(&self) -> bool {
        self.lazy.as_ref().is_some_and(|lazy| !lazy.is_finished())
    }

    /// What saving the memory may leave out.
    fn untouched(&self) -> Untouched {
        match self.is_loading() {
            true => Untouched::Read,
            false => Untouched::Skip(Pagemap::open()),
        }
    }

    fn notify(&self, what: Notification) -> Result<(), MachineError> {
        self.platform
            .ged
            .notify(what)
            .map_err(|source| MachineError::Host {
                action: "raise an ACPI event",
                source,
            })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // However long it takes: its threads use the memory.
        while self.cpus.pause(cpu::ACCESS).is_err() {}
        self.consoles.stop();
    }
}

/// The configured devices that exist in the machine, in the order in which they are plugged in.
fn present(config: &mut VmConfig) -> impl Iterator<Item = &mut dyn Device> {
    let devices = config.all_devices_mut().into_iter();
    devices.filter(|device| device.is_present())
}

/// The regions of RAM that virtio-mem manages.
fn virtio_mem(ram: &Ram) -> impl Iterator<Item = &Region> {
    let regions = ram.regions().iter();
    regions.filter(|region| region.kind == RegionKind::VirtioMem)
}

/// The virtio-mem devices of memory zones.
fn zone_memory(ram: &Ram, config: &VmConfig) -> Vec<ZoneMemory> {
    let zones = placement::zones(&config.memory);
    virtio_mem(ram)
        .map(|region| {
            let zone = zones.iter().find(|zone| zone.id == region.zone);
            ZoneMemory::new(region, zone)
        })
        .collect()
}

/// The layout of RAM, devices and hot-pluggable memory.
fn address_map(config: &VmConfig, phys_bits: u8) -> Result<AddressMap, MachineError> {
    let map = AddressMap::with_root_ports(
        placement::boot_size(config),
        placement::hotplug_size(config),
        phys_bits,
        &config.root_ports(),
    )?;
    let server = config.accel_server.as_ref();
    Ok(match server.and_then(AccelServerConfig::hole) {
        Some((start, end)) => map.with_hole(AddressRange::from_bounds(start, end))?,
        None => map,
    })
}

/// Tracks which virtio-mem blocks are plugged.
fn discards(ram: &Ram) -> Arc<Discards> {
    let discards = Arc::new(Discards::default());
    for region in virtio_mem(ram) {
        let len = region.mapping.size() as u64;
        discards.blocks().manage(region.guest, len);
    }
    discards
}

fn profile(cpus: &CpusConfig) -> Result<Profile, MachineError> {
    let unknown = |error: arch::cpuid::UnknownProfile| MachineError::Invalid(error.to_string());
    cpus.profile.parse().map_err(unknown)
}

/// The CPUID that the guest sees.
fn shown_cpuid(
    config: &VmConfig,
    topology: Topology,
    profile: Profile,
    phys_bits: u8,
) -> arch::cpuid::Config {
    arch::cpuid::Config {
        topology,
        profile,
        phys_bits,
        // A vCPU that uses the gate has a single VMCS.
        nested: config.cpus.nested && !config.has_gate(),
        gate: config.has_gate(),
        amx: config.cpus.features.amx,
        tsc_khz: None,
    }
}

/// The configured vCPU topology; by default, all vCPUs in one package.
fn topology(cpus: &CpusConfig) -> Result<Topology, MachineError> {
    let topology = match &cpus.topology {
        Some(t) => Topology::new(
            t.threads_per_core,
            t.cores_per_die,
            t.dies_per_package,
            t.packages,
        )?,
        // Numbers that do not fit into a u16 are rejected there, as 65,535 is.
        None => Topology::flat(u16::try_from(cpus.max_vcpus).unwrap_or(u16::MAX))?,
    };
    if topology.vcpus() != cpus.max_vcpus {
        return Err(MachineError::Invalid(format!(
            "the CPU topology has {} vCPUs, cpus.max_vcpus says {}: make them equal",
            topology.vcpus(),
            cpus.max_vcpus
        )));
    }
    Ok(topology)
}

/// Adds the port for firmware debug output, if it is configured.
fn plug_debug_console(
    config: &VmConfig,
    backends: &consoles::Backends,
    buses: &Buses,
) -> Result<(), MachineError> {
    if let Some(backend) = &backends.debug {
        let port = config.debug_console.iobase;
        let port = port.unwrap_or(arch::layout::DEBUG_CONSOLE_PORT);
        let console = DebugConsole::new(Box::new(backend.output()));
        buses.pio.insert(port.into(), 1, Arc::new(console))?;
    }
    Ok(())
}

fn rate_limit_groups(
    config: &VmConfig,
) -> Result<BTreeMap<String, SharedRateLimiter>, MachineError> {
    config
        .rate_limit_groups
        .iter()
        .flatten()
        .map(|group| {
            let limiter = kinds::disk::rate_limiter(&group.rate_limiter_config);
            let failed = |source| MachineError::Device {
                kind: "rate limit group",
                id: group.id.clone(),
                source: Box::new(source),
            };
            Ok((group.id.clone(), limiter.map_err(failed)?))
        })
        .collect()
}

fn affinity(cpus: &CpusConfig) -> BTreeMap<u32, Vec<usize>> {
    cpus.affinity
        .iter()
        .flatten()
        .map(|affinity| (affinity.vcpu, affinity.host_cpus.clone()))
        .collect()
}
