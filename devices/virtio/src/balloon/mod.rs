//! Memory balloon (virtio 1.2, 5.5): the guest gives up memory and reports free pages.

mod device;
mod queues;
mod shared;

pub use device::{Balloon, Handle, Options};

#[cfg(test)]
mod tests;
