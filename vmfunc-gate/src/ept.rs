//! Extended page tables, and the list that VMFUNC selects from (SDM volume 3, 29.3 and 26.5.6.3).

use core::ptr::NonNull;

use thiserror::Error;

use crate::window::PAGE;

/// A guest-physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gpa(pub u64);

/// A host-physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hpa(pub u64);

/// A page table: a page of entries.
pub type Entries = [u64; 512];

/// Allocates pages for page tables.
///
/// # Safety
/// `allocate` returns a zeroed page that nothing else uses until it is freed. `entries` returns an
/// address at which a page from `allocate` can be read and written.
pub unsafe trait Frames {
    /// Allocates a zeroed page. None if there is no memory.
    fn allocate(&mut self) -> Option<Hpa>;

    /// Frees a page from [`Self::allocate`].
    fn free(&mut self, frame: Hpa);

    /// The address at which a page from [`Self::allocate`] is mapped.
    fn entries(&self, frame: Hpa) -> NonNull<Entries>;
}

/// What a guest may do with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(u64);

impl Access {
    /// Read.
    pub const READ: Self = Self(1);
    /// Read and write.
    pub const WRITE: Self = Self(3);
    /// Execute, but not read.
    pub const EXECUTE: Self = Self(4);
    /// Read and execute.
    pub const CODE: Self = Self(5);
}

/// The size of a page of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 4 KiB.
    Small,
    /// 2 MiB.
    Large,
}

impl Size {
    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Small => PAGE,
            Self::Large => 512 * PAGE,
        }
    }
}

/// Why a page cannot be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// An address is not a multiple of the page's size.
    #[error("guest page {gpa:#x} on host page {hpa:#x}: no multiples of {size:#x}")]
    Misaligned {
        /// The guest-physical address.
        gpa: u64,
        /// The host-physical address.
        hpa: u64,
        /// The size of the page in bytes.
        size: u64,
    },
    /// An address needs more than 48 bits (guest) or 52 bits (host).
    #[error("guest page {gpa:#x} on host page {hpa:#x}: beyond 48 or 52 bits")]
    TooHigh {
        /// The guest-physical address.
        gpa: u64,
        /// The host-physical address.
        hpa: u64,
    },
    /// A page is already mapped at the guest-physical address.
    #[error("guest page {gpa:#x} is mapped already")]
    Occupied {
        /// The guest-physical address.
        gpa: u64,
    },
    /// There is no memory for page tables.
    #[error("no memory for page tables")]
    NoMemory,
}

/// The bits of an entry that hold an address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The bits of an entry that hold permissions. If none is set, the entry is not present.
const PRESENT: u64 = 7;
/// Memory type write-back in an entry that maps a page, regardless of the guest's page tables: the
/// host has mapped the same page as write-back.
const WRITE_BACK: u64 = 6 << 3 | 1 << 6;
/// An entry of the second level maps 2 MiB.
const LARGE: u64 = 1 << 7;
/// EPTP: page tables are cached write-back, four levels, no accessed and dirty flags. Without those
/// flags, page-modification logging never logs addresses of the server as the client's.
const EPTP: u64 = 6 | 3 << 3;

/// An extended page table that owns its pages.
pub struct Ept<F: Frames> {
    frames: F,
    root: Hpa,
    tables: usize,
}

