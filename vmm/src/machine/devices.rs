//! Devices that can be plugged: one generic path for all of them.
//!
//! A kind of device describes itself in a file under [`kinds`](super::kinds) by implementing
//! [`DeviceKind`] for its configuration: where it wants to sit and how it is made. Everything else
//! (names, slots, plugging, removal, saving, restoring, counters) happens here, once.

use std::{
    collections::BTreeMap,
    fs::File,
    sync::Arc,
    time::{Duration, Instant},
};

use acpi_tables::Aml;
use arch::layout::{self, AddressMap};
use base::Unpoisoned;
use devices::{
    accel::moving,
    bus::Bus,
    console::ConsoleOutput,
    disk::Scope,
    doorbell::Doorbells,
    memory::{AddressSpace, GuestMemory},
    msi::MsiController,
    pci::{
        Bdf, CONFIG_PORTS_BASE, CONFIG_PORTS_LEN, ConfigPorts, Ecam, PciAml, PciError, PciSegment,
        PortWindows, Seat, SegmentConfig, SharedFunction, Window,
    },
    thread::ThreadSpawner,
    virtio::{
        VirtioDevice,
        blk::SharedRateLimiter,
        discard::Discards,
        iommu::Endpoints,
        pci::{VirtioPciFunction, VirtioPciResources},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    applications::Ports,
    buses::Buses,
    error::{DeviceError, MachineError},
    events::EventSender,
    handover::Given,
    kinds::{self, Handle},
    physical::Physical,
    resets::Resets,
};
use crate::config::{AccelConfig, CommonConfig, HasCommonConfig, VmConfig};

/// Where a device wants to sit.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    /// PCI segment; that of the root port, if there is a `parent`.
    pub segment: u16,
    /// Name of the root port behind which it sits.
    pub parent: Option<String>,
    /// Device number, 1 to 31; the first free one if absent.
    pub device: Option<u8>,
    /// Function of that slot, 0 to 7.
    pub function: u8,
    /// It is to be behind the virtual IOMMU: the segment has to be.
    pub iommu: bool,
}

impl Slot {
    /// Function 0 of a slot on its segment's own bus.
    pub fn at(common: &CommonConfig) -> Self {
        Self {
            segment: common.pci_segment,
            device: common.pci_device_id,
            ..Self::default()
        }
    }
}

/// The virtual IOMMU of a machine.
pub struct VirtualIommu {
    /// What the guest maps for the devices behind it.
    pub endpoints: Endpoints,
    /// The segments behind it.
    pub segments: Vec<u16>,
}

impl VirtualIommu {
    /// That of a configuration, if it has one.
    pub fn of(config: &VmConfig) -> Option<Self> {
        let segments = config.iommu_segments();
        (!segments.is_empty()).then(|| Self {
            endpoints: Endpoints::new(),
            segments: segments.to_vec(),
        })
    }
}

/// What a device may use while it is made.
pub struct Surroundings {
    /// Starts its threads.
    pub spawner: Arc<dyn ThreadSpawner>,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiController>,
    /// Doorbells.
    pub doorbells: Arc<dyn Doorbells>,
    /// Places memory of its own in the guest.
    pub address_space: Arc<dyn AddressSpace>,
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Output of the virtio console and its columns and rows, if there is one.
    pub console: Option<(ConsoleOutput, Option<(u16, u16)>)>,
    /// Gives guest RAM back to the host.
    pub discards: Arc<Discards>,
    /// What physical devices need.
    pub physical: Physical,
    /// The virtual IOMMU, if there is one.
    pub iommu: Option<VirtualIommu>,
    /// Where devices report what the control loop has to act on.
    pub events: EventSender,
    /// The machine comes from another host, which has the locks of the disks still.
    pub arriving: bool,
    /// What the snapshot that the machine comes from has of accelerators' applications.
    pub archive: Option<Arc<File>>,
    /// Accelerators' ports that workers have taken applications up by before it came.
    pub ports: Ports,
    /// Sockets and taps that come with it from another process of this host.
    pub given: Arc<Given>,
    /// Limits that several disks share, by name.
    pub rate_limit_groups: BTreeMap<String, SharedRateLimiter>,
}

