//! Sockets between guest and host (virtio 1.2, 5.10), mapped to Unix sockets on the host.
//!
//! - The host connects to the Unix socket of the device, writes `CONNECT <port>\n` and reads `OK
//!   <host port>\n`; after that the connection reaches the guest's port.
//! - A guest that connects to port P of the host (context ID 2) reaches the Unix socket `<path>_P`.
//!
//! ```text
//!   listener ─ handshake ─┐
//!   <path>_P ─────────────┴─> Connection <── Muxer ──> receive and transmit queues
//! ```
//!
//! - [`packet`]: headers; [`connection`]: one stream and its credit; [`muxer`]: all connections.

mod connection;
mod device;
mod muxer;
mod packet;

pub use device::{Error, Options, State, Vsock};

#[cfg(test)]
mod tests;

#[cfg(test)]
mod regressions;

#[cfg(test)]
mod streams_tests;
