//! Virtio devices whose queues another process serves: the front end of vhost-user.
//!
//! The other process, the *back end*, maps the guest's memory and serves the queues in it, without Gantry. It is trusted
//! with that memory and with nothing else: whatever it says, or does not say, costs its own device only.
//!
//! ```text
//!   vCPU, control thread ──commands──> the device's thread ──messages, each with a deadline──> back end
//!   guest's kick (ioeventfd) ───────────────────────────────────────────────────────────────>  │
//!   guest's interrupt  <── the device's thread  <──────────────────────────────── call (eventfd) ┘
//! ```
//!
//! - [`backend`]: the first messages, in which both sides agree on features.
//! - [`device`]: the virtio device.
//! - [`model`]: the types of devices, and what Gantry adds to each.
//! - [`connection`]: messages and their answers.
//! - [`memory`]: the memory that is shared.
//!
//! The layout of the messages is that of crate `vhost`. Its `Frontend` is not used: it waits for an answer without end,
//! as it repeats a receive that has timed out, and accepts descriptors and sizes that nobody has asked for.

pub mod backend;
pub mod connection;
pub mod device;
mod error;
mod layout;
pub mod memory;
pub mod model;
mod outstanding;
mod rings;
mod thread;

pub use backend::Backend;
pub use device::{Handle, Options, PATIENCE, REMAP_PATIENCE, VhostUser};
pub use error::Error;
pub use model::Model;
#[cfg(test)]
mod tests;
