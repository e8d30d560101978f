//! Accelerator API remoting: an application in a guest calls its accelerator's usual API, and a worker process on the
//! host executes the calls.
//!
//! ```text
//!   application -> driver (guest/opencl) -> ring of calls -> worker -> the host's driver
//!                        ^----------------- ring of answers <---'
//!                        '------ data window, seen by both and by the device ------'
//! ```
//!
//! - [`remoting_proto`]: the calls of each API, as bytes.
//! - [`remoting_transport`]: how they are transported. Rings in shared memory: no system call and no exit while both
//!   sides are busy. Between machines, `remoting-stream` carries the same messages from one such memory to another.
//! - [`session`]: serves one application; one of the [`backends`] executes its calls on the host's driver.
//! - [`remoting_turns`]: submitting to a device that others share.
//! - `remoting-pool`: the serving processes, one for each application. They trust nothing that they read from the rings.
//!   When one of them ends, its application gets an error code, and no other application notices.
//!
//! None of these crates knows the machine around it: a window is a file, wherever it comes from, or existing memory.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod backends;
pub mod session;
