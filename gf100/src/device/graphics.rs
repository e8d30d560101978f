//! Classes 9097 (3D) and 90c0 (compute): state is kept, queries are answered. Nothing is drawn: those
//! methods are refused. Kernels are [`compute`](super::compute)'s.
//!
//! | method | |
//! |---|---|
//! | 0x1b00, 0x1b04, 0x1b08 | a query's address, high and low half, and word |
//! | 0x1b0c | write it: bits 1:0 at 0 the word, else a counter, all of which are 0; bit 28 without the time |

use super::{
    copy::Release,
    fifo::{Refused, Registers},
};

/// Which class.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// 9097.
    Draw,
    /// 90c0.
    Compute,
}

const QUERY: u16 = 0x1b0c;
/// 9097: begins to draw vertices.
const DRAW: u16 = 0x1618;
/// 9097: clears buffers.
const CLEAR: u16 = 0x19d0;

/// A method, whose word is in `registers` already.
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
