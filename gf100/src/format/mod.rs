//! Formats of the data that the GPU reads from memory.
//!
//! Every parser takes plain values that the caller has read once. It only checks limits of the
//! format itself: the caller decides whether an address may be used.

pub mod directory;
pub mod instance;
pub mod instruction;
pub mod pte;
pub mod push;
pub mod ramfc;
pub mod userd;

/// log2 of the size of a small page in bytes, which is also the unit of most physical addresses.
pub const PAGE_SHIFT: u32 = 12;
/// Size of a small page in bytes.
pub const PAGE: u64 = 1 << PAGE_SHIFT;
/// log2 of the size of a large page in bytes.
pub const LARGE_SHIFT: u32 = 17;
/// Size of a large page in bytes.
pub const LARGE: u64 = 1 << LARGE_SHIFT;
/// Number of bits of a GPU virtual address.
pub const VA_BITS: u32 = 40;

/// A page of video memory, by number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct VramPage(pub u32);

impl VramPage {
    /// Address in bytes. A page number has at most 28 bits, so this cannot overflow.
    pub fn address(self) -> u64 {
        u64::from(self.0) << PAGE_SHIFT
    }
}

/// A page of system memory as the GPU addresses it, by number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Gfn(pub u32);

impl Gfn {
    /// Address in bytes. A page number has at most 28 bits, so this cannot overflow.
    pub fn address(self) -> u64 {
        u64::from(self.0) << PAGE_SHIFT
    }
}

/// Number of bits of a page number in all formats.
pub const PAGE_NUMBER_BITS: u32 = 28;

/// The memory in which something is.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Aperture {
    /// Video memory.
    Vram,
    /// System memory, snooping the CPU's caches.
    Coherent,
    /// System memory, without snooping the CPU's caches.
    NonCoherent,
}

impl Aperture {
    /// Decodes the form of page table entries, instance blocks and run list registers, in which 1
    /// is unused.
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

    /// Decodes the form of page directory entries, in which 0 means "not present".
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

/// A page in video or system memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Target {
    /// In video memory.
    Vram(VramPage),
    /// In system memory.
    Ram(Gfn),
}

impl Target {
    /// The page with this number in an aperture; excess bits of the number are dropped.
    pub fn new(aperture: Aperture, number: u64) -> Self {
        let number = (number & ((1 << PAGE_NUMBER_BITS) - 1)) as u32;
        match aperture {
            Aperture::Vram => Self::Vram(VramPage(number)),
            Aperture::Coherent | Aperture::NonCoherent => Self::Ram(Gfn(number)),
        }
    }

    /// Address in bytes, in the respective memory.
    pub fn address(self) -> u64 {
        match self {
            Self::Vram(page) => page.address(),
            Self::Ram(page) => page.address(),
        }
    }
}