/// A device, ready to be plugged.
pub struct Made {
    /// The device.
    pub function: MadeFunction,
    /// Reaches it while it is plugged.
    pub handle: Handle,
}

/// What is plugged into a slot.
pub enum MadeFunction {
    /// A virtio device, which gets a PCI function around it.
    Virtio(Box<dyn VirtioDevice>),
    /// A function of its own.
    Pci(SharedFunction),
}

/// A kind of device, implemented by its configuration.
pub trait DeviceKind: HasCommonConfig {
    /// What it is called in made-up names (`_disk0`) and in names of threads.
    const NAME: &'static str;

    /// What it is called in messages.
    const CALLED: &'static str = Self::NAME;

    /// Whether a running guest can lose it.
    const REMOVABLE: bool = true;

    /// Whether it can sit in a segment behind the virtual IOMMU.
    const BEHIND_IOMMU: bool = false;

    /// Where it wants to sit.
    fn slot(&self) -> Slot {
        Slot::at(self.common())
    }

    /// Makes the device. `id` is its name.
    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError>;
}

/// A configured device of any kind.
pub trait Pluggable {
    /// Refuses what comes too late: see [`Devices::check_order`].
    fn check_order(&self, devices: &Devices) -> Result<(), MachineError>;

    /// Makes it and plugs it in. Gives it a name if it has none; returns that and where it is.
    fn plug(&mut self, devices: &mut Devices) -> Result<(String, Bdf), MachineError>;

    /// Makes it as it was saved and plugs it in where it was.
    fn restore(
        &mut self,
        devices: &mut Devices,
        saved: &mut BTreeMap<String, SavedDevice>,
    ) -> Result<(), MachineError>;
}

impl<K: DeviceKind> Pluggable for K {
    fn check_order(&self, devices: &Devices) -> Result<(), MachineError> {
        devices.check_order(&self.slot())
    }

    fn plug(&mut self, devices: &mut Devices) -> Result<(String, Bdf), MachineError> {
        devices.plug(self)
    }

    fn restore(
        &mut self,
        devices: &mut Devices,
        saved: &mut BTreeMap<String, SavedDevice>,
    ) -> Result<(), MachineError> {
        devices.restore(self, saved)
    }
}

/// A device that is plugged in.
pub struct Plugged {
    /// Kind of device.
    pub kind: &'static str,
    /// Where it is.
    pub bdf: Bdf,
    /// Reaches it.
    pub handle: Handle,
    /// Whether a running guest can lose it.
    pub removable: bool,
    function: SharedFunction,
}

impl Plugged {
    /// Whether the process that serves it is gone, or of no use any more.
    pub fn is_lost(&self) -> bool {
        match &self.handle {
            Handle::User(device) => device.upgrade().is_some_and(|device| !device.is_alive()),
            _ => false,
        }
    }
}

/// Saved state of a plugged device.
#[derive(Serialize, Deserialize)]
pub struct SavedDevice {
    /// Its name.
    pub id: String,
    /// Where it is.
    pub bdf: String,
    /// State of function and device.
    pub state: Value,
}

/// PCI segments and all that is plugged into them.
pub struct Devices {
    segments: Vec<Arc<PciSegment>>,
    ports: Arc<ConfigPorts>,
    aml: PciAml,
    resources: VirtioPciResources,
    surroundings: Surroundings,
    plugged: BTreeMap<String, Plugged>,
    /// Removed, but perhaps still used by a vCPU.
    leaving: Vec<SharedFunction>,
    resets: Resets,
    pio: Arc<Bus>,
    mmio: Arc<Bus>,
}

