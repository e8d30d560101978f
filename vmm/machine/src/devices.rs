//! Pluggable devices: one generic path for all of them.
//!
//! A kind of device describes itself in a file under [`kinds`](super::kinds) by implementing [`DeviceKind`] for its
//! configuration: where it is to be placed and how it is created. Everything else (names, slots, plugging, removal,
//! saving, restoring, counters) is implemented here, once.

use std::{
    any::Any,
    collections::BTreeMap,
    fs::File,
    mem,
    sync::Arc,
    thread::{self, JoinHandle},
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
        BarKind, BarRequest, Bdf, CONFIG_PORTS_BASE, CONFIG_PORTS_LEN, ConfigPorts, Ecam,
        HostBridge, PciAml, PciError, PciSegment, PortWindows, Seat, SegmentConfig, SharedFunction,
        Window,
    },
    thread::ThreadSpawner,
    vhost_user::REMAP_PATIENCE,
    virtio::{
        VirtioDevice,
        blk::SharedRateLimiter,
        discard::Discards,
        iommu::Endpoints,
        pci::{BarPlace, VirtioPciFunction, VirtioPciResources},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmm_config::{AccelConfig, CommonConfig, Device, Field, HasCommonConfig, VmConfig};

use super::{
    applications::Ports,
    buses::Buses,
    device_pages::DevicePages,
    error::{DeviceError, MachineError},
    events::EventSender,
    handover::Given,
    images::Images,
    kinds::{self, Handle},
    physical::Physical,
    resets::Resets,
};

/// Requested location of a device.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    /// PCI segment; if there is a `parent`, the segment of that root port.
    pub segment: u16,
    /// Name of the root port behind which the device is placed.
    pub parent: Option<String>,
    /// Device number, 1 to 31; the first free one if `None`.
    pub device: Option<u8>,
    /// Function number within the slot, 0 to 7.
    pub function: u8,
    /// The device must be behind the virtual IOMMU, so its segment must be.
    pub iommu: bool,
}

impl Slot {
    /// Function 0 of a slot on the segment's root bus.
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
    /// The mappings that the guest makes for the devices behind it.
    pub endpoints: Endpoints,
    /// The segments behind it.
    pub segments: Vec<u16>,
}

impl VirtualIommu {
    /// The virtual IOMMU of a configuration, if it has one.
    pub fn of(config: &VmConfig) -> Option<Self> {
        let segments = config.iommu_segments();
        (!segments.is_empty()).then(|| Self {
            endpoints: Endpoints::new(),
            segments: segments.to_vec(),
        })
    }
}

/// Which devices are plugged in where firmware reaches them, below 4 GiB: it does not reach everything above.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reach {
    /// None.
    Nothing,
    /// Those that are [bootable](DeviceKind::BOOTABLE).
    Bootable,
    /// All virtio devices.
    Virtio,
}

/// What a device may use while it is being created.
pub struct Surroundings {
    /// Starts its threads.
    pub spawner: Arc<dyn ThreadSpawner>,
    /// Allocates interrupt vectors.
    pub msi: Arc<dyn MsiController>,
    /// Registers doorbells.
    pub doorbells: Arc<dyn Doorbells>,
    /// Maps the device's own memory into the guest's address space.
    pub address_space: Arc<dyn AddressSpace>,
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Output of the virtio console and its size in columns and rows, if there is one.
    pub console: Option<(ConsoleOutput, Option<(u16, u16)>)>,
    /// Returns guest RAM to the host.
    pub discards: Arc<Discards>,
    /// What physical devices share.
    pub physical: Physical,
    /// Pages of devices that accelerators show.
    pub device_pages: Arc<DevicePages>,
    /// The virtual IOMMU, if there is one.
    pub iommu: Option<VirtualIommu>,
    /// Where devices report what the control loop has to act on.
    pub events: EventSender,
    /// The machine comes from another host, which still holds the locks of the disks.
    pub arriving: bool,
    /// The archive of accelerators' applications in the snapshot that is being restored.
    pub archive: Option<Arc<File>>,
    /// Ports of accelerators through which workers have already restored applications, before the device arrives.
    pub ports: Ports,
    /// Disk images that are open already.
    pub images: Arc<Images>,
    /// Sockets and taps that another process of this host handed over with the machine.
    pub given: Arc<Given>,
    /// Rate limits that several disks share, by name.
    pub rate_limit_groups: BTreeMap<String, SharedRateLimiter>,
}

