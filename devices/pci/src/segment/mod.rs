//! A PCI segment: a bus of 32 slots and the buses of its root ports, with configuration access and
//! placement of BARs.

mod addresses;

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, OnceLock},
};

use base::Unpoisoned;
use device_model::bus::{Bus, BusError};
use serde_json::Value;

use super::{
    bar::{BarAddress, BarIndex, BarKind, DecodedBar},
    bdf::{Bdf, SLOTS},
    config::HEADER_MULTIFUNCTION,
    function::{LifecycleError, PciFunction, SlowReset},
    host_bridge::HostBridge,
    offsets,
    root_port::{self, Forwarding, RootPort},
    windows::SegmentConfig,
};

/// Handles a guest's reset of the function at an address or, for a root port, of the bus behind it:
/// it arranges a call of [`PciSegment::begin_reset`]. Called on a vCPU thread, which must not wait
/// for that.
pub type ResetHandler = Box<dyn Fn(Bdf) + Send + Sync>;

/// A function that is plugged in.
pub type SharedFunction = Arc<Mutex<dyn PciFunction>>;

/// The location that a function requests.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Seat {
    /// Bus number: 0, or the bus of a root port.
    pub bus: u8,
    /// Slot on the bus. On bus 0 it is 1 to 31, or the first empty one if absent; behind a root
    /// port it is 0.
    pub device: Option<u8>,
    /// Function of the slot, 0 to 7.
    pub function: u8,
}

impl Seat {
    /// The first empty slot of bus 0.
    pub const ANY: Self = Self {
        bus: 0,
        device: None,
        function: 0,
    };

    /// Function 0 of a slot of bus 0.
    pub fn slot(device: u8) -> Self {
        Self {
            device: Some(device),
            ..Self::ANY
        }
    }
}

impl From<Bdf> for Seat {
    fn from(bdf: Bdf) -> Self {
        Self {
            bus: bdf.bus,
            device: Some(bdf.device),
            function: bdf.function,
        }
    }
}

/// Why a function could not be plugged in or accessed.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// The slot number is out of range, or the host bridge's.
    #[error("PCI device number {slot} is not one of 1 to 31")]
    InvalidSlot {
        /// The requested slot.
        slot: u8,
    },
    /// The function number is out of range.
    #[error("PCI function number {function} is not one of 0 to 7")]
    InvalidFunction {
        /// The requested function.
        function: u8,
    },
    /// A function other than 0 was requested without a slot.
    #[error("PCI function {function} of which device? Only function 0 can be given any")]
    NoDevice {
        /// The requested function.
        function: u8,
    },
    /// There is only one slot behind a root port.
    #[error("behind a PCI root port there is device 0 only, and no device {slot}")]
    BehindPort {
        /// The requested slot.
        slot: u8,
    },
    /// No root port has the bus.
    #[error("PCI segment {segment} has no root port with bus {bus}")]
    NoBus {
        /// Segment number.
        segment: u16,
        /// The requested bus.
        bus: u8,
    },
    /// No bus is left for another root port.
    #[error("PCI segment {0} has no bus for another root port")]
    NoPort(u16),
    /// Another function occupies the address.
    #[error("PCI device {0} is already in use")]
    SlotTaken(Bdf),
    /// All slots are taken.
    #[error("PCI segment {0} has no free device slot")]
    NoSlot(u16),
    /// A window has no gap for the BAR.
    #[error("no room for {size:#x} bytes of BAR {index} ({kind:?}) in PCI segment {segment}")]
    NoAddress {
        /// Segment number.
        segment: u16,
        /// Index of the BAR.
        index: u8,
        /// Its kind.
        kind: BarKind,
        /// Its size in bytes.
        size: u64,
    },
    /// There is no function at the address.
    #[error("there is no PCI function at {0}")]
    NoFunction(Bdf),
    /// The function's own setup failed.
    #[error("the function cannot be plugged in at {bdf}")]
    Plug {
        /// Address of the function.
        bdf: Bdf,
        /// The cause.
        source: io::Error,
    },
    /// A lifecycle step of the function failed.
    #[error("PCI function {bdf}")]
    Function {
        /// Address of the function.
        bdf: Bdf,
        /// The cause.
        source: LifecycleError,
    },
}

