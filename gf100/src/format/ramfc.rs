//! RAMFC: a channel's command state, in the first 512 bytes of its instance block. It contains the
//! location of the command ring, and the channel's progress while the channel is not running.
//!
//! | offset | |
//! |---|---|
//! | 0x00 | GP_PUT: index after the last submitted ring entry |
//! | 0x08, 0x0c | USERD: address in VRAM of the page through which the CPU submits |
//! | 0x10 | signature 0xface |
//! | 0x14 | GP_GET: index of the next ring entry to fetch |
//! | 0x18, 0x1c | address of the next command |
//! | 0x48, 0x4c | the ring: virtual address (bits 39:0), log2 of its number of entries (bits 20:16
//! of 0x4c) |
//!
//! Offsets 0x00, 0x14 and 0x18 are those of NVIDIA's published `dev_ram.h` for later chips. Its
//! other fields are where nouveau expects them for this chip.

use super::VA_BITS;

/// Number of bytes that are used here.
pub const BYTES: usize = 0x100;
/// The required value of [`Ramfc::signature`].
pub const SIGNATURE: u32 = 0xface;
/// log2 of the number of entries of the longest accepted ring, which has 8 MiB.
pub const MAX_LOG2: u32 = 20;

/// The state of a channel that is not running.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Ramfc {
    /// Index after the last submitted entry.
    pub gp_put: u32,
    /// Index of the next entry to fetch.
    pub gp_get: u32,
    /// Address in VRAM of the page through which the CPU submits, a multiple of 512.
    pub userd: u64,
    /// Virtual address of the next command.
    pub get: u64,
    /// [`SIGNATURE`].
    pub signature: u32,
    /// Virtual address of the ring, a multiple of 8.
    pub gp_base: u64,
    /// log2 of the number of ring entries, 5 bits.
    pub gp_log2: u32,
}

impl Ramfc {
    /// Parses a block.
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

    /// Writes the state into a block and keeps the other fields.
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

    /// Number of ring entries; `None` if the ring is longer than [`MAX_LOG2`] allows.
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
