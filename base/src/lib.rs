//! Facilities of the operating system and the standard library that more than one crate of Gantry
//! needs, once. It is a leaf: it uses no other crate of Gantry.
//!
//! - [`lock`]: locks that a panic elsewhere does not make unusable
//! - [`mapping`]: memory mappings that are unmapped when dropped; [`memfd`]: files in memory
//! - [`patience`]: waiting until a moment, or until somebody gives it up
//! - [`poll`]: waiting for descriptors, however many there are
//! - [`socket`]: Unix sockets: descriptors sent with bytes, a peer's user, connecting without waiting
//! - [`tcp`]: connections that notice that the other machine is gone
//! - [`limits`]: resource limits of the process; [`memory`]: the memory that there is for it
//! - `confine` (a feature): taking files and system calls away from a process that serves others
//! - [`error_chain`]: an error with its causes
//! - [`mod@note`]: lines on the error output that never panic; [`output`]: the standard output, which may be
//!   closed early
//! - [`paths`]: where programs find each other
//!
//! Unsafe code is kept here, behind safe functions and types that own what they refer to.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

#[cfg(feature = "confine")]
pub mod confine;
pub mod error_chain;
pub mod limits;
pub mod lock;
pub mod mapping;
pub mod memfd;
pub mod memory;
pub mod note;
pub mod output;
pub mod paths;
pub mod patience;
pub mod poll;
pub mod socket;
pub mod tcp;

pub use error_chain::{Chain, causes};
pub use lock::Unpoisoned;
pub use mapping::{Access, Mapping};
pub use output::Output;
pub use patience::{Cancel, Patience};