/// The current decoding of a BAR.
#[derive(Clone, Copy, Debug, Default)]
struct Placement {
    /// The range that is registered on the bus.
    mapped: Option<DecodedBar>,
    /// The guest has enabled it where it cannot be decoded; retried when another BAR moves away.
    blocked: bool,
    /// This has been logged. Once per BAR, or the guest could flood the log.
    warned: bool,
}

struct Slot {
    function: SharedFunction,
    placements: [Placement; BarIndex::COUNT],
    /// The addresses assigned when it was plugged in, to which a reset returns its BARs.
    home: Vec<BarAddress>,
    /// The bus behind it, if it is a root port.
    port: Option<u8>,
}

/// Slots by address, with the VMM's bus numbers rather than those that the guest assigned.
type Slots = BTreeMap<Bdf, Slot>;

/// The buses of a segment and their functions.
///
/// Lock order: `decoding`, then one function, then `slots`. A function must not call the segment,
/// and nobody may call the segment while holding a function's lock.
pub struct PciSegment {
    config: SegmentConfig,
    mmio: Arc<Bus>,
    pio: Arc<Bus>,
    /// Held while BARs are placed, so that the buses never show a mix of two configurations.
    decoding: Mutex<()>,
    /// Held only for look-ups and short changes.
    slots: Mutex<Slots>,
    resets: OnceLock<ResetHandler>,
}

impl PciSegment {
    /// Creates a segment with its host bridge. Trapped BARs are registered on `mmio` and `pio`.
    pub fn new(config: SegmentConfig, mmio: Arc<Bus>, pio: Arc<Bus>) -> Arc<Self> {
        let bridge = Slot {
            function: Arc::new(Mutex::new(HostBridge::new())),
            placements: Default::default(),
            home: Vec::new(),
            port: None,
        };
        let at = Bdf {
            segment: config.segment,
            ..Bdf::default()
        };
        Arc::new(Self {
            config,
            mmio,
            pio,
            decoding: Mutex::new(()),
            slots: Mutex::new(BTreeMap::from([(at, bridge)])),
            resets: OnceLock::new(),
        })
    }

    /// Replaces the host bridge, which has no state yet, before the guest runs.
    pub fn set_host_bridge(&self, bridge: HostBridge) {
        if let Some(slot) = self.slots.lock_unpoisoned().get_mut(&self.host_bridge()) {
            slot.function = Arc::new(Mutex::new(bridge));
        }
    }

    /// The host bridge's address.
    fn host_bridge(&self) -> Bdf {
        Bdf {
            segment: self.config.segment,
            ..Bdf::default()
        }
    }

    /// Sets the handler for resets by the guest of a function or of the bus behind a root port.
    /// Without a handler they stay in reset. Only the first call has an effect.
    pub fn on_reset(&self, handler: ResetHandler) {
        let _ = self.resets.set(handler);
    }

    /// Number and address windows.
    pub fn config(&self) -> &SegmentConfig {
        &self.config
    }

    /// Plugs a function into a seat and assigns addresses to its BARs: those in `addresses` (on
    /// restore), else free ones. A root port gets the next free bus. From now on the guest sees the
    /// function.
    pub fn plug(
        &self,
        function: SharedFunction,
        seat: Seat,
        addresses: &[BarAddress],
    ) -> Result<Bdf, PciError> {
        let _decoding = self.decoding.lock_unpoisoned();
        let bdf = self.free_seat(seat)?;
        self.give_bus(&function)?;
        let requests: Vec<_> = function.lock_unpoisoned().config().bars().collect();
        let home = self.place(bdf.bus, &requests, addresses)?;
        {
            let mut function = function.lock_unpoisoned();
            for bar in &home {
                let config = function.config_mut();
                config.set_bar_address(bar.index, bar.address);
            }
            let plugged = function.plugged(bdf);
            plugged.map_err(|source| PciError::Plug { bdf, source })?;
        }
        self.add(bdf, function, home);
        Ok(bdf)
    }

    /// Plugs in a function with a saved state, at its saved BAR addresses. Unlike `plug` followed
    /// by `restore`, this does not require free addresses that the function does not need.
    pub fn plug_saved(
        &self,
        function: SharedFunction,
        seat: Seat,
        state: Value,
    ) -> Result<Bdf, PciError> {
        let _decoding = self.decoding.lock_unpoisoned();
        let bdf = self.free_seat(seat)?;
        self.give_bus(&function)?;
        {
            let mut function = function.lock_unpoisoned();
            let plugged = function.plugged(bdf);
            plugged.map_err(|source| PciError::Plug { bdf, source })?;
            if let Err(source) = function.restore(state) {
                function.unplugged();
                return Err(PciError::Function { bdf, source });
            }
        }
        let home = self.home_of(bdf.bus, &function);
        self.add(bdf, function, home);
        Ok(bdf)
    }

