//! What a driver in the guest and a worker on the host say to each other.
//!
//! One definition ([`calls`]) makes both sides: a struct per call, its number, the type of its
//! answer and the decoder. A hash of it, down to the types of fields, is a part of [`VERSION`], so that
//! two builds whose definitions differ refuse each other in the [hello], naming both versions. Of what
//! is not in it, frames, rings and hellos, a change raises the version's number.

pub mod calls;
pub mod frame;
pub mod hello;
pub mod wire;

pub use calls::{Call, Request};
pub use frame::{Flags, Header};
pub use hello::VERSION;
pub use wire::{Blob, Malformed, Reader, Wire};