/// A newly created device, ready to be plugged in.
pub struct Made {
    /// The device.
    pub function: MadeFunction,
    /// Handle for operations on the device while it is plugged in.
    pub handle: Handle,
}

/// What is plugged into a slot.
pub enum MadeFunction {
    /// A virtio device, which is wrapped in a PCI function.
    Virtio(Box<dyn VirtioDevice>),
    /// A complete PCI function.
    Pci(SharedFunction),
}

/// A kind of device, implemented by its configuration.
pub trait DeviceKind: HasCommonConfig {
    /// Used in generated names (`_disk0`) and in the names of threads.
    const NAME: &'static str;

    /// Used in messages.
    const CALLED: &'static str = Self::NAME;

    /// Whether it can be placed in a segment behind the virtual IOMMU.
    const BEHIND_IOMMU: bool = false;

    /// Whether firmware boots from it.
    const BOOTABLE: bool = false;

    /// Where it is to be placed.
    fn slot(&self) -> Slot {
        Slot::at(self.common())
    }

    /// Whether another process maps the guest's RAM for it. What that process touches first is zero there, so all RAM
    /// must have been restored before.
    fn shares_ram(&self) -> bool {
        false
    }

    /// Creates the device. `id` is its name.
    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError>;
}

/// A configured device of any kind.
pub trait Pluggable {
    /// Refuses a device that is plugged in too late: see [`Devices::check_order`].
    fn check_order(&self, devices: &Devices) -> Result<(), MachineError>;

    /// See [`DeviceKind::shares_ram`].
    fn shares_ram(&self) -> bool;

    /// Creates the device and plugs it in. Gives it a name if it has none; returns the name and the address.
    fn plug(&mut self, devices: &mut Devices) -> Result<(String, Bdf), MachineError>;

    /// Creates the device from its saved state and plugs it in at its saved address.
    fn restore(
        &mut self,
        devices: &mut Devices,
        saved: &mut BTreeMap<String, SavedDevice>,
    ) -> Result<(), MachineError>;
}

