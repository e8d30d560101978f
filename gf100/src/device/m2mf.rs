//! Class 9039, memory to memory: copies of lines, and of data inlined in the push buffer (NVIDIA's
//! `cl9039.h`).
//!
//! | method | |
//! |---|---|
//! | 0x238, 0x23c | destination, high and low half; 0x30c, 0x310 source |
//! | 0x300 | go: bit 0 bytes come in 0x304; bits 4, 8 linear; 13:12 at 2 release a semaphore; bit 20 of one word; 17:16 at 1 interrupt |
//! | 0x304 | four of the bytes |
//! | 0x314, 0x318 | bytes from one line to the next, of source and destination |
//! | 0x31c, 0x320 | bytes of a line, lines |
//! | 0x32c, 0x330, 0x334 | the semaphore's address, high and low half, and word |

use super::{
    copy::{Copy, Release},
    fifo::{Refused, Registers},
    mmu::{BadAddress, Memory},
    tlb::User,
};
use crate::format::instance::Space;

const LAUNCH: u16 = 0x300;
const INLINE_DATA: u16 = 0x304;
const INLINE: u32 = 1;
const LINEAR: u32 = 1 << 4 | 1 << 8;

/// Inline data that is to arrive through the push buffer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Inline {
    rest: Copy,
}

/// What a method requests.
#[derive(Debug, Eq, PartialEq)]
pub enum Work {
    /// Nothing.
    None,
    /// A copy, and whether to interrupt after it.
    Copy(Copy, bool),
    /// Inline data will follow.
    Inline(Inline),
    /// Four bytes of inline data.
    Data([u8; 4]),
}

/// Executes a method whose word is already in `registers`.
pub fn method(registers: &Registers, address: u16, data: u32) -> Result<Work, Refused> {
    match address {
        LAUNCH => launch(registers, data),
        INLINE_DATA => Ok(Work::Data(data.to_le_bytes())),
        _ => Ok(Work::None),
    }
}

fn launch(registers: &Registers, data: u32) -> Result<Work, Refused> {
    // A source in the push buffer has no layout.
    let linear = if data & INLINE != 0 { 1 << 8 } else { LINEAR };
    if data & linear != linear {
        return Err(Refused);
    }
    let address = |at| u64::from(registers.get(at) & 0xff) << 32 | u64::from(registers.get(at + 4));
    let release = (data >> 12 & 3 == 2).then(|| Release {
        address: address(0x32c),
        payload: registers.get(0x334),
        with_time: data & 1 << 20 == 0,
    });
    let copy = Copy {
        source: address(0x30c),
        destination: address(0x238),
        source_pitch: registers.get(0x314),
        destination_pitch: registers.get(0x318),
        line: registers.get(0x31c),
        lines: registers.get(0x320),
        done: 0,
        release,
    };
    Ok(match data & INLINE {
        0 => Work::Copy(copy, data >> 16 & 3 == 1),
        _ => Work::Inline(Inline { rest: copy }),
    })
}

impl Inline {
    /// Stores inline bytes. Returns whether they were the last ones. Bytes beyond the end of a line
    /// are padding.
    pub fn store(
        &mut self,
        bytes: [u8; 4],
        memory: &Memory,
        space: Space,
        now: u64,
    ) -> Result<bool, BadAddress> {
        let rest = &mut self.rest;
        if rest.lines > 0 && rest.line > 0 {
            let len = (rest.line - rest.done).min(4);
            let to = rest.destination.wrapping_add(u64::from(rest.done));
            memory.write_at(User::Engine, space, to, &bytes[..len as usize])?;
            rest.done += len;
            if rest.done == rest.line {
                rest.done = 0;
                rest.lines -= 1;
                rest.destination = rest
                    .destination
                    .wrapping_add(u64::from(rest.destination_pitch));
            }
        }
        if rest.lines > 0 && rest.line > 0 {
            return Ok(false);
        }
        if let Some(release) = rest.release.take() {
            release.write(memory, space, now)?;
        }
        Ok(true)
    }
}
