//! Page table entries: eight bytes per page of 4 KiB (small) or 128 KiB (large).
//!
//! | bits | |
//! |---|---|
//! | 0 | present |
//! | 1 | privileged only |
//! | 2 | read-only |
//! | 31:4 | page number of the first 4 KiB |
//! | 32 | volatile |
//! | 34:33 | aperture |
//! | 43:36 | storage kind |
//! | 60:44 | compression tag |

use super::{Aperture, PAGE_SHIFT, Target};

/// A mapped page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pte {
    /// The memory that contains the page.
    pub aperture: Aperture,
    /// Page number of its first 4 KiB there, 28 bits.
    pub number: u32,
    /// Whether only privileged clients may access it.
    pub privileged: bool,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether it is uncached.
    pub volatile: bool,
    /// Storage kind: 0 is linear; the others are tiled, some of them compressed.
    pub kind: u8,
    /// Compression tag, 17 bits.
    pub tag: u32,
}

/// An entry that is present but invalid.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("page table entry {0:#018x} names aperture 1, which does not exist")]
pub struct BadAperture(pub u64);

impl Pte {
    /// A linear, writable page.
    pub fn linear(target: Target) -> Self {
        let aperture = match target {
            Target::Vram(_) => Aperture::Vram,
            Target::Ram(_) => Aperture::Coherent,
        };
        Self {
            aperture,
            number: (target.address() >> PAGE_SHIFT) as u32,
            privileged: false,
            read_only: false,
            volatile: aperture != Aperture::Vram,
            kind: 0,
            tag: 0,
        }
    }

    /// Parses an entry; `None` if it is not present.
    pub fn parse(raw: u64) -> Result<Option<Self>, BadAperture> {
        if raw & 1 == 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            aperture: Aperture::from_entry(raw >> 33).ok_or(BadAperture(raw))?,
            number: (raw >> 4 & 0xfff_ffff) as u32,
            privileged: raw & 1 << 1 != 0,
            read_only: raw & 1 << 2 != 0,
            volatile: raw & 1 << 32 != 0,
            kind: (raw >> 36) as u8,
            tag: (raw >> 44 & 0x1_ffff) as u32,
        }))
    }

    /// Encodes the entry; excess bits of the page number and the tag are dropped.
    pub fn encode(self) -> u64 {
        1 | u64::from(self.privileged) << 1
            | u64::from(self.read_only) << 2
            | u64::from(self.number & 0xfff_ffff) << 4
            | u64::from(self.volatile) << 32
            | self.aperture.to_entry() << 33
            | u64::from(self.kind) << 36
            | u64::from(self.tag & 0x1_ffff) << 44
    }

    /// The page's first 4 KiB.
    pub fn target(self) -> Target {
        Target::new(self.aperture, u64::from(self.number))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_entry_keeps_its_meaning(raw: u64) {
            if let Ok(Some(entry)) = Pte::parse(raw) {
                prop_assert_eq!(Pte::parse(entry.encode()), Ok(Some(entry)));
                // Bits 3, 35 and 63:61 have no meaning.
                let meaning = !(1 << 3 | 1 << 35 | 7 << 61);
                prop_assert_eq!(entry.encode(), raw & meaning);
            }
        }
    }

    #[test]
    fn aperture_1_is_an_error_only_of_what_is_present() {
        assert_eq!(Pte::parse(1 << 33), Ok(None));
        assert_eq!(Pte::parse(1 << 33 | 1), Err(BadAperture(1 << 33 | 1)));
    }
}
