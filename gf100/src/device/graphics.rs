//! Classes 9097 (3D) and 90c0 (compute): methods store state, and queries are executed. Nothing is
//! drawn: drawing methods are refused. [`compute`](super::compute) executes kernels.
//!
//! | method | |
//! |---|---|
//! | 0x1b00, 0x1b04, 0x1b08 | query address, high and low half, and query word |
//! | 0x1b0c | execute the query: bits 1:0 at 0 write the word, else a counter (all counters are 0);
//! bit 28 omits the time |

use super::{
    copy::Release,
    fifo::{Refused, Registers},
};

/// The class.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// 9097.
    Draw,
    /// 90c0.
    Compute,
}

const QUERY: u16 = 0x1b0c;
/// 9097: starts drawing vertices.
const DRAW: u16 = 0x1618;
/// 9097: clears buffers.
const CLEAR: u16 = 0x19d0;

/// Executes a method. Its word is already in `registers`.
pub fn method(
    kind: Kind,
    registers: &Registers,
    address: u16,
    data: u32,
) -> Result<Option<Release>, Refused> {
    match (kind, address) {
        (_, QUERY) => Ok(Some(Release {
            address: u64::from(registers.get(0x1b00) & 0xff) << 32
                | u64::from(registers.get(0x1b04)),
            payload: if data & 3 == 0 {
                registers.get(0x1b08)
            } else {
                0
            },
            with_time: data & 1 << 28 == 0,
        })),
        (Kind::Draw, DRAW | CLEAR) => Err(Refused),
        _ => Ok(None),
    }
}