    /// Adds a function to its bus.
    fn add(&self, bdf: Bdf, function: SharedFunction, home: Vec<BarAddress>) {
        let port = function
            .lock_unpoisoned()
            .root_port()
            .and_then(RootPort::home_bus);
        let slot = Slot {
            function,
            placements: Default::default(),
            home,
            port,
        };
        self.slots.lock_unpoisoned().insert(bdf, slot);
        self.update_decoding(bdf);
    }

    /// Assigns a root port the first free bus of the segment.
    fn give_bus(&self, function: &SharedFunction) -> Result<(), PciError> {
        if function.lock_unpoisoned().root_port().is_none() {
            return Ok(());
        }
        let taken: Vec<_> = self.ports().into_iter().map(|(_, bus)| bus).collect();
        let mut shares = (1..).zip(&self.config.ports);
        let free = shares.find(|(bus, _)| !taken.contains(bus));
        let (bus, windows) = free.ok_or(PciError::NoPort(self.config.segment))?;
        if let Some(port) = function.lock_unpoisoned().root_port_mut() {
            port.give_bus(bus, *windows);
        }
        Ok(())
    }

    /// Removes a function from the bus and stops it.
    pub fn unplug(&self, bdf: Bdf) -> Result<SharedFunction, PciError> {
        let decoding = self.decoding.lock_unpoisoned();
        if bdf.bus == 0 && bdf.device == 0 {
            return Err(PciError::NoFunction(bdf));
        }
        let slot = self.slots.lock_unpoisoned().remove(&bdf);
        let slot = slot.ok_or(PciError::NoFunction(bdf))?;
        {
            let mut function = slot.function.lock_unpoisoned();
            for placement in &slot.placements {
                if let Some(mapped) = placement.mapped {
                    self.unregister(&mut *function, mapped);
                }
            }
        }
        // The function may now be in a reset, and a vCPU that moves another function's BARs must
        // not wait for that.
        drop(decoding);
        slot.function.lock_unpoisoned().unplugged();
        let _decoding = self.decoding.lock_unpoisoned();
        self.retry_blocked();
        Ok(slot.function)
    }

    /// The function at an address.
    pub fn function(&self, bdf: Bdf) -> Option<SharedFunction> {
        let slots = self.slots.lock_unpoisoned();
        Some(Arc::clone(&slots.get(&bdf)?.function))
    }

    /// All functions in order of address, the host bridge first.
    pub fn functions(&self) -> Vec<(Bdf, SharedFunction)> {
        let slots = self.slots.lock_unpoisoned();
        let functions = slots
            .iter()
            .map(|(bdf, slot)| (*bdf, Arc::clone(&slot.function)));
        functions.collect()
    }

    /// The root ports, as (address, bus behind it).
    pub fn ports(&self) -> Vec<(Bdf, u8)> {
        let ports = self.root_ports().into_iter();
        ports.map(|(bdf, bus, _)| (bdf, bus)).collect()
    }

    fn root_ports(&self) -> Vec<(Bdf, u8, SharedFunction)> {
        let slots = self.slots.lock_unpoisoned();
        let ports = slots
            .iter()
            .filter_map(|(bdf, slot)| Some((*bdf, slot.port?, Arc::clone(&slot.function))));
        ports.collect()
    }

    /// Restores the saved state of a plugged-in function, including the addresses of its BARs.
    pub fn restore(&self, bdf: Bdf, state: Value) -> Result<(), PciError> {
        self.change(bdf, |function| function.restore(state))
    }

    /// Resets a function and returns its BARs to their addresses at plug time.
    pub fn reset(&self, bdf: Bdf) -> Result<(), PciError> {
        let home = match self.slots.lock_unpoisoned().get(&bdf) {
            Some(slot) => slot.home.clone(),
            None => return Err(PciError::NoFunction(bdf)),
        };
        self.change(bdf, |function| {
            function.reset()?;
            for bar in home {
                let config = function.config_mut();
                config.set_bar_address(bar.index, bar.address);
            }
            Ok(())
        })
    }

