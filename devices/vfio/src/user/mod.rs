//! Devices that another process serves (vfio-user).
//!
//! The server listens on a Unix socket and speaks VFIO as messages:
//!
//! ```text
//!   Function ── Device ──> UserDevice ── one question, one answer ──> server
//!   guest driver ── BAR, if the server gave its memory ────────────> (no exit, no message)
//!   guest RAM, shared <──────────────────── mapped by the server ──── DMA
//!   guest <── interrupt <── KVM irqfd <── eventfd <────────────────── interrupt
//! ```
//!
//! Messages and their answers are crate [`vfio_client`]'s.
//!
//! - [`device`]: the device as [`super::Device`]; [`watch`]: sees the server go.
//!
//! # What a server can do
//! It is trusted with the guest: it reads and writes all of guest RAM. It is not trusted with
//! Gantry. One that does not answer within [`Patience`], that goes, or whose answer makes no
//! sense loses its device: from then on the guest's reads give ones and its writes nothing, until
//! the device is removed. Memory that a server gives for a BAR is mapped only when it is sealed
//! against shrinking: a vCPU that touches a page that is no longer there would end the VM.

mod device;
mod error;
mod watch;

pub use device::{Patience, Surroundings, UserDevice};
pub use error::Error;
pub use vfio_client::Failure;

#[cfg(test)]
mod tests;
