//! Memory that is plugged in and out by the block (virtio-mem; virtio 1.2, 5.15).
//!
//! The machine has a region of RAM for the device, all of which exists from the start and costs
//! nothing until it is touched. The device says how much of it the guest may use; what is
//! unplugged goes back to the host.

mod blocks;
mod device;

pub use device::{BLOCK, Error, Handle, Mem, Options, State};

#[cfg(test)]
mod tests;