/// Defines [`pluggable`] from the list of device kinds.
macro_rules! pluggable_kinds {
    ($(
        $(#[doc = $doc:literal])+
        $key:ident: $field:ty = $option:literal,
    )+) => {
        /// A configured device, as the machine plugs it in.
        ///
        /// # Panics
        /// The device is of no kind in the list, to which all kinds belong.
        pub fn pluggable(device: &mut dyn Device) -> &mut dyn Pluggable {
            let device: &mut dyn Any = device;
            $(
                if device.is::<<$field as Field>::Config>() {
                    let found = device.downcast_mut::<<$field as Field>::Config>();
                    return found.expect("its type was compared");
                }
            )+
            unreachable!("a device of no kind in the list");
        }
    };
}

vmm_config::for_each_kind!(pluggable_kinds);

impl<K: DeviceKind> Pluggable for K {
    fn check_order(&self, devices: &Devices) -> Result<(), MachineError> {
        devices.check_order(&self.slot())
    }

    fn shares_ram(&self) -> bool {
        DeviceKind::shares_ram(self)
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

/// A plugged-in device.
pub struct Plugged {
    /// Kind of device.
    pub kind: &'static str,
    /// Its PCI address.
    pub bdf: Bdf,
    /// Handle for operations on it.
    pub handle: Handle,
    /// Whether it can be removed from a running guest.
    pub removable: bool,
    /// A virtio device whose BAR is below 4 GiB, where firmware reaches it.
    is_reached: bool,
    function: SharedFunction,
}

impl Plugged {
    /// Whether the process that serves it is gone or has become unusable.
    pub fn is_lost(&self) -> bool {
        match &self.handle {
            Handle::User(device) => device.upgrade().is_some_and(|device| !device.is_alive()),
            Handle::BackEnd(device) => device.is_lost(),
            _ => false,
        }
    }
}

/// Saved state of a plugged device.
#[derive(Serialize, Deserialize)]
pub struct SavedDevice {
    /// Its name.
    pub id: String,
    /// Its PCI address.
    pub bdf: String,
    /// State of its PCI function and of the device itself.
    pub state: Value,
}

/// PCI segments and everything plugged into them.
pub struct Devices {
    segments: Vec<Arc<PciSegment>>,
    ports: Arc<ConfigPorts>,
    aml: PciAml,
    resources: VirtioPciResources,
    surroundings: Surroundings,
    plugged: BTreeMap<String, Plugged>,
    /// What is plugged in where firmware reaches it.
    reach: Reach,
    /// Removed, but possibly still in use by a vCPU.
    leaving: Vec<Plugged>,
    /// Threads that close what removed devices use on the host.
    closing: Vec<JoinHandle<()>>,
    resets: Resets,
    pio: Arc<Bus>,
    mmio: Arc<Bus>,
}

impl Devices {
    /// Creates empty segments and attaches them to the buses.
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
                nodes: Vec::new(),
            },
            resources,
            surroundings,
            plugged: BTreeMap::new(),
            reach: Reach::Nothing,
            leaving: Vec::new(),
            closing: Vec::new(),
            resets,
            pio: Arc::clone(&buses.pio),
            mmio: Arc::clone(&buses.mmio),
        })
    }

    /// Shows the host bridge that firmware expects, before the guest runs.
    pub fn show_firmware(&self) {
        if let Some(first) = self.segments.first() {
            first.set_host_bridge(HostBridge::for_firmware());
        }
    }

    /// Sets what is plugged in where firmware reaches it, from now on.
    pub fn set_reach(&mut self, reach: Reach) {
        self.reach = reach;
    }

    /// Whether a virtio device has been plugged in where firmware reaches it.
    pub fn are_reached(&self) -> bool {
        self.plugged.values().any(|device| device.is_reached)
    }

    /// The PCI part of the DSDT, with the NUMA nodes of segments as (segment, node).
    pub fn aml(&self, nodes: Vec<(u16, u32)>) -> Vec<u8> {
        let ports = self.segments.iter().flat_map(|segment| segment.ports());
        let aml = PciAml {
            ports: ports.collect(),
            nodes,
            ..self.aml.clone()
        };
        let mut bytes = Vec::new();
        aml.to_aml_bytes(&mut bytes);
        bytes
    }

    /// Creates a device and plugs it in. Gives it a name if it has none.
    pub fn plug<K: DeviceKind>(&mut self, config: &mut K) -> Result<(String, Bdf), MachineError> {
        let (segment, seat) = self.seat(&config.slot())?;
        self.plug_at(config, &segment, seat, None)
    }

    /// Creates a device from its saved state and plugs it in at its saved address.
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

    /// Resolves a slot to its segment and its place there.
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

    /// The bus behind a root port; `None` if the device is not a root port.
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

    /// Refuses a function that a running guest would not find: the guest has already scanned the slot and seen that
    /// this function does not exist.
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
        let is_virtio = matches!(made.function, MadeFunction::Virtio(_));
        let function: SharedFunction = match made.function {
            MadeFunction::Pci(function) => function,
            MadeFunction::Virtio(device) => {
                // Firmware sees segment 0 only.
                let is_reached = segment.config().segment == 0
                    && match self.reach {
                        Reach::Nothing => false,
                        Reach::Bootable => K::BOOTABLE,
                        Reach::Virtio => true,
                    };
                let bar = match is_reached {
                    true => BarPlace::Below4G,
                    false => BarPlace::Anywhere,
                };
                let function = VirtioPciFunction::new(device, self.resources.clone())
                    .and_then(|mut function| {
                        function.place_bar(bar)?;
                        Ok(function)
                    })
                    .map_err(|source| MachineError::Function {
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
        let is_low = |bar: BarRequest| matches!(bar.kind, BarKind::Memory32 { .. });
        let is_reached = is_virtio && lock(&function).config().bars().any(is_low);
        let plugged = Plugged {
            kind: K::NAME,
            bdf,
            is_reached,
            handle: made.handle,
            removable: config.is_removable(),
            function,
        };
        self.plugged.insert(id.clone(), plugged);
        config.common_mut().id = Some(id.clone());
        Ok((id, bdf))
    }

    /// Checks that everything that must be behind the virtual IOMMU is, and that nothing else is.
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

    /// A name that is not in use: `_disk0`, `_disk1` ...
    /// The name that a device of this kind gets that has none.
    pub fn free_id(&self, kind: &str) -> String {
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

    /// The device with this name.
    pub fn get(&self, id: &str) -> Option<&Plugged> {
        self.plugged.get(id)
    }

    /// The slot of a device that can be removed from a running guest. This includes everything in that slot.
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

    /// A device in a slot that cannot be removed without changing the machine itself.
    fn not_removable(&self, slot: Bdf) -> Option<&String> {
        let mut devices = self.in_slot(slot).filter(|(_, device)| !device.removable);
        devices.next().map(|(id, _)| id)
    }

    fn in_slot(&self, slot: Bdf) -> impl Iterator<Item = (&String, &Plugged)> {
        let plugged = self.plugged.iter();
        plugged.filter(move |(_, device)| device.bdf.slot() == slot.slot())
    }

    /// The names of the devices in a slot, that of function 0 last: in this order they can be plugged into a running
    /// machine.
    pub fn ids_in(&self, slot: Bdf) -> Vec<String> {
        let mut devices: Vec<_> = self.in_slot(slot).collect();
        devices.sort_by_key(|(_, device)| std::cmp::Reverse(device.bdf.function));
        devices.into_iter().map(|(id, _)| id.clone()).collect()
    }

    /// Unplugs the devices in a slot that the guest has given up, whether it was asked to or not. Returns their names
    /// in the order of [`Devices::ids_in`]. If one of them is not removable, all of them stay.
    pub fn remove_in(&mut self, slot: Bdf) -> Result<Vec<String>, MachineError> {
        if self.not_removable(slot).is_some() {
            return Ok(Vec::new());
        }
        quiesce(&self.in_slot(slot).collect::<Vec<_>>())?;
        let ids = self.ids_in(slot);
        ids.iter().try_for_each(|id| self.remove(id))?;
        Ok(ids)
    }

    /// Unplugs a device without asking the guest. A device whose storage does not respond stays.
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
        self.leaving.push(device);
        // A vCPU that has just looked up the slot or accessed a register may hold a reference for a moment longer. It
        // must never drop the last one: releasing a device's host resources is not a vCPU's job. Storage that works lets
        // go of them by then.
        let patience = Instant::now() + Duration::from_secs(1);
        while !self.reclaim() && Instant::now() < patience {
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Has a thread drop removed devices that no vCPU uses any more, as their storage may not answer; returns false if some
    /// are still in use, or being dropped.
    fn reclaim(&mut self) -> bool {
        // First, so that the buses do not have the last reference to a device.
        let [pio, mmio] = [&self.pio, &self.mmio].map(|bus| bus.reclaim());
        if !pio || !mmio {
            return false;
        }
        let leaving = mem::take(&mut self.leaving).into_iter();
        let (unused, used): (Vec<_>, _) =
            leaving.partition(|device| Arc::strong_count(&device.function) == 1);
        self.leaving = used;
        if !unused.is_empty() {
            let close = thread::Builder::new().name("_close".to_owned());
            // Without a thread they are dropped here.
            self.closing.extend(close.spawn(move || drop(unused)));
        }
        self.closing.retain(|thread| !thread.is_finished());
        self.leaving.is_empty() && self.closing.is_empty()
    }

    /// All devices by name.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Plugged)> {
        self.plugged.iter()
    }

    /// Closes descriptors that another process handed over and that no device has taken.
    pub fn close_given(&self) {
        self.surroundings.given.close();
    }

    /// Updates the DMA mappings of physical devices to each other's memory after the guest has moved it.
    pub fn map_peers(&self) {
        self.surroundings.physical.map_peers();
    }

    /// Starts and finishes resets that the guest has requested, without blocking on slow ones.
    pub fn go_on_with_resets(&mut self) {
        let spawner = &*self.surroundings.spawner;
        self.resets.go_on(&self.segments, spawner);
    }

    /// Carries out all resets that the guest has requested. vCPUs must be stopped.
    pub fn finish_resets(&mut self) {
        let spawner = &*self.surroundings.spawner;
        self.resets.finish(&self.segments, spawner);
    }

    /// Maps newly added RAM for DMA by physical devices, and in other processes. Those that do not answer soon are cut off.
    pub fn memory_changed(&self) -> Result<(), MachineError> {
        let changed = self.surroundings.physical.memory_changed();
        changed.map_err(|source| MachineError::PhysicalMemory(Box::new(source)))?;
        let until = Instant::now() + REMAP_PATIENCE;
        let back_ends = self.back_ends();
        let changes: Vec<_> = back_ends
            .filter_map(|(_, device)| device.memory_changed())
            .collect();
        changes.into_iter().for_each(|change| change.wait(until));
        Ok(())
    }

    /// Checks that other processes can map this many regions of RAM.
    pub fn check_regions(&self, regions: usize) -> Result<(), MachineError> {
        match self
            .back_ends()
            .find(|(_, device)| device.slots() < regions)
        {
            None => Ok(()),
            Some((id, device)) => Err(MachineError::Invalid(format!(
                "the VM would have {regions} regions of memory, and the back end of {id:?} maps at most {}: remove that \
                 device first (vm.remove-device), or start the VM with more memory",
                device.slots()
            ))),
        }
    }

    /// The devices whose queues other processes serve, by name.
    fn back_ends(&self) -> impl Iterator<Item = (&String, &devices::vhost_user::Handle)> {
        let plugged = self.plugged.iter();
        plugged.filter_map(|(id, device)| match &device.handle {
            Handle::BackEnd(device) => Some((id, device)),
            _ => None,
        })
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

    /// Whether a driver of the guest has used a device. A device that a vCPU is busy with counts, so that nobody waits for
    /// it.
    pub fn had_driver(&self) -> bool {
        let mut plugged = self.plugged.values();
        plugged.any(|device| match device.function.try_lock() {
            Ok(function) => function.had_driver(),
            Err(_) => true,
        })
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

    /// The disks whose locks decide who may run the machine: their locks are exclusive within the scope `among`.
    pub fn exclusive_disks(&self, among: Scope) -> impl Iterator<Item = &String> {
        let disks = self.disks();
        disks.filter_map(move |(id, disk)| disk.is_exclusive(among).then_some(id))
    }

    /// Acquires the locks of all disks, or none.
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

    /// Releases the locks of all disks. The machine must not run until it has acquired them again.
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

    /// What flushes each disk, and other devices with contents in a file, for another thread.
    pub fn disk_flushes(&self) -> Vec<devices::virtio::blk::Flush> {
        let devices = self.plugged.values();
        devices
            .filter_map(|device| match &device.handle {
                Handle::Disk(disk) => Some(disk.flush()),
                Handle::Contents(file) => {
                    let file = Arc::clone(file);
                    Some(Box::new(move || file.sync_data()) as devices::virtio::blk::Flush)
                }
                _ => None,
            })
            .collect()
    }

    /// Pauses all devices.
    pub fn pause(&self) -> Result<(), MachineError> {
        self.each(|function| function.pause())
    }

    /// Resumes all devices.
    pub fn resume(&self) -> Result<(), MachineError> {
        self.each(|function| function.resume())
    }

    /// Prepares all devices for their end: waits for a bounded time for outstanding host writes to guest memory. On a
    /// timeout, all devices continue.
    pub fn quiesce(&self) -> Result<(), MachineError> {
        quiesce(&self.plugged.iter().collect::<Vec<_>>())
    }

    /// Holds back new requests of all devices to the host. Fails as long as some are in flight, for which the caller has
    /// `waited`: to be repeated, or undone by [`Devices::carry_on`].
    pub fn hold(&self, waited: Duration) -> Result<(), MachineError> {
        hold(self.plugged.iter(), waited)
    }

    /// [`Devices::hold`] for the devices in a slot.
    pub fn hold_in(&self, slot: Bdf, waited: Duration) -> Result<(), MachineError> {
        hold(self.in_slot(slot), waited)
    }

    /// Lets all devices begin requests again.
    pub fn carry_on(&self) {
        for device in self.plugged.values() {
            lock(&device.function).carry_on();
        }
    }

    /// [`Devices::carry_on`] for the devices in a slot.
    pub fn carry_on_in(&self, slot: Bdf) {
        for (_, device) in self.in_slot(slot) {
            lock(&device.function).carry_on();
        }
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

    /// Makes all devices, which are paused, release what prevents them from being saved.
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

    /// Creates the port of an accelerator that has not arrived yet, for workers that restore its applications.
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

    /// Sets the archive of accelerators' applications of an arriving machine. It is cleared once the machine has
    /// arrived, because the archive occupies host memory.
    pub fn set_archive(&mut self, archive: Option<File>) {
        self.surroundings.archive = archive.map(Arc::new);
    }

    /// Sets the disk images that are open already, and closes others that no device has taken.
    pub fn set_images(&mut self, images: Arc<Images>) {
        self.surroundings.images = images;
    }

    /// Saves the state of all devices, which are paused.
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

    /// The address latch of the PCI configuration ports, for a snapshot.
    pub fn config_address(&self) -> u32 {
        self.ports.address()
    }

    /// Restores the saved address latch.
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

/// Holds back new requests of the given devices, of all even if some have requests in flight.
fn hold<'a>(
    devices: impl Iterator<Item = (&'a String, &'a Plugged)>,
    waited: Duration,
) -> Result<(), MachineError> {
    let mut held = Ok(());
    for (id, device) in devices {
        let quiet = lock(&device.function).hold(waited);
        held = held.and(quiet.map_err(|source| MachineError::Lifecycle {
            id: id.clone(),
            source,
        }));
    }
    held
}

/// Quiesces the given devices. If one fails, all of them continue.
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
