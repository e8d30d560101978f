//! Interrupt lines (INTx; PCI 3.0, 2.2.6), for functions and drivers that have nothing better.

use std::io;

use vmm_sys_util::eventfd::EventFd;

use super::bdf::Bdf;

/// Lines that the host bridge forwards, which the slots share.
pub const LINES: u8 = 4;

/// The line of a slot, below [`LINES`]: all functions use their pin A.
pub fn line_of(slot: Bdf) -> u8 {
    slot.bus.wrapping_add(slot.device) % LINES
}

/// Hands out interrupt lines. Implemented over KVM's resampling irqfds by the machine.
pub trait Lines: Send + Sync {
    /// One more user of a line (see [`line_of`]). It is given back when the result is dropped.
    fn join(&self, line: u8) -> io::Result<Box<dyn Line>>;
}

/// A function's share of an interrupt line.
pub trait Line: Send + Sync {
    /// Asserts the line when it is written.
    fn assert(&self) -> &EventFd;

    /// Becomes readable when the guest has served the interrupt; the line is not asserted then. A
    /// device that still wants it has to assert it again.
    fn served(&self) -> &EventFd;
}
