//! Tracks which blocks of the region are plugged.

use serde::{Deserialize, Serialize};

/// Whether all, none or some blocks of a range are plugged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Plugged {
    All,
    None,
    Some,
}

/// One bit per block.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Blocks {
    words: Vec<u64>,
    count: usize,
}

impl Blocks {
    /// Creates `count` blocks, all unplugged.
    pub fn new(count: usize) -> Self {
        Self {
            words: vec![0; count.div_ceil(64)],
            count,
        }
    }

    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether a saved value has exactly the bits for its number of blocks.
    pub fn is_consistent(&self) -> bool {
        let beyond = (self.count..self.words.len() * 64).any(|block| self.get(block));
        self.words.len() == self.count.div_ceil(64) && !beyond
    }

    fn get(&self, block: usize) -> bool {
        self.words
            .get(block / 64)
            .is_some_and(|word| word & 1 << (block % 64) != 0)
    }

    /// State of a range, which must lie within the region.
    pub fn state(&self, range: std::ops::Range<usize>) -> Plugged {
        let len = range.len();
        match range.filter(|&block| self.get(block)).count() {
            0 => Plugged::None,
            plugged if plugged == len => Plugged::All,
            _ => Plugged::Some,
        }
    }

    /// Plugs or unplugs a range, which must lie within the region.
    pub fn set(&mut self, range: std::ops::Range<usize>, plugged: bool) {
        for block in range {
            if let Some(word) = self.words.get_mut(block / 64) {
                let bit = 1 << (block % 64);
                if plugged {
                    *word |= bit;
                } else {
                    *word &= !bit;
                }
            }
        }
    }

    /// Indexes of the plugged blocks.
    pub fn plugged_blocks(&self) -> impl Iterator<Item = usize> {
        (0..self.count).filter(|&block| self.get(block))
    }

    /// Number of plugged blocks.
    pub fn plugged(&self) -> u64 {
        self.words
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum()
    }
}
