//! Instance blocks: a page that describes a channel or a BAR. It contains the address space, the
//! location of the engines' state, and (in its first 512 bytes, [`ramfc`](super::ramfc)) the
//! location of the commands.
//!
//! | offset | |
//! |---|---|
//! | 0x200 | page directory: bits 1:0 aperture, 39:12 address |
//! | 0x208 | last address of the space |
//! | 0x210 + 0x10 n | state of engine n: bits 39:12 virtual address; bit 2 is set if it exists |

use super::{Aperture, PAGE_SHIFT, Target, VA_BITS};

/// Number of bytes that are used here.
pub const BYTES: usize = 0x280;
/// Offset of the page directory's address.
pub const DIRECTORY: usize = 0x200;
/// Offset of the last address.
pub const LIMIT: usize = 0x208;
/// Offset of the first engine's state.
pub const ENGINES: usize = 0x210;
/// Number of engines that have state.
pub const ENGINE_COUNT: usize = 7;

/// An address space: a page directory and a limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Space {
    /// The memory that contains the directory.
    pub aperture: Aperture,
    /// Number of its first page, 28 bits.
    pub number: u32,
    /// The last valid address, 40 bits.
    pub limit: u64,
}

impl Space {
    /// The directory's first page.
    pub fn directory(self) -> Target {
        Target::new(self.aperture, u64::from(self.number))
    }

    /// Parses the two fields of an instance block; `None` if the aperture does not exist.
    pub fn parse(directory: u64, limit: u64) -> Option<Self> {
        Some(Self {
            aperture: Aperture::from_entry(directory)?,
            number: (directory >> PAGE_SHIFT & 0xfff_ffff) as u32,
            limit: limit & ((1 << VA_BITS) - 1),
        })
    }

    /// Encodes the two fields.
    pub fn encode(self) -> [u64; 2] {
        [
            self.aperture.to_entry() | u64::from(self.number & 0xfff_ffff) << PAGE_SHIFT,
            self.limit & ((1 << VA_BITS) - 1),
        ]
    }
}

/// The addresses in an instance block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct InstanceBlock {
    /// The address space.
    pub space: Space,
    /// Virtual addresses of the state of those engines that have one.
    pub engines: [Option<u64>; ENGINE_COUNT],
}

impl InstanceBlock {
    /// Parses a block; `None` if its page directory is in an aperture that does not exist.
    pub fn parse(block: &[u8; BYTES]) -> Option<Self> {
        let space = Space::parse(field(block, DIRECTORY), field(block, LIMIT))?;
        let mut engines = [None; ENGINE_COUNT];
        for (index, engine) in engines.iter_mut().enumerate() {
            let raw = field(block, ENGINES + index * 0x10);
            *engine = (raw & 4 != 0).then_some(raw & 0xff_ffff_f000);
        }
        Some(Self { space, engines })
    }

    /// Writes the values into a block and keeps the other fields.
    pub fn encode(&self, block: &mut [u8; BYTES]) {
        let [directory, limit] = self.space.encode();
        let mut set = |at: usize, value: u64| {
            block[at..at + 8].copy_from_slice(&value.to_le_bytes());
        };
        set(DIRECTORY, directory);
        set(LIMIT, limit);
        for (index, engine) in self.engines.iter().enumerate() {
            let raw = engine.map_or(0, |at| at & 0xff_ffff_f000 | 4);
            set(ENGINES + index * 0x10, raw);
        }
    }
}

/// Reads eight bytes; all callers pass an offset within the block.
fn field(block: &[u8; BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&block[at..at + 8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_block_keeps_its_meaning(tail: [u64; 16]) {
            let mut block = [0; BYTES];
            for (bytes, value) in block[DIRECTORY..].chunks_mut(8).zip(tail) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            if let Some(parsed) = InstanceBlock::parse(&block) {
                let mut copy = [0; BYTES];
                parsed.encode(&mut copy);
                prop_assert_eq!(InstanceBlock::parse(&copy), Some(parsed));
            }
        }
    }

    #[test]
    fn as_nouveau_writes_it() {
        let mut block = [0; BYTES];
        block[0x200..0x208].copy_from_slice(&0x1234_5000_u64.to_le_bytes());
        block[0x208..0x210].copy_from_slice(&0xff_ffff_ffff_u64.to_le_bytes());
        block[0x230..0x238].copy_from_slice(&0x40_0004_u64.to_le_bytes());
        let parsed = InstanceBlock::parse(&block).expect("aperture 0 is there");
        assert_eq!(parsed.space.directory().address(), 0x1234_5000);
        assert_eq!(
            parsed.engines,
            [None, None, Some(0x40_0000), None, None, None, None]
        );
    }
}
