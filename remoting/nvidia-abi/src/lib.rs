//! What an `ioctl` on NVIDIA's device files carries.
//!
//! Two processes need to know it: the program, whose library copies the blocks of a call out of its memory, and
//! the worker, which makes the call for it. Both use [`walk`], the one walker, with a [`Source`] of their own: in
//! the program it reads memory, in the worker it takes what a message delivered. The worker therefore believes no
//! length: whatever its own tables do not give is refused.
//!
//! The tables are strict lists: what they do not name is refused ([`Refusal::Unlisted`]), because a pointer, file
//! or handle in a block that is not known would be used with the worker's rights. They hold numbers only (command
//! words, sizes, offsets), by branch of the driver ([`Branch`]); what a field means ([`Meaning`]) is written by hand.
//!
//! [`wire`] has the messages between the two.

#![no_std]

mod branch;
mod field;
pub mod status;
mod tables;
mod walk;
pub mod wire;

pub use branch::Branch;
pub use field::{Block, Field, Meaning};
pub use walk::{Call, Kind, Listed, Operand, Pointer, Refusal, Source, walk};
