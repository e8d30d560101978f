//! The PCI function that presents a device to the guest.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use device_model::{
    bus::BusDevice,
    memory::{AddressSpace, HostMemory, Mapping},
    msi::{MsiController, MsiMessage, MsiVectors},
};
use pci::{
    BarIndex, BarKind, BarRequest, Bdf, ConfigError, ConfigSpace, Identity, LifecycleError, Line,
    Lines, MsiCapability, MsixCapability, MsixTable, PciFunction, SlowReset,
    config::{COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY, STATUS_INTERRUPT},
    line_of, offsets,
};
use vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX;
use vm_memory::GuestAddress;

use super::{
    Error,
    bar::{Bar, TrappedVectors},
    capabilities::{self, CapabilityKind},
    device::{Device, Irqs, ResetError},
    extended,
    interrupts::{Interrupts, Wanted},
    mapping::{self, BarMapping},
    power::PowerCapability,
};

const HEADER: usize = 0x100;
const PAGE: u64 = 4096;

/// What a device needs from the VM.
#[derive(Clone)]
pub struct Resources {
    /// Allocates interrupt vectors.
    pub msi: Arc<dyn MsiController>,
    /// Provides interrupt lines.
    pub lines: Arc<dyn Lines>,
    /// Maps its memory at the addresses of its BARs.
    pub space: Arc<dyn AddressSpace>,
}

struct Msix {
    capability: MsixCapability,
    table: Arc<MsixTable>,
    table_place: (u8, u64),
    pending_place: (u8, u64),
}

struct Msi {
    capability: MsiCapability,
    vectors: Option<Box<dyn MsiVectors>>,
    /// The messages to which the eventfds are routed.
    routed: Vec<MsiMessage>,
}

/// A part of a BAR that is mapped into this process and, while the BAR is decoded, into the guest.
///
/// The fields' order matters: the guest's mapping is dropped first.
struct Shared {
    bar: BarIndex,
    placed: Option<Box<dyn Mapping>>,
    /// The offer to other devices.
    offered: Option<Box<dyn Send>>,
    host: BarMapping,
}

/// A part of configuration space that passes through to the device's own registers.
#[derive(Clone)]
struct Through {
    place: Range<usize>,
    /// Guest writes reach the device.
    writable: bool,
}

/// Outcomes of the resets that the guest has requested.
#[derive(Default)]
struct Resets {
    /// Number of resets together with its bus.
    with_bus: AtomicU64,
    /// A failure that the guest can trigger at will is logged once.
    warned: AtomicBool,
}

impl Resets {
    /// Records the outcome of a reset. `Ok(true)`: it was a reset of the device's bus.
    fn note(&self, device: &dyn Device, reset: Result<bool, ResetError>) {
        match reset {
            Ok(with_bus) => {
                self.with_bus.fetch_add(with_bus.into(), Ordering::Relaxed);
            }
            Err(error) if !self.warned.swap(true, Ordering::Relaxed) => {
                let name = device.name();
                log::warn!("device {name}: cannot reset it for the guest: {error}");
            }
            Err(_) => {}
        }
    }
}

/// A device on a guest's PCI bus.
pub struct Function {
    config: ConfigSpace,
    through: Vec<Through>,
    power: Option<PowerCapability>,
    /// Offset of the PCI Express capability.
    express: Option<usize>,
    line: Option<Box<dyn Line>>,
    msi: Option<Msi>,
    msix: Option<Msix>,
    interrupts: Arc<Interrupts>,
    shared: Vec<Shared>,
    bars: BTreeMap<BarIndex, Arc<Bar>>,
    resources: Resources,
    /// The bridges upstream forward its DMA and messages.
    upstream: bool,
    /// A reset that the guest requested is in progress: the device is not accessed, and guest reads
    /// return ones.
    resetting: bool,
    /// The next reset is one of its bus.
    with_bus: bool,
    resets: Arc<Resets>,
    /// It was removed from the bus and is in its initial state.
    gone: bool,
    /// A failure that the guest can trigger at will is logged once.
    warned: bool,
    device: Arc<dyn Device>,
}