impl Devices {
    /// Empty segments, on the buses.
    pub fn new(
        map: &AddressMap,
        buses: &Buses,
        surroundings: Surroundings,
    ) -> Result<Self, MachineError> {
        let mut segments = Vec::new();
        let mut described = Vec::new();
        let resets = Resets::new(surroundings.events.clone());
        for number in 0..map.segments() {
            let Some(windows) = map.segment(number) else {
                break;
            };
            let window = |range: layout::AddressRange| {
                (!range.is_empty()).then(|| Window {
                    first: range.start,
                    last: range.end() - 1,
                })
            };
            let config = SegmentConfig {
                segment: number,
                mmio32: window(windows.mmio32),
                mmio64: window(windows.mmio64),
                io: (number == 0).then(|| Window {
                    first: layout::PCI_IO_START.into(),
                    last: layout::PCI_IO_LAST.into(),
                }),
                ports: (1..)
                    .map_while(|bus| Some((bus, map.bus(number, bus)?)))
                    .map(|(bus, windows)| PortWindows {
                        mmio32: window(windows.mmio32),
                        mmio64: window(windows.mmio64),
                        io: window(map.io(number, bus)),
                    })
                    .collect(),
            };
            described.push(config.clone());
            let segment = PciSegment::new(config, Arc::clone(&buses.mmio), Arc::clone(&buses.pio));
            buses
                .mmio
                .insert(windows.ecam.start, windows.ecam.size, Ecam::new(&segment))?;
            segment.on_reset(resets.handler());
            segments.push(segment);
        }
        let Some(first) = segments.first() else {
            return Err(MachineError::NoSegment {
                segment: 0,
                count: 0,
            });
        };
        let ports = ConfigPorts::new(first);
        buses
            .pio
            .insert(CONFIG_PORTS_BASE, CONFIG_PORTS_LEN, ports.clone())?;
        let resources = VirtioPciResources {
            memory: surroundings.memory.clone(),
            msi: Arc::clone(&surroundings.msi),
            doorbells: Arc::clone(&surroundings.doorbells),
        };
        Ok(Self {
            segments,
            ports,
            aml: PciAml {
                segments: described,
                ports: Vec::new(),
                lines: layout::PCI_INTX_GSI,
                hotplug: layout::PCI_HOTPLUG_START,
            },
            resources,
            surroundings,
            plugged: BTreeMap::new(),
            leaving: Vec::new(),
            resets,
            pio: Arc::clone(&buses.pio),
            mmio: Arc::clone(&buses.mmio),
        })
    }

    /// What the DSDT says about PCI.
    pub fn aml(&self) -> Vec<u8> {
        let ports = self.segments.iter().flat_map(|segment| segment.ports());
        let aml = PciAml {
            ports: ports.collect(),
            ..self.aml.clone()
        };
        let mut bytes = Vec::new();
        aml.to_aml_bytes(&mut bytes);
        bytes
    }

    /// Makes a device and plugs it in. Gives it a name if it has none.
    pub fn plug<K: DeviceKind>(&mut self, config: &mut K) -> Result<(String, Bdf), MachineError> {
        let (segment, seat) = self.seat(&config.slot())?;
        self.plug_at(config, &segment, seat, None)
    }

    /// Makes a device as it was saved and plugs it in where it was.
    pub fn restore<K: DeviceKind>(
        &mut self,
        config: &mut K,
        saved: &mut BTreeMap<String, SavedDevice>,
    ) -> Result<(), MachineError> {
        let id = config.common().id.clone().unwrap_or_default();
        let found = saved.remove(&id).ok_or_else(|| {
            MachineError::SnapshotMismatch(format!("no state of {} {id:?}", K::CALLED))
        })?;
        let bdf: Bdf = found.bdf.parse().map_err(|_| {
            MachineError::SnapshotMismatch(format!("{:?} is not a slot for {id:?}", found.bdf))
        })?;
        let segment = Arc::clone(self.segment(bdf.segment)?);
        self.plug_at(config, &segment, Seat::from(bdf), Some(found.state))?;
        Ok(())
    }

