//! The machine: memory, buses, processors and devices put together.
//!
//! ```text
//!   VmConfig ──assemble──> Machine ──load────> kernel in memory, vCPUs at its entry ─┐
//!                             │                                                       ├─ resume
//!                             └────restore───> memory, devices, vCPUs as saved ──────┘
//! ```
//!
//! - [`platform`]: fixed devices; [`devices`]: those on PCI, each kind in [`kinds`].
//! - [`boot`]: kernel, ACPI and SMBIOS; [`placement`] and [`numa`]: which memory goes where.
//! - [`save`]: snapshots; `coredump`: a dump for debuggers; `resize`: machines that grow; `gate`:
//!   machines that stand still and serve.
//! - [`moving`]: machines that leave for another host, or come from one, and [`applications`] of
//!   accelerators with them; [`handover`]: what goes with
//!   them to another process of this host.
//! - `resets`: what the guest resets, on a thread that may wait for it.
//! - [`events`]: what a machine reports to the control loop; [`alarms`]: what physical devices do.

pub mod alarms;
pub mod applications;
mod boot;
pub mod buses;
pub mod consoles;
mod coredump;
pub mod devices;
pub mod error;
pub mod events;
mod gate;
pub mod handover;
pub mod host;
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

use self::{
    buses::Buses,
    consoles::Consoles,
    devices::{Devices, Pluggable, SavedDevice, Surroundings, VirtualIommu},
    error::MachineError,
    events::MachineEvent,
    host::{Host, Shell},
    interrupts::{KvmDoorbells, KvmMsis},
    kinds::{iommu::Iommu, mem::ZoneMemory},
    physical::{Physical, Policy},
    platform::{Platform, PlatformSetup},
};
use crate::{
    config::{AccelServerConfig, CpusConfig, Device, HotplugMethod, VmConfig},
    cpu::{CpuSetup, Cpus},
    memory::{ExtraMemory, Ram, Region, RegionKind},
    snapshot::lazy::LazyRestore,
};

/// A virtual machine.
///
/// The order of the fields is the order in which they go away: first whoever touches guest
/// memory, memory last.
pub struct Machine {
    cpus: Cpus,
    consoles: Consoles,
    devices: Devices,
    /// The locks of the disks are another process's, or may be: the machine does not run before it has
    /// taken them.
    unlocked: bool,
    /// What its last move from host to host has cost beside its memory, if it has moved.
    last_move: Option<Duration>,
    /// Memory that is still on its way in; vCPUs and devices wait for it.
    lazy: Option<LazyRestore>,
    platform: Platform,
    /// Slots whose device was taken away before the guest has given it up.
    torn_out: BTreeSet<Bdf>,
    ram: Ram,
    topology: Topology,
    map: AddressMap,
    vm: Arc<Vm>,
}

impl Machine {
    /// A machine that is about to boot, paused. Devices without a name get one in `config`.
    pub fn boot(config: &mut VmConfig, host: Host) -> Result<Self, MachineError> {
        let mut machine = Self::assemble(config, host)?;
        machine.plug_all(config)?;
        // What was plugged before a reboot, or what the configuration starts with.
        let plugged = config.memory.hotplugged_size.unwrap_or(0);
        if config.memory.hotplug_method == HotplugMethod::Acpi && plugged > 0 {
            let wanted = placement::boot_size(config).saturating_add(plugged);
            machine.add_memory(config, wanted)?;
        }
        machine.load(config)?;
        Ok(machine)
    }

