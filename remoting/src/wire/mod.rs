//! How a driver in a guest and a worker on the host understand each other, whatever the API.
//!
//! A schema ([`apis`](crate::apis)) makes both sides: a struct per call, its number, the type of its
//! answer and the decoder. A hash of it, down to the types of fields, and of the numbers of all
//! [messages] that are no calls, is a part of the [version](hello::Version) of each API, so that two
//! builds whose schemas differ refuse each other in the [hello], naming both versions, and only for the
//! API in which they differ. Of what is in no hash, what those messages hold, frames, rings and hellos, a
//! change raises the protocol's [number](hello::NUMBER).

pub mod api;
pub mod codec;
pub mod frame;
pub mod hello;
pub mod messages;

pub use api::Api;
pub use codec::{Blob, Malformed, Reader, Wire};
pub use frame::{Flags, Header};
pub use messages::Call;
