//! A PCI segment: one bus of 32 slots, its configuration access and the placement of its BARs.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;
use vm_allocator::{AddressAllocator, AllocPolicy};

use super::{
    bar::{BarAddress, BarIndex, BarKind, BarRequest, DecodedBar},
    bdf::{Bdf, SLOTS},
    config::offsets,
    function::{LifecycleError, PciFunction},
    host_bridge::HostBridge,
};
use crate::bus::{Bus, BusError};

/// A function that is plugged in.
pub type SharedFunction = Arc<Mutex<dyn PciFunction>>;

/// A range of addresses, both ends included.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Window {
    /// First address.
    pub first: u64,
    /// Last address.
    pub last: u64,
}

impl Window {
    /// `len` bytes from `first`; `None` if that is empty or wraps around.
    pub fn new(first: u64, len: u64) -> Option<Self> {
        let last = first.checked_add(len.checked_sub(1)?)?;
        Some(Self { first, last })
    }

    /// Whether `len` bytes (not 0) from `address` lie inside.
    fn contains(&self, address: u64, len: u64) -> bool {
        let last = len.checked_sub(1).and_then(|len| address.checked_add(len));
        address >= self.first && last.is_some_and(|last| last <= self.last)
    }
}

/// Number and address windows of a segment. Windows of different segments must not overlap, nor
/// hold RAM.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SegmentConfig {
    /// Segment number, as in `_SEG`.
    pub segment: u16,
    /// Memory below 4 GiB.
    pub mmio32: Option<Window>,
    /// Memory above 4 GiB.
    pub mmio64: Option<Window>,
    /// I/O ports, for segment 0.
    pub io: Option<Window>,
}

impl SegmentConfig {
    /// The windows in which a BAR may lie, the one preferred first.
    fn windows(&self, kind: BarKind) -> impl Iterator<Item = Window> {
        let windows = match kind {
            BarKind::Io => [self.io, None],
            BarKind::Memory32 { .. } | BarKind::Rom => [self.mmio32, None],
            BarKind::Memory64 { .. } => [self.mmio64, self.mmio32],
        };
        windows.into_iter().flatten()
    }
}

/// Why a function could not be plugged in or found.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// The slot number is out of range or the host bridge's.
    #[error("PCI device number {slot} is not one of 1 to 31")]
    InvalidSlot {
        /// The slot asked for.
        slot: u8,
    },
    /// Another function has the slot.
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
        /// Which BAR.
        index: u8,
        /// Its kind.
        kind: BarKind,
        /// Its size in bytes.
        size: u64,
    },
    /// There is no function at the address.
    #[error("there is no PCI function at {0}")]
    NoFunction(Bdf),
    /// The function could not set itself up.
    #[error("the function cannot be plugged in at {bdf}")]
    Plug {
        /// Its place.
        bdf: Bdf,
        /// What failed.
        source: io::Error,
    },
    /// A step of the function's life failed.
    #[error("PCI function {bdf}")]
    Function {
        /// Its place.
        bdf: Bdf,
        /// What failed.
        source: LifecycleError,
    },
}

/// What a BAR decodes right now.
#[derive(Clone, Copy, Debug, Default)]
struct Placement {
    /// The range that is registered.
    mapped: Option<DecodedBar>,
    /// The guest enabled it where it cannot be; looked at again when another BAR moves away.
    blocked: bool,
    /// That was logged. Once per BAR, or the guest could fill the log.
    warned: bool,
}

struct Slot {
    function: SharedFunction,
    placements: [Placement; BarIndex::COUNT],
    /// The addresses it was plugged in with, to which a reset brings it back.
    home: Vec<BarAddress>,
}

type Slots = [Option<Slot>; SLOTS as usize];

/// One bus with its functions.
///
/// Lock order: `decoding`, then one function, then `slots`. A function must not call the segment,
/// and nobody may call the segment with a function's lock held.
pub struct PciSegment {
    config: SegmentConfig,
    mmio: Arc<Bus>,
    pio: Arc<Bus>,
    /// Held while BARs are placed, so that the buses never show a mixture of two decisions.
    decoding: Mutex<()>,
    /// Held for look-ups and short changes only.
    slots: Mutex<Slots>,
}

impl PciSegment {
    /// A segment with its host bridge. Trapped BARs will appear on `mmio` and `pio`.
    pub fn new(config: SegmentConfig, mmio: Arc<Bus>, pio: Arc<Bus>) -> Arc<Self> {
        let mut slots: Slots = std::array::from_fn(|_| None);
        slots[0] = Some(Slot {
            function: Arc::new(Mutex::new(HostBridge::new())),
            placements: Default::default(),
            home: Vec::new(),
        });
        Arc::new(Self {
            config,
            mmio,
            pio,
            decoding: Mutex::new(()),
            slots: Mutex::new(slots),
        })
    }

