//! Accelerator API remoting: an application in a guest calls its accelerator's usual API, and a
//! worker process on the host carries the calls out.
//!
//! ```text
//!   application -> driver (guest/opencl) -> ring of calls -> worker -> the host's driver
//!                        ^----------------- ring of answers <---'
//!                        '------ data window, seen by both and by the device ------'
//! ```
//!
//! - [`apis`]: what is said: the calls of each API. One definition makes both sides; builds that
//!   differ refuse each other and name both versions.
//! - [`wire`]: how that is written as bytes.
//! - [`link`]: how it gets there. Rings in shared memory: no system call and no exit while
//!   both sides are busy. To other machines, the same messages between two such memories.
//! - [`session`]: serving one application, whose calls one of the [`backends`] carries out on the
//!   host's driver.
//! - [`account`]: device memory of the applications of one machine.
//! - [`port`]: how a virtual machine's guest comes to a worker.
//! - [`turns`]: submitting to a device that others use, too.
//! - [`host`]: the processes that serve, one for each application. They trust nothing that comes out
//!   of the rings; the end of one costs its application an error code and nobody else anything.
//!
//! The crate knows nothing of the machine around it: a window is a file, wherever it comes from, or
//! memory that is there.

#![cfg_attr(not(feature = "std"), no_std)]
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

extern crate alloc;

#[cfg(feature = "std")]
pub mod account;
pub mod apis;
#[cfg(feature = "driver")]
pub mod backends;
#[cfg(feature = "worker")]
pub mod host;
pub mod link;
pub mod port;
#[cfg(feature = "server")]
pub mod session;
#[cfg(feature = "std")]
pub mod turns;
pub mod wire;

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod layers;
// The arbiter still finds these here.
#[cfg(feature = "std")]
#[doc(hidden)]
pub use base::note;
/// Limits of files, and waiting for them.
#[cfg(feature = "std")]
#[doc(hidden)]
pub mod descriptors {
    pub use base::{limits::Limit, poll::poll};
}
