//! The code that switches between the sides.
//!
//! `module/trampoline.inc` is its source, for the kernel module and for programs in Rust. It is
//! copied into a page of its own and runs at [`window::TRAMPOLINE`](crate::window::TRAMPOLINE). It
//! is position-independent: it finds the other pages of the [`window`](crate::window) relative to
//! itself. Its calling convention is System V. It requires FSGSBASE to be enabled (CR4 bit 16),
//! which Linux has done since 5.9 on CPUs that support it.
//!
//! One round trip executes fewer than 150 instructions; `bare/` counts them.

use core::{arch::global_asm, slice};

/// The result of a delegation.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What the handler returned with [`DONE`], why it was ended with [`ABORTED`], otherwise 0.
    pub value: u64,
    /// [`DONE`], [`NO_HANDLER`], [`ABORTED`] or [`BUSY`].
    pub status: u64,
}

/// [`Reply::status`]: the handler ran.
pub const DONE: u64 = 0;

/// [`Reply::status`]: the server has no handler with that index.
pub const NO_HANDLER: u64 = 1;

/// [`Reply::status`]: the hypervisor ended the delegation; the value says why.
pub const ABORTED: u64 = 2;

/// [`Reply::status`]: a thread that was interrupted on this vCPU is in the server.
pub const BUSY: u64 = 3;

/// Why a delegation was ended: the server is gone, or was unpaired.
pub const SERVER_GONE: u64 = 1;

/// Why a delegation was ended: the handler used memory that the server does not have.
pub const VIOLATION: u64 = 2;

/// Why a delegation was ended: an exception in the handler.
pub const EXCEPTION: u64 = 3;

/// Why a delegation was ended: the handler executed something that needs the hypervisor.
pub const EXIT: u64 = 4;

/// Why a delegation was ended: it was interrupted, and its thread continued on another vCPU.
pub const LOST: u64 = 5;

/// Why a delegation did not start: the server's own vCPU is running slow work.
pub const AWAKE: u64 = 6;

/// The trampoline as a function: the index of the handler, and its two arguments.
pub type Delegate = unsafe extern "C" fn(handler: u64, first: u64, second: u64) -> Reply;

/// A handler. It runs on the server's side, in the client's ring.
pub type Handler = extern "C" fn(first: u64, second: u64) -> u64;

// The build script replaces the names of `module/gate.h`.
global_asm!(
    ".pushsection .text.vmfunc_gate, \"ax\", @progbits",
    include_str!(concat!(env!("OUT_DIR"), "/trampoline.s")),
    ".popsection",
);

unsafe extern "C" {
    static vmfunc_gate_start: u8;
    static vmfunc_gate_leave: u8;
    static vmfunc_gate_parked: u8;
    static vmfunc_gate_end: u8;
}

/// The trampoline's machine code, to be copied to the start of a page.
#[must_use]
pub fn code() -> &'static [u8] {
    let start = &raw const vmfunc_gate_start;
    let length = &raw const vmfunc_gate_end as usize - start as usize;
    // SAFETY: the symbols enclose the code above, which nothing writes.
    unsafe { slice::from_raw_parts(start, length) }
}

/// The offset of the VMFUNC instruction that leaves the server. Tests attack it.
#[must_use]
pub fn leave_offset() -> u64 {
    (&raw const vmfunc_gate_leave as usize - &raw const vmfunc_gate_start as usize) as u64
}

/// The offset of the instruction that asks for the rest of a parked delegation. Tests attack it.
#[must_use]
pub fn parked_offset() -> u64 {
    (&raw const vmfunc_gate_parked as usize - &raw const vmfunc_gate_start as usize) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window;

    #[test]
    fn fits_into_a_page_and_leaves_with_vmfunc() {
        let leave = leave_offset() as usize;
        assert!(code().len() <= window::PAGE as usize);
        assert_eq!(code()[leave..leave + 3], [0x0f, 0x01, 0xd4]);
    }

    #[test]
    fn has_exactly_two_vmfunc_instructions() {
        let found = code()
            .windows(3)
            .filter(|bytes| *bytes == [0x0f, 0x01, 0xd4]);
        assert_eq!(found.count(), 2);
    }
}