    /// Where a slot is.
    fn seat(&self, slot: &Slot) -> Result<(Arc<PciSegment>, Seat), MachineError> {
        let seat = |bus| Seat {
            bus,
            device: slot.device,
            function: slot.function,
        };
        let Some(parent) = &slot.parent else {
            return Ok((Arc::clone(self.segment(slot.segment)?), seat(0)));
        };
        let port = self.plugged.get(parent);
        let port = port.ok_or_else(|| MachineError::NoRootPort(parent.clone()))?;
        let segment = self.segment(port.bdf.segment)?;
        let bus = self.bus_behind(port);
        let bus = bus.ok_or_else(|| MachineError::NoRootPort(parent.clone()))?;
        Ok((Arc::clone(segment), seat(bus)))
    }

    /// The bus behind a root port; `None` if it is something else.
    fn bus_behind(&self, device: &Plugged) -> Option<u8> {
        let segment = self.segment(device.bdf.segment).ok()?;
        let mut ports = segment.ports().into_iter();
        let (_, bus) = ports.find(|(at, _)| *at == device.bdf)?;
        Some(bus)
    }

    /// The names of the devices behind a root port.
    pub fn behind(&self, port: &Plugged) -> Vec<String> {
        let Some(bus) = self.bus_behind(port) else {
            return Vec::new();
        };
        let is_there =
            |device: &Plugged| device.bdf.segment == port.bdf.segment && device.bdf.bus == bus;
        let plugged = self.plugged.iter().filter(|(_, device)| is_there(device));
        plugged.map(|(id, _)| id.clone()).collect()
    }

    /// Refuses a function of a slot that a running guest would not look for: it has seen the slot,
    /// and seen that there is no such function.
    pub fn check_order(&self, slot: &Slot) -> Result<(), MachineError> {
        let (segment, seat) = self.seat(slot)?;
        let at = Bdf {
            segment: segment.config().segment,
            bus: seat.bus,
            device: seat.device.unwrap_or(0),
            function: 0,
        };
        let is_named = seat.bus > 0 || seat.device.is_some();
        if seat.function > 0 && is_named && segment.function(at).is_some() {
            return Err(MachineError::TooLate {
                function: seat.function,
                slot: at,
            });
        }
        Ok(())
    }

    fn plug_at<K: DeviceKind>(
        &mut self,
        config: &mut K,
        segment: &PciSegment,
        seat: Seat,
        saved: Option<Value>,
    ) -> Result<(String, Bdf), MachineError> {
        let id = match &config.common().id {
            Some(id) => id.clone(),
            None => self.free_id(K::NAME),
        };
        if self.plugged.contains_key(&id) {
            return Err(MachineError::DuplicateId(id));
        }
        self.resets.wait(&self.segments);
        self.reclaim();
        self.check_iommu::<K>(&config.slot(), segment)?;
        let made = config
            .make(&id, &self.surroundings)
            .map_err(|source| MachineError::Device {
                kind: K::CALLED,
                id: id.clone(),
                source: Box::new(source),
            })?;
        let function: SharedFunction = match made.function {
            MadeFunction::Pci(function) => function,
            MadeFunction::Virtio(device) => {
                let function = VirtioPciFunction::new(device, self.resources.clone());
                let function = function.map_err(|source| MachineError::Function {
                    id: id.clone(),
                    source,
                })?;
                Arc::new(std::sync::Mutex::new(function))
            }
        };
        let shared = Arc::clone(&function);
        let bdf = match saved {
            Some(state) => segment.plug_saved(shared, seat, state),
            None => segment.plug(shared, seat, &[]),
        }
        .map_err(|source| MachineError::Pci {
            id: id.clone(),
            source,
        })?;
        let plugged = Plugged {
            kind: K::NAME,
            bdf,
            handle: made.handle,
            removable: K::REMOVABLE,
            function,
        };
        self.plugged.insert(id.clone(), plugged);
        config.common_mut().id = Some(id.clone());
        Ok((id, bdf))
    }

