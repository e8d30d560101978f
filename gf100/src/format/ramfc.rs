//! A channel's command state, in the first 512 bytes of its instance block: where its ring of
//! commands is, and how far it has come when it does not run.
//!
//! | offset | |
//! |---|---|
//! | 0x00 | GP_PUT: ring entries that have been submitted |
//! | 0x08, 0x0c | USERD: address in VRAM of the page that the CPU submits with |
//! | 0x10 | signature 0xface |
//! | 0x14 | GP_GET: ring entries that have been fetched |
//! | 0x18, 0x1c | address of the next command |
//! | 0x48, 0x4c | the ring: virtual address (bits 39:0), log2 of its entries (bits 20:16 of 0x4c) |
//!
//! Offsets 0x00, 0x14 and 0x18 are those of NVIDIA's published `dev_ram.h` for later chips, whose
//! other fields are where nouveau has them for this one.

use super::VA_BITS;

/// Bytes of it that are looked at.
pub const BYTES: usize = 0x100;
/// What [`Ramfc::signature`] has to be.
pub const SIGNATURE: u32 = 0xface;
/// log2 of the entries of the longest ring that is accepted: its bytes are 8 MiB.
pub const MAX_LOG2: u32 = 20;

/// A channel that does not run.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Ramfc {
    /// Entries submitted.
    pub gp_put: u32,
    /// Entries fetched.
    pub gp_get: u32,
    /// Address in VRAM of the page that the CPU submits with, a multiple of 512.
    pub userd: u64,
    /// Virtual address of the next command.
    pub get: u64,
    /// [`SIGNATURE`].
    pub signature: u32,
    /// Virtual address of the ring, a multiple of 8.
    pub gp_base: u64,
    /// log2 of the ring's entries, 5 bits.
    pub gp_log2: u32,
}

impl Ramfc {
    /// What the block says.
    pub fn parse(block: &[u8; BYTES]) -> Self {
        let word = |at: usize| {
            u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        let wide = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let va = (1 << VA_BITS) - 1;
        Self {
            gp_put: word(0x00),
            gp_get: word(0x14),
            userd: wide(0x08) & va & !0x1ff,
            get: wide(0x18) & va,
            signature: word(0x10),
            gp_base: wide(0x48) & va & !7,
            gp_log2: word(0x4c) >> 16 & 0x1f,
        }
    }

    /// Writes it into a block, whose other fields stay.
    pub fn encode(&self, block: &mut [u8; BYTES]) {
        let mut set = |at: usize, value: u32| {
            block[at..at + 4].copy_from_slice(&value.to_le_bytes());
        };
        set(0x00, self.gp_put);
        set(0x08, self.userd as u32);
        set(0x0c, (self.userd >> 32) as u32);
        set(0x10, self.signature);
        set(0x14, self.gp_get);
        set(0x18, self.get as u32);
        set(0x1c, (self.get >> 32) as u32);
        set(0x48, self.gp_base as u32);
        set(
            0x4c,
            (self.gp_base >> 32) as u32 & 0xff | (self.gp_log2 & 0x1f) << 16,
        );
    }

    /// Entries of the ring; none if it is longer than [`MAX_LOG2`] says.
    pub fn entries(&self) -> Option<u32> {
        (self.gp_log2 <= MAX_LOG2).then(|| 1 << self.gp_log2)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_block_keeps_its_meaning(words: [u32; BYTES / 4]) {
            let mut block = [0; BYTES];
            for (bytes, word) in block.chunks_mut(4).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            let parsed = Ramfc::parse(&block);
            let mut copy = block;
            parsed.encode(&mut copy);
            prop_assert_eq!(Ramfc::parse(&copy), parsed);
            prop_assert_eq!(&copy[0x50..], &block[0x50..]);
        }
    }

    #[test]
    fn a_ring_has_a_longest_length() {
        let ring = |gp_log2| {
            Ramfc {
                gp_log2,
                ..Ramfc::default()
            }
            .entries()
        };
        assert_eq!(ring(10), Some(1024));
        assert_eq!(ring(MAX_LOG2 + 1), None);
    }
}