    /// Number and windows.
    pub fn config(&self) -> &SegmentConfig {
        &self.config
    }

    /// Puts a function into `slot`, or the first free one, and gives its BARs addresses: those
    /// of `addresses` (restore), else free ones. The guest sees it from now on.
    pub fn plug(
        &self,
        function: SharedFunction,
        slot: Option<u8>,
        addresses: &[BarAddress],
    ) -> Result<Bdf, PciError> {
        let _decoding = lock(&self.decoding);
        let bdf = self.free_slot(slot)?;
        let requests: Vec<_> = lock(&function).config().bars().collect();
        let home = self.place(&requests, addresses)?;
        {
            let mut function = lock(&function);
            for bar in &home {
                let config = function.config_mut();
                config.set_bar_address(bar.index, bar.address);
            }
            let plugged = function.plugged(bdf);
            plugged.map_err(|source| PciError::Plug { bdf, source })?;
        }
        self.seat(bdf, function, home);
        Ok(bdf)
    }

    /// Puts a function with a saved state where it was, its BARs included. Unlike `plug` and
    /// `restore`, it depends on no address being free that the function does not need.
    pub fn plug_saved(
        &self,
        function: SharedFunction,
        slot: u8,
        state: Value,
    ) -> Result<Bdf, PciError> {
        let _decoding = lock(&self.decoding);
        let bdf = self.free_slot(Some(slot))?;
        {
            let mut function = lock(&function);
            let plugged = function.plugged(bdf);
            plugged.map_err(|source| PciError::Plug { bdf, source })?;
            if let Err(source) = function.restore(state) {
                function.unplugged();
                return Err(PciError::Function { bdf, source });
            }
        }
        let home = self.home_of(&function);
        self.seat(bdf, function, home);
        Ok(bdf)
    }

    /// Makes a function part of the bus.
    fn seat(&self, bdf: Bdf, function: SharedFunction, home: Vec<BarAddress>) {
        lock(&self.slots)[usize::from(bdf.device)] = Some(Slot {
            function,
            placements: Default::default(),
            home,
        });
        self.settle(bdf.device);
    }

    /// Where a reset should put a restored function's BARs: where they are, if that is possible.
    fn home_of(&self, function: &SharedFunction) -> Vec<BarAddress> {
        let mut requests = Vec::new();
        let mut here = Vec::new();
        {
            let function = lock(function);
            let config = function.config();
            for bar in config.bars() {
                requests.push(bar);
                let address = config.bar_address(bar.index).unwrap_or(0);
                let mut windows = self.config.windows(bar.kind);
                if windows.any(|window| window.contains(address, bar.size)) {
                    let index = bar.index;
                    here.push(BarAddress { index, address });
                }
            }
        }
        // A BAR that the guest had put nowhere may stay there.
        self.place(&requests, &here).unwrap_or(here)
    }

    /// Takes a function off the bus and stops it.
    pub fn unplug(&self, bdf: Bdf) -> Result<SharedFunction, PciError> {
        let _decoding = lock(&self.decoding);
        if bdf.device == 0 || !self.is_here(bdf) {
            return Err(PciError::NoFunction(bdf));
        }
        let slot = lock(&self.slots)[usize::from(bdf.device)].take();
        let slot = slot.ok_or(PciError::NoFunction(bdf))?;
        {
            let mut function = lock(&slot.function);
            for placement in &slot.placements {
                if let Some(mapped) = placement.mapped {
                    self.unregister(&mut *function, mapped);
                }
            }
            function.unplugged();
        }
        self.settle_blocked();
        Ok(slot.function)
    }

    /// The function at an address.
    pub fn function(&self, bdf: Bdf) -> Option<SharedFunction> {
        if !self.is_here(bdf) {
            return None;
        }
        self.function_in(bdf.device)
    }

    /// All functions by address, the host bridge first.
    pub fn functions(&self) -> Vec<(Bdf, SharedFunction)> {
        let slots = lock(&self.slots);
        let functions = (0..SLOTS).filter_map(|device| {
            let slot = slots[usize::from(device)].as_ref()?;
            Some((self.bdf(device), Arc::clone(&slot.function)))
        });
        functions.collect()
    }

    /// Gives a function that is plugged in its saved state, and its BARs the addresses of that
    /// state.
    pub fn restore(&self, bdf: Bdf, state: Value) -> Result<(), PciError> {
        self.change(bdf, |function| function.restore(state))
    }