impl<F: Frames> Ept<F> {
    /// Creates an empty page table.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(mut frames: F) -> Result<Self, Error> {
        let root = frames.allocate().ok_or(Error::NoMemory)?;
        Ok(Self {
            frames,
            root,
            tables: 1,
        })
    }

    /// The value for the VMCS field EPT pointer, and for an entry of an [`EptpList`].
    pub fn pointer(&self) -> u64 {
        self.root.0 | EPTP
    }

    /// The number of pages of its tables.
    pub fn tables(&self) -> usize {
        self.tables
    }

    /// Maps a guest page that is not mapped yet.
    ///
    /// # Errors
    /// See [`Error`]. Tables that were added on the way remain, empty.
    pub fn map(&mut self, gpa: Gpa, hpa: Hpa, size: Size, access: Access) -> Result<(), Error> {
        if (gpa.0 | hpa.0) & (size.bytes() - 1) != 0 {
            return Err(Error::Misaligned {
                gpa: gpa.0,
                hpa: hpa.0,
                size: size.bytes(),
            });
        }
        if gpa.0 >> 48 != 0 || hpa.0 >> 52 != 0 {
            return Err(Error::TooHigh {
                gpa: gpa.0,
                hpa: hpa.0,
            });
        }
        let last = match size {
            Size::Small => 0,
            Size::Large => 1,
        };
        let mut table = self.root;
        for level in (last + 1..=3).rev() {
            let index = index(gpa, level);
            let entry = self.read(table, index);
            if entry & PRESENT == 0 {
                let next = self.frames.allocate().ok_or(Error::NoMemory)?;
                self.tables += 1;
                self.write(table, index, next.0 | PRESENT);
                table = next;
            } else if level == 1 && entry & LARGE != 0 {
                return Err(Error::Occupied { gpa: gpa.0 });
            } else {
                table = Hpa(entry & ADDRESS);
            }
        }
        let index = index(gpa, last);
        if self.read(table, index) & PRESENT != 0 {
            return Err(Error::Occupied { gpa: gpa.0 });
        }
        let large = if last == 1 { LARGE } else { 0 };
        self.write(table, index, hpa.0 | access.0 | WRITE_BACK | large);
        Ok(())
    }

    /// Unmaps a guest page. Returns whether there was one. INVEPT must be executed on all CPUs
    /// before the host page is used for anything else.
    pub fn unmap(&mut self, gpa: Gpa) -> bool {
        match self.find(gpa) {
            Some((table, index, _)) => {
                self.write(table, index, 0);
                true
            }
            None => false,
        }
    }

    /// The host address of a guest address, and what the guest may do there.
    pub fn translate(&self, gpa: Gpa) -> Option<(Hpa, Access)> {
        let (table, index, size) = self.find(gpa)?;
        let entry = self.read(table, index);
        let offset = gpa.0 & (size.bytes() - 1);
        let page = entry & ADDRESS & !(size.bytes() - 1);
        Some((Hpa(page | offset), Access(entry & PRESENT)))
    }

    /// The entry that maps an address.
    fn find(&self, gpa: Gpa) -> Option<(Hpa, usize, Size)> {
        if gpa.0 >> 48 != 0 {
            return None;
        }
        let mut table = self.root;
        for level in (0..=3).rev() {
            let index = index(gpa, level);
            let entry = self.read(table, index);
            if entry & PRESENT == 0 {
                return None;
            }
            match level {
                0 => return Some((table, index, Size::Small)),
                1 if entry & LARGE != 0 => return Some((table, index, Size::Large)),
                _ => table = Hpa(entry & ADDRESS),
            }
        }
        None
    }

    fn read(&self, table: Hpa, index: usize) -> u64 {
        // SAFETY: a table of ours, see `Frames`; the CPU only reads it.
        unsafe { (*self.frames.entries(table).as_ptr())[index] }
    }

    fn write(&mut self, table: Hpa, index: usize, entry: u64) {
        let entries = self.frames.entries(table).as_ptr();
        // SAFETY: as above. Volatile, since the CPU may walk the table at the same time.
        unsafe { (&raw mut (*entries)[index]).write_volatile(entry) };
    }

    fn free(&mut self, table: Hpa, level: u32) {
        for index in 0..if level == 0 { 0 } else { 512 } {
            let entry = self.read(table, index);
            if entry & PRESENT != 0 && (level != 1 || entry & LARGE == 0) {
                self.free(Hpa(entry & ADDRESS), level - 1);
            }
        }
        self.frames.free(table);
    }
}

impl<F: Frames> Drop for Ept<F> {
    fn drop(&mut self) {
        self.free(self.root, 3);
    }
}

/// The index of an address in a table. Level 0 maps 4 KiB pages.
fn index(gpa: Gpa, level: u32) -> usize {
    (gpa.0 >> (12 + 9 * level) & 511) as usize
}

/// The page from which VMFUNC selects EPTs. Entries of 0 are invalid: selecting one causes an exit.
#[repr(C, align(4096))]
pub struct EptpList([u64; 512]);

impl EptpList {
    /// Entry 0 is the client's own EPT, entry 1 the server view, the others are invalid.
    #[must_use]
    pub fn new(client: u64, server: u64) -> Self {
        let mut list = [0; 512];
        list[0] = client;
        list[1] = server;
        Self(list)
    }

    /// The entries.
    #[must_use]
    pub fn entries(&self) -> &Entries {
        &self.0
    }
}

#[cfg(test)]
#[path = "ept_tests.rs"]
mod tests;
