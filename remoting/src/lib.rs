//! Accelerator API remoting: an application in a guest calls its accelerator's usual API, and a worker process on the
//! host executes the calls.
//!
//! ```text
//!   application -> driver (guest/opencl) -> ring of calls -> worker -> the host's driver
//!                        ^----------------- ring of answers <---'
//!                        '------ data window, seen by both and by the device ------'
//! ```
//!
//! - [`apis`]: the calls of each API. One definition generates both sides; builds whose definitions differ refuse each
//!   other and name both versions.
//! - [`wire`]: how calls are encoded as bytes.
//! - [`link`]: how they are transported. Rings in shared memory: no system call and no exit while both sides are busy.
//!   Between machines, a stream carries the same messages from one such memory to another.
//! - [`session`]: serves one application; one of the [`backends`] executes its calls on the host's driver.
//! - [`account`]: accounting of the device memory used by the applications of one machine.
//! - [`port`]: how a virtual machine's guest reaches a worker.
//! - [`turns`]: submitting to a device that others share.
//! - [`host`]: the serving processes, one for each application. They trust nothing that they read from the rings. When
//!   one of them ends, its application gets an error code, and no other application notices.
//!
//! The crate knows nothing of the machine around it: a window is a file, wherever it comes from, or existing memory.

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
// The arbiter still uses these paths.
#[cfg(feature = "std")]
#[doc(hidden)]
pub use base::note;
/// Limits on files, and polling them.
#[cfg(feature = "std")]
#[doc(hidden)]
pub mod descriptors {
    pub use base::{limits::Limit, poll::poll};
}
