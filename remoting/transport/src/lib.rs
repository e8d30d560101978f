//! Transport: how messages get from one side to the other.
//!
//! ```text
//!   driver in the guest                         worker on the host
//!   Sender -- push --> [ ring of calls   ] -- poll --> Receiver
//!   Receiver <- poll -- [ ring of answers ] <-- push -- Sender
//!          \____________ data in the window ____________/
//! ```
//!
//! To another machine, the same messages go through a socket ([`stream`]) between two such windows.

#![cfg_attr(not(feature = "std"), no_std)]
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

extern crate alloc;

#[cfg(feature = "std")]
pub mod account;
#[cfg(feature = "std")]
pub mod alarm;
pub mod bell;
#[cfg(feature = "std")]
pub mod closer;
#[cfg(feature = "std")]
pub mod control;
pub mod endpoint;
#[cfg(feature = "std")]
pub mod gate;
#[cfg(feature = "std")]
pub mod mapping;
#[cfg(feature = "std")]
pub mod messages;
#[cfg(feature = "std")]
pub mod naps;
#[cfg(feature = "std")]
pub mod order;
#[cfg(feature = "std")]
pub mod peer_files;
#[cfg(feature = "std")]
pub mod port_bell;
pub mod ring;
#[cfg(feature = "std")]
pub mod socket;
pub mod sync;
pub mod window;
#[cfg(feature = "std")]
pub mod worker_control;
