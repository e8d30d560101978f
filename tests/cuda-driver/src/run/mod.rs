//! Executes PTX on the CPU: a kernel's threads run one after the other, each until it waits for
//! others.
//!
//! - [`program`]: what is executed; [`lower`]: lowering PTX to it.
//! - [`memory`]: addresses that a kernel may access; [`arith`]: arithmetic.
//! - [`kernel`]: a launched one; [`thread`]: one thread; [`block`]: threads that wait for each other; [`print`]: `printf`.

pub mod arith;
pub mod block;
pub mod kernel;
pub mod lower;
pub mod memory;
mod print;
pub mod program;
mod thread;

pub use block::launch;
pub use kernel::Launch;

/// Why a kernel ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of error that the driver reports.
    pub kind: FaultKind,
    /// Location and reason.
    pub what: String,
}

/// Kinds of faults that the driver distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// An access to unallocated memory.
    IllegalAddress,
    /// An address that is not a multiple of the access's size.
    Misaligned,
    /// `trap`, or an instruction with invalid operands.
    IllegalInstruction,
    /// A failed `assert`.
    Assert,
    /// Threads wait for others that never arrive.
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
