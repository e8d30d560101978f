//! Network card over a tap interface (virtio 1.2, 5.1).
//!
//! ```text
//!   tap queue k <── readv/writev, no copy ──> worker k (_net0_qpK) <──> queues 2k, 2k+1
//!   control queue ──> worker 0: queue pairs, offloads
//! ```
//!
//! - [`tap`]: the host's interface.
//! - [`frames`]: one pair of queues.

mod control;
mod device;
mod frames;
pub mod tap;

pub use device::{Error, Net, Options, State};

#[cfg(test)]
mod tests;
