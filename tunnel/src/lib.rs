//! TLS for migrations: a separate process that holds the sockets and the keys.
//!
//! ```text
//!   gantry ──Unix socket──> gantry-tunnel ══ TLS 1.3, certificates on both sides ══> gantry-tunnel ──> gantry
//! ```
//!
//! A VMM that its guest has taken over therefore has neither the host's private key nor a network
//! socket. It also contains no cryptography, which would make it half as large again.
//!
//! - [`request`]: what a VMM requests; [`identity`]: certificates and keys.
//! - [`door`]: connections to and from the network, until both sides have authenticated each other;
//!   [`doors`]: doors for consecutive connections; [`strangers`]: peers that have not shown a
//!   certificate yet.
//! - [`relay`]: relays bytes in both directions.
//! - [`serve`]: the process.

pub mod door;
pub mod doors;
pub mod identity;
mod place;
pub mod relay;
pub mod request;
pub mod serve;
pub mod strangers;