    /// Begins a reset that the guest has requested: of the function at an address or, for a root
    /// port, of all functions behind it. Returns the slow part, if any. When that is complete, call
    /// [`PciSegment::end_reset`], after which the guest reaches them again. The caller must not
    /// plug or unplug meanwhile.
    pub fn begin_reset(&self, at: Bdf) -> Option<SlowReset> {
        let functions = self.resetting(at)?;
        if !functions.contains_key(&at) {
            for function in functions.values() {
                function.lock_unpoisoned().prepare_bus_reset();
            }
        }
        let begun = functions.iter().filter_map(|(at, function)| {
            let begun = function.lock_unpoisoned().begin_reset();
            begun.unwrap_or_else(|error| {
                // Only logged for debugging: the guest can trigger it at will.
                log::debug!("{at} keeps what the guest left in it: {error}");
                None
            })
        });
        let slow: Vec<_> = begun.collect();
        if slow.is_empty() {
            return None;
        }
        Some(Box::new(move || slow.into_iter().for_each(|slow| slow())))
    }

    /// Completes a reset that [`PciSegment::begin_reset`] began.
    pub fn end_reset(&self, at: Bdf) {
        let Some(functions) = self.resetting(at) else {
            return;
        };
        for function in functions.values() {
            function.lock_unpoisoned().end_reset();
        }
        if let Some(port) = self.function(at).filter(|_| !functions.contains_key(&at)) {
            port.lock_unpoisoned().end_reset();
        }
        let _decoding = self.decoding.lock_unpoisoned();
        self.update_decoding(at);
    }

    /// The functions that are in reset because of the guest's writes to the function at an address:
    /// that function, or those behind it. `None` if no reset is requested.
    fn resetting(&self, at: Bdf) -> Option<BTreeMap<Bdf, SharedFunction>> {
        let function = self.function(at)?;
        let is_port = {
            let function = function.lock_unpoisoned();
            function
                .is_resetting()
                .then(|| function.root_port().is_some())?
        };
        if !is_port {
            return Some(BTreeMap::from([(at, function)]));
        }
        let behind = self.behind(at).into_iter();
        Some(
            behind
                .filter_map(|at| Some((at, self.function(at)?)))
                .collect(),
        )
    }

    fn change(
        &self,
        bdf: Bdf,
        change: impl FnOnce(&mut dyn PciFunction) -> Result<(), LifecycleError>,
    ) -> Result<(), PciError> {
        let _decoding = self.decoding.lock_unpoisoned();
        let function = self.function(bdf).ok_or(PciError::NoFunction(bdf))?;
        let result = change(&mut *function.lock_unpoisoned());
        self.update_decoding(bdf);
        result.map_err(|source| PciError::Function { bdf, source })
    }

    /// Handles a guest read of configuration space, at an address in the guest's bus numbering.
    pub fn read_config(&self, at: Bdf, offset: usize, data: &mut [u8]) {
        let place = self.resolve(at);
        let found = place.and_then(|at| Some((at, self.function(at)?)));
        let Some((place, function)) = found else {
            data.fill(0xff);
            return;
        };
        function.lock_unpoisoned().read_config(offset, data);
        let header = offsets::HEADER_TYPE.checked_sub(offset);
        if let Some(header) = header.and_then(|at| data.get_mut(at))
            && self.has_siblings(place)
        {
            *header |= HEADER_MULTIFUNCTION;
        }
    }

    /// Handles a guest write to configuration space, at an address in the guest's bus numbering.
    pub fn write_config(&self, at: Bdf, offset: usize, data: &[u8]) {
        let Some(at) = self.resolve(at) else { return };
        let Some(function) = self.function(at) else {
            return;
        };
        // A function may reset itself through a register that only it knows.
        let (moved, port, reset, closed) = {
            let mut function = function.lock_unpoisoned();
            let before = (function.config().command(), function.is_resetting());
            function.write_config(offset, data);
            let resetting = function.is_resetting();
            let moved = function.config().command() != before.0;
            let reset = resetting && !before.1;
            // It and everything behind it is inaccessible until the reset ends, which updates the
            // decoding.
            let closed = resetting && !reset;
            (moved, function.root_port().is_some(), reset, closed)
        };
        let end = offset.saturating_add(data.len());
        let touches = |first: usize, last: usize| offset < last && first < end;
        let moves = moved
            || touches(offsets::COMMAND, offsets::STATUS)
            || touches(offsets::ROM, offsets::ROM + 4)
            || touches(offsets::BAR0, offsets::BAR_END)
            || (port && touches(offsets::BAR0, root_port::FORWARDING_END));
        // This is a vCPU thread, and functions that are in reset may be locked meanwhile.
        if moves && !closed {
            let _decoding = self.decoding.lock_unpoisoned();
            self.update_decoding(at);
        }
        if let (true, Some(handler)) = (reset, self.resets.get()) {
            handler(at);
        }
    }

