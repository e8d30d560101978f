//! Memory that is plugged and unplugged in blocks (virtio-mem; virtio 1.2, 5.15).
//!
//! The VM has a region of RAM for the device. All of it exists from the start, and uses no host
//! memory until it is touched. The device announces how much of it the guest may use; unplugged
//! memory is returned to the host.

mod blocks;
mod device;

pub use device::{BLOCK, Error, Handle, Mem, Options, State};

#[cfg(test)]
mod tests;
