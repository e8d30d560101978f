//! The protocol between a driver in a guest and a worker on the host, independent of the API.
//!
//! A schema ([`apis`](crate::apis)) generates both sides: a struct per call, its number, the type of its answer and the
//! decoder. A hash of the schema, down to the types of fields, and of the numbers of all [messages] that are not calls,
//! is part of the [version](hello::Version) of each API. Two builds whose schemas differ therefore refuse each other in
//! the [hello], naming both versions, and only for the API in which they differ. The hash does not cover the contents
//! of those messages, frames, rings and hellos: a change of these increments the protocol's [number](hello::NUMBER).

pub mod api;
pub mod codec;
pub mod frame;
pub mod hello;
pub mod messages;
pub mod version;

pub use api::Api;
pub use codec::{Blob, Malformed, Reader, Wire};
pub use frame::{Flags, Header};
pub use messages::Call;
