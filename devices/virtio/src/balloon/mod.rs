//! Memory balloon (virtio 1.2, 5.5): memory that the guest gives up, and pages that it reports
//! as free.

mod device;
mod queues;

pub use device::{Balloon, Handle, Options};

#[cfg(test)]
mod tests;