impl Function {
    /// Takes over a device, and resets and silences it. The BARs in `trapped` are not mapped into
    /// the guest: each access goes through this process.
    pub fn new(
        device: Arc<dyn Device>,
        resources: Resources,
        trapped: &[u64],
    ) -> Result<Self, Error> {
        if let Err(error) = device.reset() {
            let name = device.name();
            log::warn!("device {name}: what its last user left in it is still there: {error}");
        }
        let header = header_of(&*device);
        let header_type = header[offsets::HEADER_TYPE] & 0x7f;
        if header_type != 0 {
            return Err(Error::Bridge {
                device: device.name().to_owned(),
                header: header_type,
            });
        }
        let layout = layout(&*device, &header).map_err(|source| Error::Config {
            device: device.name().to_owned(),
            source,
        })?;
        let mut function = Self {
            config: layout.config,
            through: layout.through,
            power: layout.power,
            express: layout.express,
            line: None,
            interrupts: Arc::new(Interrupts::new(Arc::clone(&device))),
            msi: layout.msi,
            msix: layout.msix,
            shared: Vec::new(),
            bars: BTreeMap::new(),
            resources,
            upstream: true,
            resetting: false,
            with_bus: false,
            resets: Arc::default(),
            gone: false,
            warned: false,
            device,
        };
        function.map_bars(trapped)?;
        Ok(function)
    }

    /// Tells the guest's driver the device's GPUDirect clique, 0 to 15: GPUs of the same clique can
    /// reach each other's memory. To be called before the function is plugged in.
    ///
    /// # Errors
    ///
    /// [`Error::Clique`] for a device that is no GPU of NVIDIA, or has no room for it.
    pub fn join_clique(&mut self, clique: u8) -> Result<(), Error> {
        let header = header_of(&*self.device);
        capabilities::place_clique(&mut self.config, &header, clique).map_err(|source| {
            Error::Clique {
                device: self.device.name().to_owned(),
                source,
            }
        })
    }

    fn map_bars(&mut self, excluded: &[u64]) -> Result<(), Error> {
        let bars: Vec<_> = self.config.bars().collect();
        for BarRequest { index, kind, .. } in bars {
            let bar = Bar {
                device: Arc::clone(&self.device),
                index: index.get().into(),
                vectors: self.vectors_in(index),
            };
            self.bars.insert(index, Arc::new(bar));
            let trapped = matches!(kind, BarKind::Io | BarKind::Rom);
            if trapped || excluded.contains(&index.get().into()) {
                continue;
            }
            let trapped: Vec<_> = self
                .vectors_in(index)
                .into_iter()
                .flat_map(|vectors| [vectors.table, vectors.pending])
                .flatten()
                .map(|range| (range.start, range.end))
                .collect();
            let mappings = mapping::map_bar(&*self.device, index.get(), &trapped)?;
            self.shared.extend(mappings.into_iter().map(|host| Shared {
                bar: index,
                placed: None,
                offered: None,
                host,
            }));
        }
        Ok(())
    }

    /// The MSI-X table and pending bits in a BAR, if it contains any.
    fn vectors_in(&self, index: BarIndex) -> Option<TrappedVectors> {
        let msix = self.msix.as_ref()?;
        let range = |(bar, offset): (u8, u64), len: u64| {
            (bar == index.get()).then(|| offset..offset.saturating_add(len))
        };
        let table = range(msix.table_place, msix.table.table_len());
        let pending = range(msix.pending_place, msix.table.pending_len());
        (table.is_some() || pending.is_some()).then(|| TrappedVectors {
            table,
            pending,
            msix: Arc::clone(&msix.table),
            interrupts: Arc::clone(&self.interrupts),
        })
    }

    /// Passes the guest-controlled bits of the command register to the device. The device keeps
    /// decoding its BARs at the host's addresses: the VMM decides where the guest sees them, and a
    /// vCPU that still accesses one must not hit undecoded memory.
    fn set_command(&self, command: u16) {
        if self.resetting {
            // Its registers are inaccessible until the reset ends, and it does nothing.
            return;
        }
        let mut command = command | COMMAND_IO | COMMAND_MEMORY;
        if !self.is_awake() || !self.upstream {
            command &= !COMMAND_BUS_MASTER;
        }
        self.device
            .write_config(offsets::COMMAND, &command.to_le_bytes());
    }

    fn warn(&mut self, action: &str, error: &dyn std::error::Error) {
        if !self.warned {
            self.warned = true;
            log::warn!("device {}: cannot {action}: {error}", self.device.name());
        }
    }

