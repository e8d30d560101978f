//! Network card backed by a tap interface (virtio 1.2, 5.1).
//!
//! ```text
//!   tap queue k <── readv/writev, no copy ──> worker k (_net0_qpK) <──> queues 2k, 2k+1
//!   control queue ──> worker 0: queue pairs, offloads
//! ```
//!
//! - [`tap`], [`interface`]: the host side.
//! - [`frames`]: one queue pair; [`receive`]: frames to the guest, in mergeable buffers;
//!   [`buffers`]: guest memory as arguments of system calls.
//! - [`control`]: the driver's choices; [`announce`]: notifies switches of a guest that moved.

mod announce;
mod buffers;
mod control;
mod counters;
mod device;
mod frames;
mod interface;
mod receive;
pub mod tap;

pub use device::{Error, Net, Options, State, random_mac};
pub use interface::Interface;

#[cfg(test)]
mod tests;
