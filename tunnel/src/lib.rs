//! TLS for migrations: a process of its own that has the sockets and the keys.
//!
//! ```text
//!   gantry ──Unix socket──> gantry-tunnel ══ TLS 1.3, certificates on both sides ══> gantry-tunnel ──> gantry
//! ```
//!
//! A VMM that is taken over by its guest does not have the host's private key this way, nor any
//! socket to the network; and it carries no cryptography, which would make it half as large again.
//!
//! - [`request`]: what a VMM asks for; [`identity`]: certificates and keys.
//! - [`door`]: connections from and to the network, until both sides know each other; [`doors`]: for one connection
//!   after the other; [`strangers`]: those who have not shown a certificate yet.
//! - [`relay`]: bytes in both directions.
//! - [`serve`]: the process.

pub mod door;
pub mod doors;
pub mod identity;
mod place;
pub mod relay;
pub mod request;
pub mod serve;
pub mod strangers;