    /// A machine without devices on PCI and without vCPUs.
    fn assemble(config: &mut VmConfig, host: Host) -> Result<Self, MachineError> {
        let supported = host.shell.kvm.supported_cpuid()?;
        let phys_bits = arch::cpuid::phys_bits(supported.as_slice());
        let phys_bits = phys_bits.min(config.cpus.max_phys_bits.unwrap_or(u8::MAX));
        let map = address_map(config, phys_bits)?;
        let topology = topology(&config.cpus)?;
        let profile = profile(&config.cpus)?;
        let Shell { kvm, vm } = host.shell;
        let vm = Arc::new(vm);
        let mut ram = Ram::new(Arc::clone(&vm));
        if let Some(memory) = host.memory {
            ram.give(memory);
        }
        placement::add_boot_ram(&mut ram, &map, &config.memory)?;
        placement::add_virtio_mem(&mut ram, &map, &config.memory)?;
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
        // Before there is a physical device: it reaches only what is plugged.
        let discards = discards(&ram);
        let msi: Arc<dyn MsiController> = Arc::new(KvmMsis::new(Arc::clone(&vm)));
        let surroundings = Surroundings {
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
            ports: applications::Ports::default(),
            given: Arc::clone(&host.given),
        };
        let devices = Devices::new(&map, &buses, surroundings)?;
        let events = host.events.clone();
        let setup = CpuSetup {
            supported_cpuid: supported.as_slice().to_vec(),
            cpuid: shown_cpuid(config, topology, profile, phys_bits),
            affinity: affinity(&config.cpus),
            core_scheduling: config.cpus.core_scheduling,
            report: Arc::new(move |event| events.send(MachineEvent::Cpu(event))),
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
            platform,
            ram,
            topology,
            map,
            vm,
        })
    }

    fn plug_all(&mut self, config: &mut VmConfig) -> Result<(), MachineError> {
        let devices = &mut self.devices;
        // First, because its slot is fixed.
        if let Some(mut iommu) = Iommu::of(config) {
            devices.plug(&mut iommu)?;
        }
        for device in present(config) {
            device.plug(devices)?;
        }
        for mut zone in zone_memory(&self.ram, config) {
            self.devices.plug(&mut zone)?;
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
            device.restore(devices, saved)?;
        }
        for mut zone in zone_memory(&self.ram, config) {
            self.devices.restore(&mut zone, saved)?;
        }
        Ok(())
    }

    /// Lets devices and vCPUs run, with the locks of all disks.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        if self.unlocked {
            self.take_locks()?;
        }
        self.devices.resume()?;
        self.consoles.start(&self.platform, &self.devices)?;
        self.cpus.resume();
        Ok(())
    }

    /// After [`Machine::resume`]: waits until each vCPU is on its way into the guest.
    pub fn wait_running(&self) -> Result<(), MachineError> {
        Ok(self.cpus.wait_running()?)
    }

    /// Stops vCPUs, then devices. If one of them cannot be stopped, all go on. Resets that the guest
    /// has asked for end before that, which takes seconds at most for each.
    pub fn pause(&mut self) -> Result<(), MachineError> {
        self.cpus.pause();
        self.consoles.stop();
        self.devices.finish_resets();
        self.devices.pause().inspect_err(|_| {
            if let Err(error) = self.resume() {
                log::error!("after a pause that failed, the guest does not go on: {error}");
            }
        })
    }

    /// Prepares the end of the machine: waits in bounded time until no device asks the host for
    /// anything more. With an error all go on.
    pub fn quiesce(&self) -> Result<(), MachineError> {
        self.devices.quiesce()
    }

    /// Plugs a device into the running machine and tells the guest; of a slot with several functions
    /// when function 0 is there, which is the last to come.
    pub fn add_device(
        &mut self,
        device: &mut dyn Pluggable,
    ) -> Result<(String, Bdf), MachineError> {
        device.check_order(&self.devices)?;
        let (id, bdf) = device.plug(&mut self.devices)?;
        if bdf.function == 0 {
            self.platform.pci.announce(bdf);
            self.notify(Notification::PCI)?;
        }
        Ok((id, bdf))
    }

    /// Asks the guest to give up the slot of a device; [`MachineEvent::PciEjected`] follows when it
    /// has. Returns the names of all devices that leave with it.
    pub fn remove_device(&mut self, id: &str) -> Result<Vec<String>, MachineError> {
        let slot = self.devices.removable(id)?;
        self.platform.pci.request_eject(slot);
        self.notify(Notification::PCI)?;
        Ok(self.devices.ids_in(slot))
    }

    /// Withdraws [`Machine::remove_device`], as far as the guest has not heard of it. Returns the
    /// names of all devices that stay, and whether the guest will never hear of the request.
    pub fn keep_device(&mut self, id: &str) -> Result<(Vec<String>, bool), MachineError> {
        let slot = self.devices.removable(id)?;
        let was_unread = self.platform.pci.withdraw_request(slot);
        Ok((self.devices.ids_in(slot), was_unread))
    }

    /// Takes what is in the slot of a device away without asking the guest, which is told
    /// afterwards. Returns the names of all devices that have gone.
    pub fn tear_out(&mut self, id: &str) -> Result<Vec<String>, MachineError> {
        let slot = self.devices.removable(id)?;
        let gone = self.devices.remove_in(slot)?;
        self.torn_out.insert(slot);
        self.platform.pci.request_eject(slot);
        self.notify(Notification::PCI)?;
        Ok(gone)
    }

    /// The guest has given up what is in a slot: takes it away and returns the names, that of
    /// function 0 last.
    pub fn ejected(&mut self, slot: Bdf) -> Result<Vec<String>, MachineError> {
        if !self.torn_out.remove(&slot) {
            // Whoever comes into the slot next was not asked to go.
            self.platform.pci.withdraw_request(slot);
            return self.devices.remove_in(slot);
        }
        // The answer to `tear_out`. What has been plugged into the slot since then, the guest took
        // for the device that it has let go of now.
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

    /// The terminal that Gantry was started from may have another size now: tells the guest.
    pub fn window_changed(&self) {
        self.consoles.window_changed(&self.devices);
    }

    /// Raises a non-maskable interrupt on every vCPU.
    pub fn nmi(&mut self) -> Result<(), MachineError> {
        Ok(self.cpus.nmi()?)
    }

    /// Counters of all devices by their names, and of all vCPUs as `_cpu0` and so on.
    pub fn counters(&self) -> BTreeMap<String, BTreeMap<&'static str, u64>> {
        let mut counters = self.devices.counters();
        let vcpus = self.cpus.counters();
        counters
            .extend(vcpus.map(|(index, all)| (format!("_cpu{index}"), all.into_iter().collect())));
        counters
    }

    /// Begins and ends resets that the guest has asked for, without waiting for what takes time.
    pub fn go_on_with_resets(&mut self) {
        self.devices.go_on_with_resets();
    }

    /// The devices on PCI.
    pub fn devices(&self) -> &Devices {
        &self.devices
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
        self.cpus.pause();
        self.consoles.stop();
    }
}

