//! Facilities of the operating system and the standard library that more than one Gantry crate
//! needs. This is a leaf crate: it uses no other Gantry crate.
//!
//! - [`lock`]: locks that stay usable after a panic of another holder
//! - [`mapping`]: memory mappings that are unmapped when dropped; [`memfd`]: files in memory
//! - [`patience`]: waiting until a deadline or a cancellation
//! - [`poll`]: waiting for any number of descriptors; [`event`]: waking a thread that does
//! - [`socket`]: Unix sockets: passing descriptors, the peer's user, non-blocking connects, packets
//! - [`exposition`]: Prometheus' text format
//! - [`metrics_socket`]: tells strangers a document, on a thread of its own
//! - [`tcp`]: TCP connections that detect that the peer machine is gone
//! - [`child`]: child processes that do not outlive their parent
//! - [`fork`]: telling a process from the children that it forks
//! - [`limits`]: resource limits of the process; [`memory`]: the memory that is available to it
//! - `confine` (a feature): denies files and system calls to a process that serves others
//! - [`error_chain`]: an error with its causes
//! - [`mod@note`]: lines on standard error that never panic; [`output`]: standard output, which the
//!   reader may close early
//! - [`regular_file`]: files of others, whose opening and reading must not block
//! - [`gpus`]: selecting GPUs of a host by index, UUID, PCI address or model
//! - [`paths`]: default paths at which programs find each other
//!
//! Unsafe code is kept here, behind safe functions and types that own what they refer to.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod child;
#[cfg(feature = "confine")]
pub mod confine;
pub mod error_chain;
pub mod event;
pub mod exposition;
pub mod fork;
pub mod gpus;
pub mod limits;
pub mod lock;
pub mod mapping;
pub mod memfd;
pub mod memory;
pub mod metrics_socket;
pub mod note;
pub mod output;
pub mod paths;
pub mod patience;
pub mod poll;
pub mod proc;
pub mod regular_file;
pub mod socket;
pub mod tcp;

pub use error_chain::{Chain, causes};
pub use lock::Unpoisoned;
pub use mapping::{Access, Mapping};
pub use output::Output;
pub use patience::{Cancel, Patience};
