//! Devices that another process serves (vfio-user).
//!
//! The server listens on a Unix socket and speaks VFIO as messages:
//!
//! ```text
//!   Function ── Device ──> UserDevice ── one request, one reply ────> server
//!   guest driver ── BAR, if the server gave its memory ────────────> (no exit, no message)
//!   guest RAM, shared <──────────────────── mapped by the server ──── DMA
//!   guest <── interrupt <── KVM irqfd <── eventfd <────────────────── interrupt
//! ```
//!
//! The crate [`vfio_client`] implements the messages.
//!
//! - [`device`]: the device as a [`super::Device`]; [`watch`]: detects that the server has gone.
//!
//! # What a server can do
//! It is trusted with the guest: it reads and writes all of guest RAM. It is not trusted with
//! Gantry. A server loses its device if it does not reply within [`Patience`], if it closes the
//! connection, or if it sends an invalid reply. From then on guest reads return all ones and guest
//! writes are dropped, until the device is removed. Memory that a server provides for a BAR is
//! mapped only if it is sealed against shrinking: a vCPU that accesses a missing page would end the
//! VM.

mod device;
mod error;
mod watch;

pub use device::{Patience, Surroundings, UserDevice};
pub use error::Error;
pub use vfio_client::Failure;

#[cfg(test)]
mod tests;