/// The devices of a configuration that the machine has, in the order in which they are plugged.
fn present(config: &mut VmConfig) -> impl Iterator<Item = &mut dyn Device> {
    let devices = config.all_devices_mut().into_iter();
    devices.filter(|device| device.is_present())
}

/// The regions of RAM that virtio-mem plugs.
fn virtio_mem(ram: &Ram) -> impl Iterator<Item = &Region> {
    let regions = ram.regions().iter();
    regions.filter(|region| region.kind == RegionKind::VirtioMem)
}

/// The devices of zones that virtio-mem plugs.
fn zone_memory(ram: &Ram, config: &VmConfig) -> Vec<ZoneMemory> {
    let zones = placement::zones(&config.memory);
    virtio_mem(ram)
        .map(|region| {
            let zone = zones.iter().find(|zone| zone.id == region.zone);
            ZoneMemory::new(region, zone)
        })
        .collect()
}

/// Where RAM, devices and what is plugged later are.
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

/// What follows virtio-mem's blocks as they come and go.
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

/// What the guest is shown of the processor.
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
        // A vCPU of the gate has one VMCS.
        nested: config.cpus.nested && !config.has_gate(),
        gate: config.has_gate(),
        tsc_khz: None,
    }
}

/// The configured arrangement of vCPUs; without one, all in one package.
fn topology(cpus: &CpusConfig) -> Result<Topology, MachineError> {
    let topology = match &cpus.topology {
        Some(t) => Topology::new(
            t.threads_per_core,
            t.cores_per_die,
            t.dies_per_package,
            t.packages,
        )?,
        // Larger numbers than an u16 are refused there as well as 65,535.
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

/// Adds the port where firmware writes what it does, if it is wanted.
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