    /// Connects the eventfds of the interrupts that the guest enabled.
    fn connect_interrupts(&mut self) {
        if let Err(error) = self.route_msi() {
            self.warn("route its MSI interrupts", &error);
        }
        let msix = self.msix.as_ref();
        if let Some(msix) = msix.filter(|msix| msix.capability.is_enabled(&self.config)) {
            msix.capability.update(&self.config, &msix.table);
            self.interrupts.want(Wanted::Msix(&msix.table));
            return;
        }
        let msi = self.msi.as_ref().filter(|msi| !msi.routed.is_empty());
        let messages = msi.and_then(|msi| Some((msi.vectors.as_deref()?, &msi.routed)));
        self.interrupts.want(match messages {
            // At most 32.
            Some((vectors, routed)) => Wanted::Msi(vectors, routed.len() as u16),
            None => self.line.as_deref().map_or(Wanted::Nothing, Wanted::Line),
        });
        if let Some(msix) = msix {
            // After the device was disconnected: the table drops interrupts that arrived until
            // then.
            msix.capability.update(&self.config, &msix.table);
        }
    }

    fn route_msi(&mut self) -> io::Result<()> {
        let Some(msi) = &mut self.msi else {
            return Ok(());
        };
        let messages = msi.capability.messages(&self.config);
        if messages == msi.routed {
            return Ok(());
        }
        let Some(vectors) = msi.vectors.as_deref() else {
            return Ok(());
        };
        // A partial route would be worse than none.
        msi.routed.clear();
        for vector in 0..msi.capability.count() {
            vectors.route(vector, messages.get(usize::from(vector)).copied())?;
        }
        msi.routed = messages;
        Ok(())
    }

    /// The parts of a configuration access that pass through to the device.
    fn parts_through(&self, offset: usize, len: usize, write: bool) -> Vec<Range<usize>> {
        let end = offset.saturating_add(len);
        self.through
            .iter()
            .filter(|through| through.writable || !write)
            .map(|Through { place, .. }| place.start.max(offset)..place.end.min(end))
            .filter(|range| !range.is_empty())
            .collect()
    }

    /// Leaves the device as clean as possible. No reset is in progress meanwhile.
    fn leave(&mut self) {
        self.resetting = false;
        let line = self.line.take();
        let silenced = self.silence();
        // Only now: the device could assert it until it was silenced.
        drop(line);
        let name = self.device.name();
        match silenced {
            Ok(()) => {}
            Err(error @ ResetError::Later(_)) => log::info!("device {name} is not reset: {error}"),
            Err(error) => {
                log::warn!("device {name}: what the guest left in it stays there: {error}");
            }
        }
    }

    /// Stops DMA and interrupts, and returns the device to its power-on state.
    fn silence(&mut self) -> Result<(), ResetError> {
        self.stop();
        self.device.reset()
    }

    /// Stops DMA and interrupts, and returns the guest's registers to their power-on state.
    fn stop(&mut self) {
        self.set_command(0);
        self.reset_registers();
    }

    fn reset_registers(&mut self) {
        self.config.reset();
        self.connect_interrupts();
        if let Some(msix) = &self.msix {
            msix.table.reset();
        }
    }

    /// Whether a write to configuration space requests a function-level reset, and the device
    /// supports it.
    fn asks_for_reset(&self, offset: usize, data: &[u8]) -> bool {
        let Some(express) = self.express else {
            return false;
        };
        // The upper byte of the device control register, and its highest bit.
        let control = (express + 9)
            .checked_sub(offset)
            .and_then(|at| data.get(at));
        if control.is_none_or(|control| control & 0x80 == 0) {
            return false;
        }
        let mut capabilities = [0; 4];
        self.device.read_config(express + 4, &mut capabilities);
        capabilities[3] & 0x10 != 0
    }

    fn is_awake(&self) -> bool {
        let power = self.power.as_ref();
        power.is_none_or(|power| power.is_awake(&self.config))
    }
}

/// The first 256 bytes of configuration space. Missing bytes are zero, because some mediated
/// devices have fewer.
fn header_of(device: &dyn Device) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    let size = device.region_size(VFIO_PCI_CONFIG_REGION_INDEX);
    let len = header.len().min(usize::try_from(size).unwrap_or(HEADER));
    device.read_config(0, &mut header[..len]);
    header
}

struct Layout {
    config: ConfigSpace,
    through: Vec<Through>,
    power: Option<PowerCapability>,
    express: Option<usize>,
    msi: Option<Msi>,
    msix: Option<Msix>,
}

