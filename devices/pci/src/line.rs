//! Interrupt lines (INTx; PCI 3.0, 2.2.6), for functions and drivers that support nothing better.

use std::io;

use vmm_sys_util::eventfd::EventFd;

use super::bdf::Bdf;

/// Number of lines that the host bridge forwards; the slots share them.
pub const LINES: u8 = 4;

/// The line of a slot, below [`LINES`]. All functions use their pin A.
pub fn line_of(slot: Bdf) -> u8 {
    slot.bus.wrapping_add(slot.device) % LINES
}

/// Provides interrupt lines. The VM implements this with KVM's resampling irqfds.
pub trait Lines: Send + Sync {
    /// Adds a user of a line (see [`line_of`]), until the result is dropped.
    fn join(&self, line: u8) -> io::Result<Box<dyn Line>>;
}

/// A function's share of an interrupt line.
pub trait Line: Send + Sync {
    /// Asserts the line when written.
    fn assert(&self) -> &EventFd;

    /// Becomes readable when the guest has served the interrupt, which deasserts the line. A device
    /// that still needs an interrupt has to assert it again.
    fn served(&self) -> &EventFd;
}
