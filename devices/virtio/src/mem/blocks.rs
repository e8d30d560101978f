//! Which blocks of the region are plugged.

use serde::{Deserialize, Serialize};

/// A range of blocks is plugged, unplugged, or some of it.
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
    /// So many blocks, all unplugged.
    pub fn new(count: usize) -> Self {
        Self {
            words: vec![0; count.div_ceil(64)],
            count,
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether a saved value has the bits that it says.
    pub fn is_consistent(&self) -> bool {
        let beyond = (self.count..self.words.len() * 64).any(|block| self.get(block));
        self.words.len() == self.count.div_ceil(64) && !beyond
    }

    fn get(&self, block: usize) -> bool {
        self.words
            .get(block / 64)
            .is_some_and(|word| word & 1 << (block % 64) != 0)
    }

    /// State of a range, which must lie within.
    pub fn state(&self, range: std::ops::Range<usize>) -> Plugged {
        let len = range.len();
        match range.filter(|&block| self.get(block)).count() {
            0 => Plugged::None,
            plugged if plugged == len => Plugged::All,
            _ => Plugged::Some,
        }
    }

    /// Plugs or unplugs a range, which must lie within.
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

    /// Those that are plugged.
    pub fn plugged_blocks(&self) -> impl Iterator<Item = usize> {
        (0..self.count).filter(|&block| self.get(block))
    }

    /// How many are plugged.
    pub fn plugged(&self) -> u64 {
        self.words
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum()
    }
}