    /// Behind the virtual IOMMU there is all that is to be there, and nothing that cannot.
    fn check_iommu<K: DeviceKind>(
        &self,
        slot: &Slot,
        segment: &PciSegment,
    ) -> Result<(), MachineError> {
        let segment = segment.config().segment;
        let iommu = self.surroundings.iommu.as_ref();
        let segments = iommu.map_or(&[][..], |iommu| &iommu.segments);
        match segments.contains(&segment) {
            true if !K::BEHIND_IOMMU => Err(MachineError::BehindIommu {
                kind: K::CALLED,
                segment,
            }),
            false if slot.iommu && segments.is_empty() => Err(MachineError::NoIommu),
            false if slot.iommu => Err(MachineError::NotBehindIommu {
                segment,
                behind: segments.to_vec(),
            }),
            _ => Ok(()),
        }
    }

    /// A name that no device has: `_disk0`, `_disk1` ...
    fn free_id(&self, kind: &str) -> String {
        let mut number = 0;
        loop {
            let id = format!("_{kind}{number}");
            if !self.plugged.contains_key(&id) {
                return id;
            }
            number += 1;
        }
    }

    fn segment(&self, number: u16) -> Result<&Arc<PciSegment>, MachineError> {
        let count = self.segments.len() as u16;
        self.segments
            .get(usize::from(number))
            .ok_or(MachineError::NoSegment {
                segment: number,
                count,
            })
    }

    /// The device of that name.
    pub fn get(&self, id: &str) -> Option<&Plugged> {
        self.plugged.get(id)
    }

    /// The slot of a device that a running guest can lose, with all that is in that slot.
    pub fn removable(&self, id: &str) -> Result<Bdf, MachineError> {
        let device = self
            .plugged
            .get(id)
            .ok_or_else(|| MachineError::NoDevice(id.to_owned()))?;
        match self.not_removable(device.bdf) {
            Some(id) => Err(MachineError::NotRemovable(id.clone())),
            None => Ok(device.bdf.slot()),
        }
    }

    /// A device of a slot without which the machine is another one.
    fn not_removable(&self, slot: Bdf) -> Option<&String> {
        let mut devices = self.in_slot(slot).filter(|(_, device)| !device.removable);
        devices.next().map(|(id, _)| id)
    }

    fn in_slot(&self, slot: Bdf) -> impl Iterator<Item = (&String, &Plugged)> {
        let plugged = self.plugged.iter();
        plugged.filter(move |(_, device)| device.bdf.slot() == slot.slot())
    }

    /// The names of the devices in a slot, that of function 0 last: in this order they can be
    /// plugged into a running machine.
    pub fn ids_in(&self, slot: Bdf) -> Vec<String> {
        let mut devices: Vec<_> = self.in_slot(slot).collect();
        devices.sort_by_key(|(_, device)| std::cmp::Reverse(device.bdf.function));
        devices.into_iter().map(|(id, _)| id.clone()).collect()
    }

    /// The guest gives up the devices in a slot, asked or not: unplugs them and returns their names
    /// as [`Devices::ids_in`]. If the machine would be another one without one of them, all stay.
    pub fn remove_in(&mut self, slot: Bdf) -> Result<Vec<String>, MachineError> {
        if self.not_removable(slot).is_some() {
            return Ok(Vec::new());
        }
        quiesce(&self.in_slot(slot).collect::<Vec<_>>())?;
        let ids = self.ids_in(slot);
        ids.iter().try_for_each(|id| self.remove(id))?;
        Ok(ids)
    }