    /// Translates the guest's bus number, which the root ports' registers define, to the VMM's.
    fn resolve(&self, at: Bdf) -> Option<Bdf> {
        let at = Bdf {
            segment: self.config.segment,
            ..at
        };
        if at.bus == 0 {
            return Some(at);
        }
        let mut ports = self.root_ports().into_iter();
        let (_, bus, _) = ports.find(|(_, _, function)| {
            let port = function.lock_unpoisoned();
            port.root_port()
                .is_some_and(|port| port.forwarding().bus == at.bus)
        })?;
        Some(Bdf { bus, ..at })
    }

    /// Whether the slot has functions other than the one at `at`.
    fn has_siblings(&self, at: Bdf) -> bool {
        let last = Bdf { function: 7, ..at };
        let slots = self.slots.lock_unpoisoned();
        slots.range(at.slot()..=last).any(|(other, _)| *other != at)
    }

    /// Updates what the buses decode from the function's registers. The caller holds `decoding`.
    fn update_decoding(&self, bdf: Bdf) {
        let mut freed = self.update_function(bdf);
        for behind in self.behind(bdf) {
            freed |= self.update_function(behind);
        }
        if freed {
            self.retry_blocked();
        }
    }

    /// The functions behind a root port; empty for any other function.
    fn behind(&self, port: Bdf) -> Vec<Bdf> {
        let slots = self.slots.lock_unpoisoned();
        let Some(bus) = slots.get(&port).and_then(|slot| slot.port) else {
            return Vec::new();
        };
        slots.keys().filter(|at| at.bus == bus).copied().collect()
    }

    /// Retries the BARs that were blocked by another one.
    fn retry_blocked(&self) {
        let is_blocked = |slot: &Slot| slot.placements.iter().any(|at| at.blocked);
        let blocked: Vec<_> = self
            .slots
            .lock_unpoisoned()
            .iter()
            .filter(|(_, slot)| is_blocked(slot))
            .map(|(bdf, _)| *bdf)
            .collect();
        for bdf in blocked {
            self.update_function(bdf);
        }
    }

    /// Updates the decoding of one function. True if it released a range.
    fn update_function(&self, bdf: Bdf) -> bool {
        let Some((function, mut placements)) = self
            .slots
            .lock_unpoisoned()
            .get(&bdf)
            .map(|slot| (Arc::clone(&slot.function), slot.placements))
        else {
            return false;
        };
        // Must be read before the function's own lock is taken.
        let port = (bdf.bus > 0).then(|| self.port_of(bdf.bus)).flatten();
        let mut function = function.lock_unpoisoned();
        let mut wanted: Vec<_> = function.config().decoded_bars().collect();
        if bdf.bus > 0 {
            function.set_upstream(port.is_some_and(|port| port.upstream));
            wanted.retain(|decoded| port.is_some_and(|port| port.reaches(decoded)));
        }
        let mut freed = false;
        for placement in &mut placements {
            placement.blocked = false;
            if let Some(mapped) = placement.mapped.filter(|mapped| !wanted.contains(mapped)) {
                self.unregister(&mut *function, mapped);
                placement.mapped = None;
                freed = true;
            }
        }
        // The overlap checks for the function's other BARs read what is stored here.
        self.store(bdf, placements);
        for decoded in wanted {
            // A `BarIndex` is below `COUNT`.
            let placement = &mut placements[usize::from(decoded.bar.index.get())];
            if placement.mapped.is_some() {
                continue;
            }
            match self.register(&mut *function, decoded) {
                Ok(()) => placement.mapped = Some(decoded),
                Err(reason) => {
                    placement.blocked = true;
                    if !std::mem::replace(&mut placement.warned, true) {
                        log::warn!(
                            "{}: BAR {} of {:#x} bytes at {:#x} is not decoded: {reason}",
                            bdf,
                            decoded.bar.index.get(),
                            decoded.bar.size,
                            decoded.address,
                        );
                    }
                }
            }
            self.store(bdf, placements);
        }
        freed
    }