/// Builds the guest's configuration space for a device.
fn layout(device: &dyn Device, header: &[u8; HEADER]) -> Result<Layout, ConfigError> {
    let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let double = |at: usize| u32::from(word(at)) | u32::from(word(at + 2)) << 16;
    let mut config = ConfigSpace::new(Identity {
        vendor: word(offsets::VENDOR),
        device: word(offsets::DEVICE),
        subsystem_vendor: word(offsets::SUBSYSTEM_VENDOR),
        subsystem: word(offsets::SUBSYSTEM),
        revision: header[offsets::REVISION],
        class: double(offsets::REVISION) >> 8,
    });
    place_bars(device, &mut config, double)?;
    if word(offsets::INTERRUPT_LINE) >> 8 != 0 && device.irq_count(Irqs::Line) > 0 {
        config.set(offsets::INTERRUPT_PIN, &[1]);
    }
    let mut layout = Layout {
        config,
        through: Vec::new(),
        power: None,
        express: None,
        msi: None,
        msix: None,
    };
    for capability in capabilities::visible(header) {
        let at = capability.at;
        match capability.kind {
            CapabilityKind::Msi => {
                let capability = MsiCapability::place(&mut layout.config, at, word(at + 2))?;
                layout.msi = Some(Msi {
                    capability,
                    vectors: None,
                    routed: Vec::new(),
                });
            }
            CapabilityKind::Msix if capability.len == 12 => {
                let mut body = [0; 10];
                body.copy_from_slice(&header[at + 2..at + 12]);
                let place = |at: usize| ((double(at) & 7) as u8, u64::from(double(at) & !7));
                layout.msix = Some(Msix {
                    capability: MsixCapability::place(&mut layout.config, at, &body)?,
                    table: Arc::new(MsixTable::new((word(at + 2) & 0x7ff) + 1)),
                    table_place: place(at + 4),
                    pending_place: place(at + 8),
                });
            }
            CapabilityKind::Power if capability.len == 8 => {
                let power = PowerCapability::place(&mut layout.config, at, word(at + 2))?;
                layout.power = Some(power);
            }
            CapabilityKind::Msix | CapabilityKind::Power => {}
            CapabilityKind::Express | CapabilityKind::Through => {
                if capability.kind == CapabilityKind::Express {
                    layout.express = Some(at);
                }
                capabilities::place_through(&mut layout.config, header, capability)?;
                // ID and link belong to the guest's list.
                layout.through.push(Through {
                    place: at + 2..at + capability.len,
                    writable: true,
                });
            }
        }
    }
    let extended = extended::visible(|at| {
        let mut register = [0; 4];
        device.read_config(at, &mut register);
        u32::from_le_bytes(register)
    });
    extended::place(&mut layout.config, &extended)?;
    let extended = extended.iter().map(|extended| Through {
        place: extended.registers(),
        writable: extended.writable,
    });
    layout.through.extend(extended);
    Ok(layout)
}

/// Adds the device's BARs and ROM; their kinds are in its header registers.
fn place_bars(
    device: &dyn Device,
    config: &mut ConfigSpace,
    register: impl Fn(usize) -> u32,
) -> Result<(), ConfigError> {
    let mut number = 0;
    while let Some(index) = BarIndex::new(number) {
        number += 1;
        let size = device.region_size(index.get().into());
        if size == 0 {
            continue;
        }
        let flags = register(index.offset());
        let prefetchable = flags & 8 != 0;
        let kind = match flags & 7 {
            4 => BarKind::Memory64 { prefetchable },
            flags if flags & 1 != 0 => BarKind::Io,
            _ => BarKind::Memory32 { prefetchable },
        };
        if matches!(kind, BarKind::Memory64 { .. }) {
            number += 1;
        }
        config.add_bar(BarRequest { index, kind, size })?;
    }
    let rom = BarRequest {
        index: BarIndex::ROM,
        kind: BarKind::Rom,
        size: device.region_size(BarIndex::ROM.get().into()),
    };
    if rom.size > 0 {
        config.add_bar(rom)?;
    }
    Ok(())
}

