//! Copies lines of bytes in pieces, and implements the methods of the copy engines' classes 90b5
//! and 90b8.
//!
//! | method | |
//! |---|---|
//! | 0x300 | go: bits 4, 8 source, destination linear; bit 12 write a query after, bit 13 a short one |
//! | 0x304 | flush |
//! | 0x30c, 0x310 | source, high and low half; 0x314, 0x318 destination |
//! | 0x31c, 0x320 | bytes from one line to the next, of source and destination |
//! | 0x324, 0x328 | bytes of a line, lines |
//! | 0x338, 0x33c, 0x340 | query address, high and low half, and query word |
//!
//! The class's physical mode (0x250) is for privileged channels, which nouveau does not create. It
//! is refused, like tiled surfaces and byte swapping, which nouveau does not use.

use super::{
    fifo::{Budget, Refused, Registers},
    mmu::{Access, BadAddress, Memory},
    tlb::User,
};
use crate::format::{PAGE, instance::Space};

const EXECUTE: u16 = 0x300;
const FORMAT: u32 = 1;
const LINEAR: u32 = 1 << 4 | 1 << 8;
const QUERY: u32 = 1 << 12;
const QUERY_SHORT: u32 = 1 << 13;

/// Cost of one piece of a copy.
const PIECE_COST: u32 = 16;

/// A word that is written when work is done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Release {
    /// Its virtual address.
    pub address: u64,
    /// The word.
    pub payload: u32,
    /// Whether the time is written as well, for 16 bytes in total.
    pub with_time: bool,
}

impl Release {
    /// Writes the word. `now` is in nanoseconds.
    pub fn write(self, memory: &Memory, space: Space, now: u64) -> Result<(), BadAddress> {
        if self.with_time {
            // The word is written last, so whoever sees it sees the time.
            memory.write_at(
                User::Engine,
                space,
                self.address.wrapping_add(8),
                &now.to_le_bytes(),
            )?;
            memory.write_at(User::Engine, space, self.address.wrapping_add(4), &[0; 4])?;
        }
        memory.write_at(
            User::Engine,
            space,
            self.address,
            &self.payload.to_le_bytes(),
        )
    }
}

/// A copy in progress.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Copy {
    /// Virtual address of the first line of the source.
    pub source: u64,
    /// Virtual address of the first line of the destination.
    pub destination: u64,
    /// Bytes from one line of the source to the next.
    pub source_pitch: u32,
    /// Bytes from one line of the destination to the next.
    pub destination_pitch: u32,
    /// Bytes per line.
    pub line: u32,
    /// Remaining lines.
    pub lines: u32,
    /// Number of bytes of the current line that are done.
    pub done: u32,
    /// Written when the copy is done.
    pub release: Option<Release>,
}

impl Copy {
    /// Continues until the copy is done or the budget is spent. Returns whether it is done.
    pub fn advance(
        &mut self,
        memory: &Memory,
        space: Space,
        now: u64,
        budget: &mut Budget,
    ) -> Result<bool, BadAddress> {
        let mut buffer = [0; PAGE as usize];
        while self.lines > 0 && self.line > 0 {
            if !budget.spend(PIECE_COST) {
                return Ok(false);
            }
            let source = self.source.wrapping_add(u64::from(self.done));
            let destination = self.destination.wrapping_add(u64::from(self.done));
            let from = memory.translate(User::Engine, space, source, Access::Read)?;
            let to = memory.translate(User::Engine, space, destination, Access::Write)?;
            let left = u64::from(self.line - self.done);
            // At most one page.
            let len = left.min(from.len).min(to.len).min(PAGE);
            let piece = &mut buffer[..len as usize];
            let missing = |address, access| BadAddress {
                address,
                access,
                reason: crate::registers::interrupts::Reason::NoPage,
            };
            if !memory.read(from.place, piece) {
                return Err(missing(source, Access::Read));
            }
            if !memory.write(to.place, piece) {
                return Err(missing(destination, Access::Write));
            }
            self.done += len as u32;
            if self.done == self.line {
                self.done = 0;
                self.lines -= 1;
                self.source = self.source.wrapping_add(u64::from(self.source_pitch));
                self.destination = self
                    .destination
                    .wrapping_add(u64::from(self.destination_pitch));
            }
        }
        if let Some(release) = self.release.take() {
            release.write(memory, space, now)?;
        }
        Ok(true)
    }
}

/// Executes a method of class 90b5 or 90b8 whose word is already in `registers`.
pub fn method(registers: &Registers, address: u16, data: u32) -> Result<Option<Copy>, Refused> {
    match address {
        0x100 | 0x140 | 0x200..=0x218 | 0x220..=0x238 | 0x304 | 0x30c..=0x340 => Ok(None),
        EXECUTE => execute(registers, data).map(Some),
        _ => Err(Refused),
    }
}

fn execute(registers: &Registers, data: u32) -> Result<Copy, Refused> {
    let known = FORMAT | LINEAR | QUERY | QUERY_SHORT;
    if data & LINEAR != LINEAR || data & FORMAT != 0 || data & !known != 0 {
        return Err(Refused);
    }
    // Fields have the widths that the engine checks.
    let field = |at, bits: u32| match registers.get(at) {
        word if word >> bits == 0 => Ok(word),
        _ => Err(Refused),
    };
    let address =
        |at| Ok::<_, Refused>(u64::from(field(at, 8)?) << 32 | u64::from(registers.get(at + 4)));
    let release = match data & QUERY {
        0 => None,
        _ => Some(Release {
            address: address(0x338)?,
            payload: registers.get(0x340),
            with_time: data & QUERY_SHORT == 0,
        }),
    };
    Ok(Copy {
        source: address(0x30c)?,
        destination: address(0x314)?,
        source_pitch: field(0x31c, 19)?,
        destination_pitch: field(0x320, 19)?,
        line: field(0x324, 16)?,
        lines: field(0x328, 13)?,
        done: 0,
        release,
    })
}
