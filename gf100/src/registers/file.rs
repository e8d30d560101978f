//! Storage for register values that were written.

use std::collections::BTreeMap;

/// Number of words that are allocated at once.
const PIECE: usize = 1 << 10;

/// Registers that hold what was written. The storage grows with the written registers, up to the
/// size of BAR 0.
pub struct File {
    power_on: BTreeMap<u32, u32>,
    pieces: BTreeMap<u32, Box<Piece>>,
}

struct Piece {
    words: [u32; PIECE],
    written: [bool; PIECE],
}

impl File {
    /// Creates registers with these power-on values, by address.
    pub fn new(power_on: BTreeMap<u32, u32>) -> Self {
        Self {
            power_on,
            pieces: BTreeMap::new(),
        }
    }

    /// The power-on values.
    pub fn power_on(&self) -> impl Iterator<Item = (u32, u32)> {
        self.power_on.iter().map(|(at, value)| (*at, *value))
    }

    /// Returns the last written value, or the power-on value. `at` is a multiple of 4.
    pub fn read(&self, at: u32) -> Option<u32> {
        let (piece, word) = place(at);
        let written = self
            .pieces
            .get(&piece)
            .and_then(|piece| piece.written[word].then_some(piece.words[word]));
        written.or_else(|| self.power_on.get(&at).copied())
    }

    /// Writes a word.
    pub fn write(&mut self, at: u32, value: u32) {
        let (piece, word) = place(at);
        let piece = self.pieces.entry(piece).or_insert_with(|| {
            Box::new(Piece {
                words: [0; PIECE],
                written: [false; PIECE],
            })
        });
        piece.words[word] = value;
        piece.written[word] = true;
    }
}

fn place(at: u32) -> (u32, usize) {
    let word = at / 4;
    (word / PIECE as u32, word as usize % PIECE)
}