    /// Unplugs a device without asking the guest. One whose storage does not answer stays.
    pub fn remove(&mut self, id: &str) -> Result<(), MachineError> {
        self.resets.wait(&self.segments);
        if let Some(device) = self.plugged.get_key_value(id) {
            quiesce(&[device])?;
        }
        let device = self
            .plugged
            .remove(id)
            .ok_or_else(|| MachineError::NoDevice(id.to_owned()))?;
        self.segment(device.bdf.segment)?
            .unplug(device.bdf)
            .map_err(|source| MachineError::Pci {
                id: id.to_owned(),
                source,
            })?;
        self.leaving.push(device.function);
        // A vCPU that has just looked at the slot or at a register may hold the device for a moment
        // longer. It is never the last one: closing down what a device has on the host is not for
        // it.
        let patience = Instant::now() + Duration::from_secs(1);
        while !self.reclaim() && Instant::now() < patience {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Drops removed devices that no vCPU uses any more; false if there are others.
    fn reclaim(&mut self) -> bool {
        self.leaving
            .retain(|function| Arc::strong_count(function) > 1);
        let [pio, mmio] = [&self.pio, &self.mmio].map(|bus| bus.reclaim());
        self.leaving.is_empty() && pio && mmio
    }

    /// All devices by name.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Plugged)> {
        self.plugged.iter()
    }

    /// Closes what came with the machine from another process, and is in no device.
    pub fn close_given(&self) {
        self.surroundings.given.close();
    }

    /// Lets physical devices reach the memory of others, where the guest sees it now.
    pub fn map_peers(&self) {
        self.surroundings.physical.map_peers();
    }

    /// Begins and ends resets that the guest has asked for, without waiting for what takes time.
    pub fn go_on_with_resets(&mut self) {
        let spawner = &*self.surroundings.spawner;
        self.resets.go_on(&self.segments, spawner);
    }

    /// Carries out all resets that the guest has asked for. vCPUs stand still.
    pub fn finish_resets(&mut self) {
        let spawner = &*self.surroundings.spawner;
        self.resets.finish(&self.segments, spawner);
    }

    /// Lets physical devices reach RAM that was added.
    pub fn memory_changed(&self) -> Result<(), MachineError> {
        let changed = self.surroundings.physical.memory_changed();
        changed.map_err(|source| MachineError::PhysicalMemory(Box::new(source)))
    }

    /// Counters of all devices.
    pub fn counters(&self) -> BTreeMap<String, BTreeMap<&'static str, u64>> {
        self.plugged
            .iter()
            .map(|(id, device)| {
                let counters = lock(&device.function).counters().into_iter().collect();
                (id.clone(), counters)
            })
            .filter(|(_, counters): &(_, BTreeMap<_, _>)| !counters.is_empty())
            .collect()
    }

    /// The disks, by name.
    fn disks(&self) -> impl Iterator<Item = (&String, &devices::virtio::blk::Handle)> {
        self.plugged
            .iter()
            .filter_map(|(id, device)| match &device.handle {
                Handle::Disk(disk) => Some((id, disk)),
                _ => None,
            })
    }

    /// The disks whose locks tell who may run the machine: they are exclusive, as far as `among` goes.
    pub fn exclusive_disks(&self, among: Scope) -> impl Iterator<Item = &String> {
        let disks = self.disks();
        disks.filter_map(move |(id, disk)| disk.is_exclusive(among).then_some(id))
    }

    /// Takes the locks of all disks, or none.
    pub fn lock_disks(&mut self) -> Result<(), MachineError> {
        for (id, disk) in self.disks() {
            if let Err(source) = disk.lock() {
                let id = id.clone();
                self.unlock_disks()?;
                return Err(MachineError::Device {
                    kind: "disk",
                    id,
                    source: Box::new(DeviceError::of(devices::virtio::blk::Error::Disk(source))),
                });
            }
        }
        self.surroundings.arriving = false;
        Ok(())
    }

    /// Gives the locks of all disks up. The machine must not run until it has them again.
    pub fn unlock_disks(&self) -> Result<(), MachineError> {
        for (id, disk) in self.disks() {
            disk.unlock().map_err(|source| MachineError::Device {
                kind: "disk",
                id: id.clone(),
                source: Box::new(DeviceError::of(devices::virtio::blk::Error::Disk(source))),
            })?;
        }
        Ok(())
    }

    /// Puts what the guest has written to its disks where another host finds it.
    pub fn flush_disks(&self) -> Result<(), MachineError> {
        for (_, disk) in self.disks() {
            disk.flush().map_err(|source| MachineError::Host {
                action: "flush a disk",
                source,
            })?;
        }
        Ok(())
    }

