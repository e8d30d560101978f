//! Base address registers: a function's request, and the address that the guest programs.

use serde::{Deserialize, Serialize};

use super::offsets;

/// Index of a base address register, 0 to 5, or of the expansion ROM's register. A 64-bit BAR is
/// known by its lower register.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct BarIndex(u8);

impl BarIndex {
    /// The first register.
    pub const ZERO: Self = Self(0);
    /// The expansion ROM's register.
    pub const ROM: Self = Self(6);
    /// Number of registers, including the expansion ROM's.
    pub const COUNT: usize = 7;

    /// `None` unless `index` is 0 to 5.
    pub const fn new(index: u8) -> Option<Self> {
        if index < 6 { Some(Self(index)) } else { None }
    }

    /// The index as a number.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Offset of the register in configuration space.
    pub const fn offset(self) -> usize {
        if self.0 == Self::ROM.0 {
            offsets::ROM
        } else {
            offsets::BAR0 + 4 * self.0 as usize
        }
    }
}

impl From<BarIndex> for u8 {
    fn from(index: BarIndex) -> Self {
        index.0
    }
}

impl TryFrom<u8> for BarIndex {
    type Error = String;

    fn try_from(index: u8) -> Result<Self, Self::Error> {
        match Self(index) {
            Self::ROM => Ok(Self::ROM),
            _ => Self::new(index).ok_or_else(|| format!("there is no BAR {index}")),
        }
    }
}

/// Address space and width of a BAR.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BarKind {
    /// Port I/O.
    Io,
    /// Memory below 4 GiB.
    Memory32 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// Memory anywhere; takes two registers.
    Memory64 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// The expansion ROM: memory below 4 GiB, with its own enable bit (PCI 3.0, 6.2.5.2).
    Rom,
}

impl BarKind {
    /// The read-only low bits of the register (PCI 3.0, 6.2.5.1).
    pub(super) fn flags(self) -> u8 {
        match self {
            Self::Io => 1,
            Self::Rom => 0,
            Self::Memory32 { prefetchable } => u8::from(prefetchable) << 3,
            Self::Memory64 { prefetchable } => 4 | u8::from(prefetchable) << 3,
        }
    }

    /// The address bits of the lower register.
    pub(super) fn address_mask(self) -> u32 {
        match self {
            Self::Io => !0x3,
            Self::Rom => !0x7ff,
            Self::Memory32 { .. } | Self::Memory64 { .. } => !0xf,
        }
    }

    /// The address with all bits set.
    pub(super) fn largest_address(self) -> u64 {
        match self {
            Self::Io | Self::Memory32 { .. } | Self::Rom => u64::from(u32::MAX),
            Self::Memory64 { .. } => u64::MAX,
        }
    }
}

/// A BAR that a function requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BarRequest {
    /// The (lower) register.
    pub index: BarIndex,
    /// Address space and width.
    pub kind: BarKind,
    /// Size in bytes, a power of two.
    pub size: u64,
}

/// A BAR whose address the guest has enabled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DecodedBar {
    /// The BAR.
    pub bar: BarRequest,
    /// Its first address.
    pub address: u64,
}

/// An assignment of an address to a BAR.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct BarAddress {
    /// The (lower) register.
    pub index: BarIndex,
    /// The first address, a multiple of the BAR's size.
    pub address: u64,
}
