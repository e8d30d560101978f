//! Embedded processors ("falcons"). Their code and data memories can be written and read through
//! auto-incrementing ports. Their code is never run: its function is built in.

use std::collections::BTreeMap;

/// Base registers of the existing falcons: power manager, copy engines, the two of the graphics
/// engine.
pub const BASES: [u32; 5] = [0x10_a000, 0x10_4000, 0x10_5000, 0x40_9000, 0x41_a000];

/// Size of each memory in words.
const WORDS: u32 = 1 << 14;

const CODE_PORT: u32 = 0x180;
const CODE: u32 = 0x184;
const DATA_PORT: u32 = 0x1c0;
const DATA: u32 = 0x1c4;
const WRITES_ADVANCE: u32 = 1 << 24;
const READS_ADVANCE: u32 = 1 << 25;

/// The memories that were written, by base register of their falcon.
#[derive(Default)]
pub struct Falcons {
    falcons: BTreeMap<u32, [Memory; 2]>,
}

#[derive(Default)]
struct Memory {
    port: u32,
    words: BTreeMap<u32, u32>,
}

impl Memory {
    fn at(&self) -> u32 {
        (self.port & 0xffff) / 4 % WORDS
    }

    fn advance(&mut self, when: u32) {
        if self.port & when != 0 {
            self.port = self.port & !0xffff | (self.port & 0xffff).wrapping_add(4) & 0xffff;
        }
    }
}

/// Returns the base of the falcon, the index of its memory, and whether this is the port.
fn place(at: u32) -> Option<(u32, usize, bool)> {
    let base = BASES.into_iter().find(|base| at & !0xfff == *base)?;
    match at & 0xfff {
        CODE_PORT => Some((base, 0, true)),
        CODE => Some((base, 0, false)),
        DATA_PORT => Some((base, 1, true)),
        DATA => Some((base, 1, false)),
        _ => None,
    }
}

impl Falcons {
    /// Reads a register, if it belongs to a falcon.
    pub fn read(&mut self, at: u32) -> Option<u32> {
        let (base, memory, is_port) = place(at)?;
        let memory = &mut self.falcons.entry(base).or_default()[memory];
        if is_port {
            return Some(memory.port);
        }
        let value = memory.words.get(&memory.at()).copied().unwrap_or(0);
        memory.advance(READS_ADVANCE);
        Some(value)
    }

    /// Writes a register, if it belongs to a falcon.
    pub fn write(&mut self, at: u32, value: u32) -> bool {
        let Some((base, memory, is_port)) = place(at) else {
            return false;
        };
        let memory = &mut self.falcons.entry(base).or_default()[memory];
        if is_port {
            memory.port = value;
        } else {
            memory.words.insert(memory.at(), value);
            memory.advance(WRITES_ADVANCE);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_advance_as_asked() {
        let mut falcons = Falcons::default();
        falcons.write(0x10_41c0, WRITES_ADVANCE | 8);
        falcons.write(0x10_41c4, 1);
        falcons.write(0x10_41c4, 2);
        falcons.write(0x10_41c0, READS_ADVANCE | 8);
        assert_eq!(falcons.read(0x10_41c4), Some(1));
        assert_eq!(falcons.read(0x10_41c4), Some(2));
        assert_eq!(falcons.read(0x10_51c4), Some(0));
        assert_eq!(falcons.read(0x10_4100), None);
    }
}