    /// What the root port of this bus forwards; `None` without a root port.
    fn port_of(&self, bus: u8) -> Option<Forwarding> {
        let mut ports = self.root_ports().into_iter();
        let (_, _, function) = ports.find(|(_, home, _)| *home == bus)?;
        let function = function.lock_unpoisoned();
        Some(function.root_port()?.forwarding())
    }

    fn store(&self, bdf: Bdf, placements: [Placement; BarIndex::COUNT]) {
        if let Some(slot) = self.slots.lock_unpoisoned().get_mut(&bdf) {
            slot.placements = placements;
        }
    }

    fn register(
        &self,
        function: &mut dyn PciFunction,
        decoded: DecodedBar,
    ) -> Result<(), Misplaced> {
        let DecodedBar { bar, address } = decoded;
        let mut windows = self.config.windows(bar.kind);
        if !windows.any(|window| window.contains(address, bar.size)) {
            return Err(Misplaced::OutsideWindows);
        }
        if let Some(other) = self.mapped().find(|other| overlap(*other, decoded)) {
            return Err(Misplaced::OtherBar(other.address));
        }
        if let Some(device) = function.bar_device(bar.index) {
            self.bus(bar.kind).insert(address, bar.size, device)?;
        }
        function.bar_mapped(bar.index, Some(address));
        Ok(())
    }

    fn unregister(&self, function: &mut dyn PciFunction, mapped: DecodedBar) {
        let index = mapped.bar.index;
        if function.bar_device(index).is_some() {
            self.bus(mapped.bar.kind).remove(mapped.address);
        }
        function.bar_mapped(index, None);
    }

    /// All ranges that are currently decoded.
    fn mapped(&self) -> impl Iterator<Item = DecodedBar> {
        let slots = self.slots.lock_unpoisoned();
        let mapped: Vec<_> = slots
            .values()
            .flat_map(|slot| slot.placements.iter().filter_map(|at| at.mapped))
            .collect();
        mapped.into_iter()
    }

    /// Resolves a seat to a free address.
    fn free_seat(&self, seat: Seat) -> Result<Bdf, PciError> {
        let segment = self.config.segment;
        let Seat { bus, function, .. } = seat;
        if function > 7 {
            return Err(PciError::InvalidFunction { function });
        }
        if bus > 0 && !self.ports().iter().any(|(_, port)| *port == bus) {
            return Err(PciError::NoBus { segment, bus });
        }
        let slots = self.slots.lock_unpoisoned();
        let at = |device| Bdf {
            segment,
            bus,
            device,
            function,
        };
        let device = match seat.device {
            Some(slot) if bus > 0 && slot > 0 => return Err(PciError::BehindPort { slot }),
            Some(slot) if bus == 0 && !(1..SLOTS).contains(&slot) => {
                return Err(PciError::InvalidSlot { slot });
            }
            Some(slot) => slot,
            None if bus > 0 => 0,
            None if function > 0 => return Err(PciError::NoDevice { function }),
            None => {
                let is_empty =
                    |slot: &u8| !slots.keys().any(|at| at.bus == 0 && at.device == *slot);
                (1..SLOTS).find(is_empty).ok_or(PciError::NoSlot(segment))?
            }
        };
        let bdf = at(device);
        if slots.contains_key(&bdf) {
            return Err(PciError::SlotTaken(bdf));
        }
        Ok(bdf)
    }

    fn bus(&self, kind: BarKind) -> &Bus {
        if is_io(kind) { &self.pio } else { &self.mmio }
    }
}

/// Why a BAR is not decoded at the address that the guest programmed.
#[derive(Debug, thiserror::Error)]
enum Misplaced {
    #[error("the address is outside of the host bridge's windows")]
    OutsideWindows,
    #[error("the BAR at {0:#x} is in its way")]
    OtherBar(u64),
    #[error(transparent)]
    Bus(#[from] BusError),
}

fn is_io(kind: BarKind) -> bool {
    kind == BarKind::Io
}

fn overlap(a: DecodedBar, b: DecodedBar) -> bool {
    let last = |bar: DecodedBar| bar.address.saturating_add(bar.bar.size - 1);
    is_io(a.bar.kind) == is_io(b.bar.kind) && a.address <= last(b) && b.address <= last(a)
}
