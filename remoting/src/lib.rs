//! Accelerator API remoting: an application in a guest calls its accelerator's usual API, and a
//! worker process on the host carries the calls out.
//!
//! ```text
//!   application -> driver (guest/opencl) -> ring of calls -> worker -> the host's driver
//!                        ^----------------- ring of answers <---'
//!                        '------ data window, seen by both and by the device ------'
//! ```
//!
//! - [`protocol`]: what is said. One definition makes both sides; builds that differ refuse each
//!   other and name both versions.
//! - [`transport`]: how it gets there. Rings in shared memory: no system call and no exit while
//!   both sides are busy. To other machines, the same messages between two such memories.
//! - [`opencl`]: the host's OpenCL, opened at run time.
//! - [`account`]: device memory of the applications of one machine.
//! - [`descriptors`]: how many files processes that serve many may have open.
//! - [`mod@note`]: what processes that serve others say, without ending if nobody can be told.
//! - [`port`]: how a virtual machine's guest comes to a worker.
//! - [`turns`]: submitting to a device that others use, too.
//! - [`worker`]: the process that serves one application. It trusts nothing that comes out of the
//!   rings; its end costs that application an error code and nobody else anything.
//!
//! The crate knows nothing of the machine around it: a window is a file, wherever it comes from, or
//! memory that is there.

#![cfg_attr(not(feature = "std"), no_std)]
#![cfg_attr(not(test), deny(clippy::print_stderr))]

extern crate alloc;

#[cfg(feature = "std")]
pub mod account;
#[cfg(feature = "std")]
pub mod descriptors;
#[cfg(feature = "std")]
pub mod note;
pub mod opencl;
pub mod port;
pub mod protocol;
pub mod transport;
#[cfg(feature = "std")]
pub mod turns;
#[cfg(feature = "server")]
pub mod worker;
