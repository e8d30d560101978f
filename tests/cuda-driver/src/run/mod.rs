//! Executing PTX on the CPU: a kernel's threads one after the other, each until it waits for others.
//!
//! - [`program`]: what is executed; [`lower`], [`opcode`]: how it is made from PTX.
//! - [`memory`]: which addresses a kernel may use; [`arith`]: numbers.
//! - [`thread`]: one thread; [`block`]: threads that wait for each other; [`print`]: `printf`.

pub mod arith;
pub mod block;
pub mod lower;
pub mod memory;
mod opcode;
mod print;
pub mod program;
mod thread;

pub use block::{Launch, launch};

/// Why a kernel ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What the driver reports.
    pub kind: FaultKind,
    /// Where and why.
    pub what: String,
}

/// Kinds of faults that the driver tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Memory that is nobody's.
    IllegalAddress,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// `trap`, or an instruction that makes no sense with its operands.
    IllegalInstruction,
    /// A failed `assert`.
    Assert,
    /// Threads wait for others that never come.
    Failed,
}

impl Fault {
    /// A fault and its explanation.
    pub fn new(kind: FaultKind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
        }
    }
}
