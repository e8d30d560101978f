//! A function's configuration space: registers, BARs and capabilities.
//!
//! Each byte has a mask of the bits that the guest may write, and a mask of the bits that it clears
//! by writing ones. BAR sizing (PCI 3.0, 6.2.5.1) needs nothing more: the address bits below the
//! BAR's size are not writable, so a BAR reads back its size after all ones are written.

use serde::{Deserialize, Serialize};

use super::{
    bar::{BarIndex, BarKind, BarRequest, DecodedBar},
    offsets,
};

/// Size in bytes of configuration space, including extended registers.
pub const CONFIG_SPACE_SIZE: usize = 4096;

/// Command register: the function decodes its I/O BARs.
pub const COMMAND_IO: u16 = 1 << 0;
/// Command register: the function decodes its memory BARs.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command register: the function may write to memory and signal interrupts.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// Command register: the function does not assert its interrupt line.
pub const COMMAND_INTERRUPT_DISABLE: u16 = 1 << 10;

/// Status register: the function has an interrupt pending for its line, whether or not it may
/// assert it.
pub const STATUS_INTERRUPT: u8 = 1 << 3;

/// The parity, SERR# and interrupt-disable bits of the command register.
const COMMAND_OTHER_WRITABLE: u16 = 1 << 6 | 1 << 8 | COMMAND_INTERRUPT_DISABLE;
/// Header type: a bridge.
const HEADER_BRIDGE: u8 = 1;
/// Header type: the slot has several functions.
pub const HEADER_MULTIFUNCTION: u8 = 1 << 7;

/// There is a capability list.
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// Error bits of the status register, cleared by writing ones.
const STATUS_ERRORS: u16 = 0xf900;

/// Expansion ROM: decoding is enabled.
const ROM_ENABLE: u8 = 1;

const FIRST_CAPABILITY: usize = 0x40;
const END_OF_CAPABILITIES: usize = 0x100;
const FIRST_EXTENDED_CAPABILITY: usize = 0x100;

/// Identification of a function.
#[derive(Clone, Copy, Debug, Default)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Revision.
    pub revision: u8,
    /// Class, subclass and programming interface, 24 bits.
    pub class: u32,
}

/// Why a configuration space could not be laid out or restored.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The BAR is too small, not a power of two, or too large for its kind.
    #[error("a BAR cannot be {size:#x} bytes of {kind:?}")]
    BarSize {
        /// Kind of BAR.
        kind: BarKind,
        /// Its size in bytes.
        size: u64,
    },
    /// Another BAR uses the register, or there is no room for a 64-bit BAR.
    #[error("BAR {0} is taken or cannot be 64 bits wide")]
    BarTaken(u8),
    /// The capabilities do not fit.
    #[error("no room for a capability of {0} bytes")]
    NoRoom(usize),
    /// A saved register contradicts a bit that is read-only in this function.
    #[error("saved register {offset:#x} has value {value:#x}, which this function cannot have")]
    Register {
        /// Offset in configuration space.
        offset: u16,
        /// Saved value.
        value: u32,
    },
}

/// The registers that the guest may have changed, as (offset, value) pairs.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct ConfigSpaceState {
    registers: Vec<(u16, u32)>,
}

/// 4 KiB of registers with write masks.
#[derive(Clone)]
pub struct ConfigSpace {
    data: Box<[u8; CONFIG_SPACE_SIZE]>,
    writable: Box<[u8; CONFIG_SPACE_SIZE]>,
    write_one_to_clear: Box<[u8; CONFIG_SPACE_SIZE]>,
    bars: [Option<BarRequest>; BarIndex::COUNT],
    /// Offset of the next capability, and of the byte that links to it.
    next_capability: usize,
    capability_link: usize,
    next_extended: usize,
    extended_link: Option<usize>,
}