impl PciFunction for Function {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        if self.resetting {
            return data.fill(0xff);
        }
        self.config.read(offset, data);
        for part in self.parts_through(offset, data.len(), false) {
            let data = &mut data[part.start - offset..part.end - offset];
            self.device.read_config(part.start, data);
        }
        if let Some(status) = offsets::STATUS
            .checked_sub(offset)
            .and_then(|at| data.get_mut(at))
        {
            let mut physical = [0];
            self.device.read_config(offsets::STATUS, &mut physical);
            *status |= physical[0] & STATUS_INTERRUPT;
        }
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if self.resetting {
            return;
        }
        if self.asks_for_reset(offset, data) {
            // PCI Express 6.6.2: the device stops immediately, its registers are reset as well, and
            // it does not respond until it is ready. The kernel blocks for that time, which this
            // thread, a vCPU, must not do.
            self.stop();
            self.resetting = true;
            return;
        }
        let before = (self.config.command(), self.is_awake());
        self.config.write(offset, data);
        if let Some(power) = self.power {
            power.refuse_unsupported(&mut self.config, before.1);
        }
        for part in self.parts_through(offset, data.len(), true) {
            let data = &data[part.start - offset..part.end - offset];
            self.device.write_config(part.start, data);
        }
        if (self.config.command(), self.is_awake()) != before {
            self.set_command(self.config.command());
        }
        self.connect_interrupts();
    }

    fn bar_device(&self, index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        let bar = self.bars.get(&index)?;
        Some(Arc::clone(bar) as Arc<dyn BusDevice>)
    }

    fn bar_mapped(&mut self, index: BarIndex, address: Option<u64>) {
        let mut failed = None;
        for shared in self.shared.iter_mut().filter(|shared| shared.bar == index) {
            shared.placed = None;
            shared.offered = None;
            let Some(address) = address else { continue };
            let memory = HostMemory {
                address: shared.host.address(),
                len: shared.host.len(),
                read_only: shared.host.read_only,
            };
            let at = GuestAddress(address.saturating_add(shared.host.offset));
            match self.resources.space.map(memory, PAGE, Some(at)) {
                Ok(placed) => {
                    shared.placed = Some(placed);
                    shared.offered = self.device.offer(at.0, memory);
                }
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            // Accesses are trapped instead.
            self.warn("map a BAR into the guest", &error);
        }
    }

    fn set_upstream(&mut self, forwarded: bool) {
        if std::mem::replace(&mut self.upstream, forwarded) != forwarded {
            self.set_command(self.config.command());
        }
    }

    fn is_resetting(&self) -> bool {
        self.resetting
    }

    fn prepare_bus_reset(&mut self) {
        self.with_bus = true;
        self.device.prepare_bus_reset();
    }

    fn begin_reset(&mut self) -> Result<Option<SlowReset>, LifecycleError> {
        self.stop();
        self.resetting = true;
        let with_bus = std::mem::take(&mut self.with_bus);
        let (device, resets) = (Arc::clone(&self.device), Arc::clone(&self.resets));
        Ok(Some(Box::new(move || {
            let reset = match with_bus {
                true => device.reset_bus(),
                false => device.reset().map(|()| false),
            };
            resets.note(&*device, reset);
        })))
    }

    fn end_reset(&mut self) {
        self.resetting = false;
        self.set_command(self.config.command());
    }

    fn plugged(&mut self, bdf: Bdf) -> io::Result<()> {
        self.device.plugged(bdf)?;
        let source = bdf.requester_id();
        if let Some(msix) = &self.msix {
            let vectors = self.resources.msi.allocate(msix.table.count(), source)?;
            msix.table.attach(vectors);
        }
        if let Some(msi) = &mut self.msi {
            let vectors = self
                .resources
                .msi
                .allocate(msi.capability.count(), source)?;
            msi.vectors = Some(vectors);
        }
        if self.config.read_u16(offsets::INTERRUPT_LINE) >> 8 != 0 {
            self.line = Some(self.resources.lines.join(line_of(bdf))?);
        }
        self.set_command(self.config.command());
        self.connect_interrupts();
        Ok(())
    }

    fn unplugged(&mut self) {
        self.leave();
        self.device.unplugged();
        self.gone = true;
    }

    /// Disables bus mastering, so that the device neither accesses memory nor sends messages; its
    /// registers keep their contents.
    fn pause(&mut self) -> Result<(), LifecycleError> {
        self.set_command(self.config.command() & !COMMAND_BUS_MASTER);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), LifecycleError> {
        self.set_command(self.config.command());
        Ok(())
    }

    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.resetting = false;
        let reset = self.silence();
        self.resets.note(&*self.device, reset.map(|()| false));
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("bus_resets", self.resets.with_bus.load(Ordering::Relaxed))]
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        if !self.gone {
            self.leave();
        }
    }
}
