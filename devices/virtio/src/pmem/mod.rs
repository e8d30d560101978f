//! Persistent memory (virtio 1.2, 5.19): a file that the guest sees as memory.
//!
//! The file is mapped into the guest's address space once, when the device is created. The guest
//! then reads and writes it directly. The queue carries only flush requests, which a worker turns
//! into `fsync`.

mod backing;
mod device;
#[cfg(test)]
mod tests;
mod worker;

pub use backing::{ALIGNMENT, Backing, Error};
pub use device::{Options, Pmem, State};