    /// Resets a function and brings its BARs back to where they were when it was plugged in.
    pub fn reset(&self, bdf: Bdf) -> Result<(), PciError> {
        let home = match &lock(&self.slots)[usize::from(bdf.device % SLOTS)] {
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

    fn change(
        &self,
        bdf: Bdf,
        change: impl FnOnce(&mut dyn PciFunction) -> Result<(), LifecycleError>,
    ) -> Result<(), PciError> {
        let _decoding = lock(&self.decoding);
        let function = self.function(bdf).ok_or(PciError::NoFunction(bdf))?;
        let result = change(&mut *lock(&function));
        self.settle(bdf.device);
        result.map_err(|source| PciError::Function { bdf, source })
    }

    /// A guest's read of configuration space.
    pub fn read_config(&self, device: u8, offset: usize, data: &mut [u8]) {
        match self.function_in(device) {
            Some(function) => lock(&function).read_config(offset, data),
            None => data.fill(0xff),
        }
    }

    /// A guest's write to configuration space.
    pub fn write_config(&self, device: u8, offset: usize, data: &[u8]) {
        let Some(function) = self.function_in(device) else {
            return;
        };
        // A function may reset itself, by a register that only it knows.
        let moved = {
            let mut function = lock(&function);
            let before = function.config().command();
            function.write_config(offset, data);
            function.config().command() != before
        };
        let end = offset.saturating_add(data.len());
        let touches = |first: usize, last: usize| offset < last && first < end;
        if moved
            || touches(offsets::COMMAND, offsets::STATUS)
            || touches(offsets::ROM, offsets::ROM + 4)
            || touches(offsets::BAR0, offsets::BAR_END)
        {
            let _decoding = lock(&self.decoding);
            self.settle(device);
        }
    }

    /// Makes the buses decode what the function's registers say; `decoding` is held.
    fn settle(&self, device: u8) {
        if self.settle_one(device) {
            self.settle_blocked();
        }
    }

    /// Looks again at the BARs that were in another one's way.
    fn settle_blocked(&self) {
        for device in 0..SLOTS {
            let blocked = lock(&self.slots)[usize::from(device)]
                .as_ref()
                .is_some_and(|slot| slot.placements.iter().any(|at| at.blocked));
            if blocked {
                self.settle_one(device);
            }
        }
    }

    /// True if the function gave up a range that it had.
    fn settle_one(&self, device: u8) -> bool {
        let Some((function, mut placements)) = lock(&self.slots)[usize::from(device % SLOTS)]
            .as_ref()
            .map(|slot| (Arc::clone(&slot.function), slot.placements))
        else {
            return false;
        };
        let mut function = lock(&function);
        let wanted: Vec<_> = function.config().decoded_bars().collect();
        let mut freed = false;
        for placement in &mut placements {
            placement.blocked = false;
            if let Some(mapped) = placement.mapped.filter(|mapped| !wanted.contains(mapped)) {
                self.unregister(&mut *function, mapped);
                placement.mapped = None;
                freed = true;
            }
        }
        // The function's other BARs look at what is written here.
        self.store(device, placements);
        for decoded in wanted {
            // A BarIndex is below COUNT.
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
                            self.bdf(device),
                            decoded.bar.index.get(),
                            decoded.bar.size,
                            decoded.address,
                        );
                    }
                }
            }
            self.store(device, placements);
        }
        freed
    }

    fn store(&self, device: u8, placements: [Placement; BarIndex::COUNT]) {
        if let Some(slot) = &mut lock(&self.slots)[usize::from(device % SLOTS)] {
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

    /// All ranges that are decoded.
    fn mapped(&self) -> impl Iterator<Item = DecodedBar> {
        let slots = lock(&self.slots);
        let mapped: Vec<_> = slots
            .iter()
            .flatten()
            .flat_map(|slot| slot.placements.iter().filter_map(|at| at.mapped))
            .collect();
        mapped.into_iter()
    }

    /// Addresses for BARs: those given, else free ones. The largest are placed first.
    fn place(
        &self,
        requests: &[BarRequest],
        given: &[BarAddress],
    ) -> Result<Vec<BarAddress>, PciError> {
        let mut taken = self.addresses_in_use();
        let mut places = Vec::new();
        let address_of = |index: BarIndex| given.iter().find(|bar| bar.index == index);
        for bar in requests {
            if let Some(&BarAddress { index, address }) = address_of(bar.index) {
                taken.push(DecodedBar { bar: *bar, address });
                places.push(BarAddress { index, address });
            }
        }
        let mut rest: Vec<_> = requests
            .iter()
            .filter(|bar| address_of(bar.index).is_none())
            .collect();
        rest.sort_by_key(|bar| std::cmp::Reverse(bar.size));
        for bar in rest {
            let Some(address) = self.find_gap(*bar, &taken) else {
                let error = PciError::NoAddress {
                    segment: self.config.segment,
                    index: bar.index.get(),
                    kind: bar.kind,
                    size: bar.size,
                };
                if !is_dispensable(bar.kind) {
                    return Err(error);
                }
                log::info!("{error}: the device has to do without");
                continue;
            };
            taken.push(DecodedBar { bar: *bar, address });
            let index = bar.index;
            places.push(BarAddress { index, address });
        }
        Ok(places)
    }

    /// The addresses in all BARs of the segment, decoded or not, and where a reset would put them.
    fn addresses_in_use(&self) -> Vec<DecodedBar> {
        let slots: Vec<_> = lock(&self.slots)
            .iter()
            .flatten()
            .map(|slot| (Arc::clone(&slot.function), slot.home.clone()))
            .collect();
        let mut taken = Vec::new();
        for (function, home) in slots {
            let function = lock(&function);
            let config = function.config();
            for bar in config.bars() {
                let now = config.bar_address(bar.index);
                let at_reset = home.iter().find(|home| home.index == bar.index);
                let addresses = now.into_iter().chain(at_reset.map(|home| home.address));
                taken.extend(addresses.map(|address| DecodedBar { bar, address }));
            }
        }
        taken
    }

    fn find_gap(&self, bar: BarRequest, taken: &[DecodedBar]) -> Option<u64> {
        // The guest moves BARs as it likes, so the map of what is free is drawn afresh.
        self.config.windows(bar.kind).find_map(|window| {
            let len = window.last.checked_sub(window.first)?.checked_add(1)?;
            let mut free = AddressAllocator::new(window.first, len).ok()?;
            let mut taken = taken.to_vec();
            // BARs are aligned to their sizes: of two that overlap, the larger covers the other.
            taken.sort_by_key(|used| std::cmp::Reverse(used.bar.size));
            for used in taken {
                let same_space = is_io(used.bar.kind) == is_io(bar.kind);
                if same_space && window.contains(used.address, used.bar.size) {
                    // An error says that it is taken already, which is all that matters.
                    let at = AllocPolicy::ExactMatch(used.address);
                    let _ = free.allocate(used.bar.size, used.bar.size, at);
                }
            }
            // A page apart at least, so that a guest can map BARs one by one.
            let align = if is_io(bar.kind) {
                bar.size
            } else {
                bar.size.max(0x1000)
            };
            let range = free
                .allocate(bar.size, align, AllocPolicy::FirstMatch)
                .ok()?;
            Some(range.start())
        })
    }

    fn free_slot(&self, wanted: Option<u8>) -> Result<Bdf, PciError> {
        let slots = lock(&self.slots);
        let is_free = |slot: u8| slots[usize::from(slot)].is_none();
        match wanted {
            Some(slot) if !(1..SLOTS).contains(&slot) => Err(PciError::InvalidSlot { slot }),
            Some(slot) if is_free(slot) => Ok(self.bdf(slot)),
            Some(slot) => Err(PciError::SlotTaken(self.bdf(slot))),
            None => (1..SLOTS)
                .find(|&slot| is_free(slot))
                .map(|slot| self.bdf(slot))
                .ok_or(PciError::NoSlot(self.config.segment)),
        }
    }

    fn function_in(&self, device: u8) -> Option<SharedFunction> {
        let slots = lock(&self.slots);
        let slot = slots.get(usize::from(device))?.as_ref()?;
        Some(Arc::clone(&slot.function))
    }

    fn is_here(&self, bdf: Bdf) -> bool {
        bdf == self.bdf(bdf.device)
    }

    fn bdf(&self, device: u8) -> Bdf {
        Bdf {
            segment: self.config.segment,
            bus: 0,
            device,
            function: 0,
        }
    }

    fn bus(&self, kind: BarKind) -> &Bus {
        if is_io(kind) { &self.pio } else { &self.mmio }
    }
}

/// Why a BAR is not decoded where the guest put it.
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

/// What is there for firmware and old drivers: an endpoint must not depend on I/O BARs (PCI Express
/// 1.3.2.2), nor a driver on the ROM.
fn is_dispensable(kind: BarKind) -> bool {
    matches!(kind, BarKind::Io | BarKind::Rom)
}

fn overlap(a: DecodedBar, b: DecodedBar) -> bool {
    let last = |bar: DecodedBar| bar.address.saturating_add(bar.bar.size - 1);
    is_io(a.bar.kind) == is_io(b.bar.kind) && a.address <= last(b) && b.address <= last(a)
}

/// Locks; a panic of another holder does not make the bus unusable.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