    /// Stops all devices.
    pub fn pause(&self) -> Result<(), MachineError> {
        self.each(|function| function.pause())
    }

    /// Lets all devices go on.
    pub fn resume(&self) -> Result<(), MachineError> {
        self.each(|function| function.resume())
    }

    /// Prepares the end of all devices: waits in bounded time for what the host still writes to the
    /// guest's memory. If it does not come, all go on.
    pub fn quiesce(&self) -> Result<(), MachineError> {
        quiesce(&self.plugged.iter().collect::<Vec<_>>())
    }

    fn each(
        &self,
        step: impl Fn(&mut dyn devices::pci::PciFunction) -> Result<(), devices::pci::LifecycleError>,
    ) -> Result<(), MachineError> {
        for (id, device) in &self.plugged {
            step(&mut *lock(&device.function)).map_err(|source| MachineError::Lifecycle {
                id: id.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// Has all devices, paused, give up what keeps them from being saved.
    pub fn detach(&self) -> Result<(), MachineError> {
        self.each(|function| function.detach())
    }

    /// The accelerators whose applications are served by pools.
    pub fn ports(&self) -> Vec<(String, moving::Handle)> {
        let port = |(id, device): (&String, &Plugged)| match &device.handle {
            Handle::Accel(port) => Some((id.clone(), port.clone())),
            _ => None,
        };
        self.plugged.iter().filter_map(port).collect()
    }

    /// The port of an accelerator that has yet to come, for workers that take its applications up.
    pub fn stand_by(&self, accel: &AccelConfig) -> Result<moving::Handle, MachineError> {
        let id = accel.common().id.clone().unwrap_or_default();
        kinds::accel::stand_by(accel, &id, &self.surroundings).map_err(|source| {
            MachineError::Device {
                kind: AccelConfig::CALLED,
                id,
                source: Box::new(source),
            }
        })
    }

    /// What the machine that comes from elsewhere has of accelerators' applications; none once it is
    /// there: the archive takes the host's memory.
    pub fn set_archive(&mut self, archive: Option<File>) {
        self.surroundings.archive = archive.map(Arc::new);
    }

    /// State of all devices, paused.
    pub fn save(&self) -> Result<Vec<SavedDevice>, MachineError> {
        self.plugged
            .iter()
            .map(|(id, device)| {
                let state =
                    lock(&device.function)
                        .save()
                        .map_err(|source| MachineError::Lifecycle {
                            id: id.clone(),
                            source,
                        })?;
                Ok(SavedDevice {
                    id: id.clone(),
                    bdf: device.bdf.to_string(),
                    state,
                })
            })
            .collect()
    }

    /// The address latch of the configuration ports, for a snapshot.
    pub fn config_address(&self) -> u32 {
        self.ports.address()
    }

    /// Takes the saved address latch over.
    pub fn set_config_address(&self, address: u32) {
        self.ports.set_address(address);
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        self.resets.wait(&self.segments);
        for (id, device) in std::mem::take(&mut self.plugged) {
            let unplugged: Result<_, PciError> = match self.segment(device.bdf.segment) {
                Ok(segment) => segment.unplug(device.bdf).map(|_| ()),
                Err(_) => Ok(()),
            };
            if let Err(error) = unplugged {
                log::warn!("device {id:?} was not unplugged: {error}");
            }
        }
    }
}

/// Prepares the end of devices, by name. With an error all go on.
fn quiesce(devices: &[(&String, &Plugged)]) -> Result<(), MachineError> {
    for (held, (id, device)) in devices.iter().enumerate() {
        let quiesced = lock(&device.function).quiesce();
        quiesced.map_err(|source| {
            for (_, device) in &devices[..held] {
                lock(&device.function).carry_on();
            }
            MachineError::Lifecycle {
                id: (*id).clone(),
                source,
            }
        })?;
    }
    Ok(())
}

fn lock(
    function: &SharedFunction,
) -> std::sync::MutexGuard<'_, dyn devices::pci::PciFunction + 'static> {
    function.lock_unpoisoned()
}
