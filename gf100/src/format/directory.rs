//! Page directories: 8,192 entries of eight bytes. Each entry covers 128 MiB of addresses, with one
//! table for small and one for large pages.
//!
//! | bits | |
//! |---|---|
//! | 1:0 | aperture of the table of large pages, 0 if there is none |
//! | 3:2 | fraction of the 128 MiB that this table covers: all, a half, a quarter, an eighth |
//! | 31:4 | number of its first page |
//! | 33:32 | aperture of the table of small pages, 0 if there is none |
//! | 63:36 | number of its first page |

use super::{Aperture, LARGE_SHIFT, PAGE_SHIFT, Target, VA_BITS};

/// log2 of the address range in bytes that an entry covers.
pub const SHIFT: u32 = 27;
/// Number of entries in a directory.
pub const ENTRIES: usize = 1 << (VA_BITS - SHIFT);
/// Size of a directory in bytes.
pub const BYTES: u64 = (ENTRIES as u64) * 8;
/// Number of entries in a table of small pages.
pub const SMALL_ENTRIES: usize = 1 << (SHIFT - PAGE_SHIFT);
/// Number of entries in a full table of large pages.
pub const LARGE_ENTRIES: usize = 1 << (SHIFT - LARGE_SHIFT);

/// A page table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Table {
    /// The memory that contains it.
    pub aperture: Aperture,
    /// Number of its first page there, 28 bits.
    pub number: u32,
}

impl Table {
    /// Its first page.
    pub fn target(self) -> Target {
        Target::new(self.aperture, u64::from(self.number))
    }
}

/// A page directory entry.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Pde {
    /// The table of small pages, with [`SMALL_ENTRIES`] entries.
    pub small: Option<Table>,
    /// The table of large pages, with [`Self::large_entries`] entries.
    pub large: Option<Table>,
    /// log2 of the divisor of [`LARGE_ENTRIES`] for its size, 0 to 3; 0 without a table.
    pub large_shift: u8,
}

impl Pde {
    /// Parses an entry. Every value is valid.
    pub fn parse(raw: u64) -> Self {
        let large = Aperture::from_directory(raw).map(|aperture| Table {
            aperture,
            number: (raw >> 4 & 0xfff_ffff) as u32,
        });
        let small = Aperture::from_directory(raw >> 32).map(|aperture| Table {
            aperture,
            number: (raw >> 36) as u32,
        });
        Self {
            small,
            large,
            large_shift: large.map_or(0, |_| (raw >> 2 & 3) as u8),
        }
    }

    /// Encodes the entry.
    pub fn encode(self) -> u64 {
        let table = |table: Table| table.aperture.to_directory() | u64::from(table.number) << 4;
        let large = self.large.map_or(0, |large| {
            table(large) & 0xffff_ffff | u64::from(self.large_shift & 3) << 2
        });
        large | self.small.map_or(0, |small| table(small) << 32)
    }

    /// Number of entries in the table of large pages.
    pub fn large_entries(self) -> usize {
        LARGE_ENTRIES >> self.large_shift
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_entry_keeps_its_meaning(raw: u64) {
            let entry = Pde::parse(raw);
            prop_assert_eq!(Pde::parse(entry.encode()), entry);
            prop_assert!((128..=LARGE_ENTRIES).contains(&entry.large_entries()));
        }
    }

    #[test]
    fn tables_are_told_apart() {
        let small = Table {
            aperture: Aperture::Vram,
            number: 0x123,
        };
        let large = Table {
            aperture: Aperture::Coherent,
            number: 0xfff_ffff,
        };
        let entry = Pde {
            small: Some(small),
            large: Some(large),
            large_shift: 1,
        };
        assert_eq!(entry.encode(), 0x0000_1231_ffff_fff6);
        assert_eq!(Pde::parse(0x0000_1231_ffff_fff6), entry);
        assert_eq!(Pde::parse(0), Pde::default());
    }
}
