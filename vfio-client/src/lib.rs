//! The client side of vfio-user: requests to a server that implements a device, and its replies.
//!
//! - [`wire`]: the messages. [`connection`]: requests and their replies within a time limit.
//!
//! The crate `vfio_user` defines the protocol's constants, and its server is used to test this
//! crate. Its client waits forever, does not check the length, ID or error flag of replies, and
//! asserts on what a server reports about a region. A server could therefore hang or crash the
//! client, so this crate has its own. Servers are untrusted: every reply is checked and must arrive
//! within a time limit.

pub mod connection;
pub mod wire;

pub use connection::{Connection, Deadline, Failure};
