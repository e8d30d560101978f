//! What the GPU reads from memory.
//!
//! Every parser takes plain values that the caller has read once, and bounds nothing but what the
//! format itself bounds: whether an address may be used is for the caller to say.

pub mod directory;
pub mod instance;
pub mod instruction;
pub mod pte;
pub mod push;
pub mod ramfc;
pub mod userd;

/// log2 of the bytes of a small page, and of the unit of most physical addresses.
pub const PAGE_SHIFT: u32 = 12;
/// Bytes of a small page.
pub const PAGE: u64 = 1 << PAGE_SHIFT;
/// log2 of the bytes of a large page.
pub const LARGE_SHIFT: u32 = 17;
/// Bytes of a large page.
pub const LARGE: u64 = 1 << LARGE_SHIFT;
/// Bits of a virtual address of the GPU.
pub const VA_BITS: u32 = 40;

/// A page of the GPU's own memory, by number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct VramPage(pub u32);

impl VramPage {
    /// Its address in bytes. A page number has at most 28 bits: this cannot overflow.
    pub fn address(self) -> u64 {
        u64::from(self.0) << PAGE_SHIFT
    }
}

/// A page of the machine's memory as the GPU addresses it, by number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Gfn(pub u32);

impl Gfn {
    /// Its address in bytes. A page number has at most 28 bits: this cannot overflow.
    pub fn address(self) -> u64 {
        u64::from(self.0) << PAGE_SHIFT
    }
}

/// Bits of a page number in every format.
pub const PAGE_NUMBER_BITS: u32 = 28;

/// In which memory something is.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Aperture {
    /// The GPU's own memory.
    Vram,
    /// The machine's, and the CPU's caches are looked into.
    Coherent,
    /// The machine's, past the CPU's caches.
    NonCoherent,
}

impl Aperture {
    /// As page table entries, instance blocks and runlist registers have it: 1 is not used.
    pub fn from_entry(bits: u64) -> Option<Self> {
        match bits & 3 {
            0 => Some(Self::Vram),
            2 => Some(Self::Coherent),
            3 => Some(Self::NonCoherent),
            _ => None,
        }
    }

    /// The inverse of [`Self::from_entry`].
    pub fn to_entry(self) -> u64 {
        match self {
            Self::Vram => 0,
            Self::Coherent => 2,
            Self::NonCoherent => 3,
        }
    }

    /// As page directory entries have it: 0 is "not there".
    pub fn from_directory(bits: u64) -> Option<Self> {
        match bits & 3 {
            1 => Some(Self::Vram),
            2 => Some(Self::Coherent),
            3 => Some(Self::NonCoherent),
            _ => None,
        }
    }

    /// The inverse of [`Self::from_directory`].
    pub fn to_directory(self) -> u64 {
        match self {
            Self::Vram => 1,
            Self::Coherent => 2,
            Self::NonCoherent => 3,
        }
    }
}

/// A page in either memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Target {
    /// In the GPU's own.
    Vram(VramPage),
    /// In the machine's.
    Ram(Gfn),
}

impl Target {
    /// The page of this number in an aperture; excess bits of the number are dropped.
    pub fn new(aperture: Aperture, number: u64) -> Self {
        let number = (number & ((1 << PAGE_NUMBER_BITS) - 1)) as u32;
        match aperture {
            Aperture::Vram => Self::Vram(VramPage(number)),
            Aperture::Coherent | Aperture::NonCoherent => Self::Ram(Gfn(number)),
        }
    }

    /// Its address in bytes, in whichever memory.
    pub fn address(self) -> u64 {
        match self {
            Self::Vram(page) => page.address(),
            Self::Ram(page) => page.address(),
        }
    }
}