impl ConfigSpace {
    /// Creates an endpoint (header type 0) without BARs and capabilities.
    pub fn new(identity: Identity) -> Self {
        let zeroes = || Box::new([0; CONFIG_SPACE_SIZE]);
        let mut space = Self {
            data: zeroes(),
            writable: zeroes(),
            write_one_to_clear: zeroes(),
            bars: [None; BarIndex::COUNT],
            next_capability: FIRST_CAPABILITY,
            capability_link: offsets::CAPABILITIES,
            next_extended: FIRST_EXTENDED_CAPABILITY,
            extended_link: None,
        };
        space.set(offsets::VENDOR, &identity.vendor.to_le_bytes());
        space.set(offsets::DEVICE, &identity.device.to_le_bytes());
        let class = identity.class << 8 | u32::from(identity.revision);
        space.set(offsets::REVISION, &class.to_le_bytes());
        let vendor = identity.subsystem_vendor.to_le_bytes();
        space.set(offsets::SUBSYSTEM_VENDOR, &vendor);
        space.set(offsets::SUBSYSTEM, &identity.subsystem.to_le_bytes());
        let command = COMMAND_OTHER_WRITABLE | COMMAND_BUS_MASTER;
        space.set_writable(offsets::COMMAND, &command.to_le_bytes());
        space.write_one_to_clear[offsets::STATUS..offsets::STATUS + 2]
            .copy_from_slice(&STATUS_ERRORS.to_le_bytes());
        space.set_writable(offsets::CACHE_LINE, &[0xff]);
        space.set_writable(offsets::INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Creates a bridge (header type 1). The caller adds bus numbers and windows.
    pub fn bridge(identity: Identity) -> Self {
        let mut space = Self::new(identity);
        space.set(offsets::HEADER_TYPE, &[HEADER_BRIDGE]);
        space.writable[offsets::COMMAND] |= (COMMAND_MEMORY | COMMAND_IO) as u8;
        space.write_one_to_clear[offsets::SECONDARY_STATUS..offsets::SECONDARY_STATUS + 2]
            .copy_from_slice(&STATUS_ERRORS.to_le_bytes());
        // These bytes are an endpoint's subsystem, but the upper half of an address in a bridge.
        space.set(offsets::SUBSYSTEM_VENDOR, &[0; 4]);
        space
    }

    /// Adds a BAR; it decodes nothing until it has an address and is enabled.
    pub fn add_bar(&mut self, bar: BarRequest) -> Result<(), ConfigError> {
        let BarRequest { index, kind, size } = bar;
        let (smallest, largest) = match kind {
            BarKind::Io => (4, 0x1_0000),
            BarKind::Memory32 { .. } => (16, 1 << 31),
            BarKind::Memory64 { .. } => (16, 1 << 62),
            BarKind::Rom => (1 << 11, 1 << 24),
        };
        if !size.is_power_of_two() || !(smallest..=largest).contains(&size) {
            return Err(ConfigError::BarSize { kind, size });
        }
        let at = usize::from(index.get());
        let wide = matches!(kind, BarKind::Memory64 { .. });
        let free = |at: usize| self.bars.get(at).is_some_and(Option::is_none);
        let below_is_wide = at > 0
            && self.bars[at - 1].is_some_and(|bar| matches!(bar.kind, BarKind::Memory64 { .. }));
        // The register after the last BAR is not the ROM's.
        let fits = !wide || (index.get() < 5 && free(at + 1));
        let is_rom = (index == BarIndex::ROM) == (kind == BarKind::Rom);
        if !free(at) || below_is_wide || !fits || !is_rom {
            return Err(ConfigError::BarTaken(index.get()));
        }
        self.bars[at] = Some(bar);
        let offset = index.offset();
        let mask = !(size - 1);
        let command = match kind {
            BarKind::Io => COMMAND_IO,
            _ => COMMAND_MEMORY,
        };
        self.set(offset, &[kind.flags()]);
        // All kinds have their flags in the low bits, which remain read-only even at the minimum
        // sizes.
        self.set_writable(offset, &(mask as u32).to_le_bytes());
        if wide {
            self.set_writable(offset + 4, &((mask >> 32) as u32).to_le_bytes());
        }
        if kind == BarKind::Rom {
            self.writable[offset] |= ROM_ENABLE;
        }
        self.writable[offsets::COMMAND] |= command as u8;
        Ok(())
    }

    /// The BARs, by index.
    pub fn bars(&self) -> impl Iterator<Item = BarRequest> {
        self.bars.iter().copied().flatten()
    }

    /// The address in a BAR's registers, whether or not it is decoded.
    pub fn bar_address(&self, index: BarIndex) -> Option<u64> {
        let bar = self.bars[usize::from(index.get())]?;
        let low = u64::from(self.read_u32(index.offset()) & bar.kind.address_mask());
        Some(match bar.kind {
            BarKind::Memory64 { .. } => low | u64::from(self.read_u32(index.offset() + 4)) << 32,
            _ => low,
        })
    }

    /// Writes an address to a BAR's registers, as firmware would. Bits below the BAR's size are
    /// dropped; a BAR that does not exist is ignored.
    pub fn set_bar_address(&mut self, index: BarIndex, address: u64) {
        let Some(bar) = self.bars[usize::from(index.get())] else {
            return;
        };
        let low = (address & !(bar.size - 1)) as u32 | u32::from(bar.kind.flags());
        self.set(index.offset(), &low.to_le_bytes());
        if matches!(bar.kind, BarKind::Memory64 { .. }) {
            self.set(index.offset() + 4, &((address >> 32) as u32).to_le_bytes());
        }
    }

    /// The BARs that the command register enables, with their addresses. An address of all ones (as
    /// during sizing) counts as not decoded.
    pub fn decoded_bars(&self) -> impl Iterator<Item = DecodedBar> {
        let command = self.command();
        self.bars().filter_map(move |bar| {
            let enabled = match bar.kind {
                BarKind::Io => command & COMMAND_IO != 0,
                BarKind::Rom => {
                    command & COMMAND_MEMORY != 0 && self.data[offsets::ROM] & ROM_ENABLE != 0
                }
                _ => command & COMMAND_MEMORY != 0,
            };
            let address = self.bar_address(bar.index)?;
            let sizing = bar.size.wrapping_neg() & bar.kind.largest_address();
            (enabled && address != sizing).then_some(DecodedBar { bar, address })
        })
    }

    /// The command register.
    pub fn command(&self) -> u16 {
        self.read_u16(offsets::COMMAND)
    }

    /// Appends a capability to the list. `body` follows the two bytes for ID and link; `writable`,
    /// which may be shorter, is the mask of its guest-writable bits. Returns its offset.
    pub fn add_capability(
        &mut self,
        id: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<usize, ConfigError> {
        let at = self.next_capability;
        let len = body.len().saturating_add(2);
        let end = at.saturating_add(len).next_multiple_of(4);
        if end > END_OF_CAPABILITIES || writable.len() > body.len() {
            return Err(ConfigError::NoRoom(len));
        }
        self.data[at] = id;
        self.set(at + 2, body);
        self.set_writable(at + 2, writable);
        // `at` is below 0x100, checked above.
        self.data[self.capability_link] = at as u8;
        self.data[offsets::STATUS] |= STATUS_CAPABILITIES;
        self.capability_link = at + 1;
        self.next_capability = end;
        Ok(at)
    }

    /// Appends a capability to the list at an offset chosen by the caller, whereas
    /// [`ConfigSpace::add_capability`] chooses one. Do not mix the two.
    pub fn place_capability(
        &mut self,
        at: usize,
        id: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<(), ConfigError> {
        let len = body.len().saturating_add(2);
        if at < FIRST_CAPABILITY
            || !at.is_multiple_of(4)
            || at.saturating_add(len) > END_OF_CAPABILITIES
            || writable.len() > body.len()
        {
            return Err(ConfigError::NoRoom(len));
        }
        self.next_capability = at;
        self.add_capability(id, body, writable).map(|_| ())
    }

    /// Appends an extended capability (PCI Express 7.6.3). `body` follows the four bytes for ID,
    /// version and link. Returns its offset.
    pub fn add_extended_capability(
        &mut self,
        id: u16,
        version: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<usize, ConfigError> {
        let at = self.next_extended;
        let len = body.len().saturating_add(4);
        let end = at.saturating_add(len).next_multiple_of(4);
        if end > CONFIG_SPACE_SIZE || writable.len() > body.len() {
            return Err(ConfigError::NoRoom(len));
        }
        let header = u32::from(id) | u32::from(version & 0xf) << 16;
        self.set(at, &header.to_le_bytes());
        self.set(at + 4, body);
        self.set_writable(at + 4, writable);
        if let Some(link) = self.extended_link {
            // `at` is below 0x1000 and a multiple of 4, so it fits the 12 bits of the link.
            let header = self.read_u32(link) & 0xf_ffff | (at as u32) << 20;
            self.set(link, &header.to_le_bytes());
        }
        self.extended_link = Some(at);
        self.next_extended = end;
        Ok(at)
    }

    /// Appends a read-only extended capability to the list at an offset chosen by the caller. The
    /// first one must be at 0x100. Do not mix this with [`ConfigSpace::add_extended_capability`].
    pub fn place_extended_capability(
        &mut self,
        at: usize,
        id: u16,
        version: u8,
        body: &[u8],
    ) -> Result<(), ConfigError> {
        let is_first = self.extended_link.is_none() && at == FIRST_EXTENDED_CAPABILITY;
        let is_later = self.extended_link.is_some() && at > FIRST_EXTENDED_CAPABILITY;
        if !at.is_multiple_of(4) || !(is_first || is_later) {
            return Err(ConfigError::NoRoom(body.len()));
        }
        self.next_extended = at;
        self.add_extended_capability(id, version, body, &[])
            .map(|_| ())
    }

    /// Handles a guest read; bytes beyond the end of configuration space read as ones.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = offset
                .checked_add(at)
                .and_then(|offset| self.data.get(offset).copied())
                .unwrap_or(0xff);
        }
    }

    /// Handles a guest write, subject to the masks; bytes beyond the end are dropped.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (at, value) in (offset..CONFIG_SPACE_SIZE).zip(data) {
            let writable = self.writable[at];
            let kept = self.data[at] & !(self.write_one_to_clear[at] & value);
            self.data[at] = kept & !writable | value & writable;
        }
    }

    /// Sets registers regardless of the masks.
    ///
    /// # Panics
    /// If they extend beyond the configuration space: the caller's offsets are constants or come
    /// from `add_capability`.
    pub fn set(&mut self, offset: usize, data: &[u8]) {
        self.data[offset..offset + data.len()].copy_from_slice(data);
    }

    /// Replaces the write masks of registers.
    ///
    /// # Panics
    /// As [`ConfigSpace::set`].
    pub fn set_writable(&mut self, offset: usize, mask: &[u8]) {
        self.writable[offset..offset + mask.len()].copy_from_slice(mask);
    }

    /// Reads a 16-bit register; all ones if it extends beyond the configuration space.
    pub fn read_u16(&self, offset: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Reads a 32-bit register; all ones if it extends beyond the configuration space.
    pub fn read_u32(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Clears every bit that the guest may have set: BAR addresses, command, capabilities.
    pub fn reset(&mut self) {
        for at in 0..CONFIG_SPACE_SIZE {
            self.data[at] &= !(self.writable[at] | self.write_one_to_clear[at]);
        }
    }

    /// The registers that may differ between two functions of the same kind.
    pub fn save(&self) -> ConfigSpaceState {
        let registers = (0..CONFIG_SPACE_SIZE)
            .step_by(4)
            .filter(|&at| self.guest_bits(at) != 0)
            .map(|at| (at as u16, self.read_u32(at)))
            .collect();
        ConfigSpaceState { registers }
    }

    /// Loads saved registers. Changes nothing if one of them contradicts a bit that the guest
    /// cannot write here.
    pub fn restore(&mut self, state: &ConfigSpaceState) -> Result<(), ConfigError> {
        for &(offset, value) in &state.registers {
            let at = usize::from(offset);
            let refused = ConfigError::Register { offset, value };
            if at % 4 != 0 || at >= CONFIG_SPACE_SIZE {
                return Err(refused);
            }
            if (self.read_u32(at) ^ value) & !self.guest_bits(at) != 0 {
                return Err(refused);
            }
        }
        self.reset();
        for &(offset, value) in &state.registers {
            self.set(usize::from(offset), &value.to_le_bytes());
        }
        Ok(())
    }

    /// Bits of the register at `at`, a multiple of 4, that the guest may change.
    fn guest_bits(&self, at: usize) -> u32 {
        let bits = |masks: &[u8; CONFIG_SPACE_SIZE]| {
            u32::from_le_bytes([masks[at], masks[at + 1], masks[at + 2], masks[at + 3]])
        };
        bits(&self.writable) | bits(&self.write_one_to_clear)
    }
}
