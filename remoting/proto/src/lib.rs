//! What an application's driver and the worker that serves it say to each other.
//!
//! - [`apis`]: the calls of each API. One definition generates both sides; builds whose definitions differ refuse each
//!   other and name both versions.
//! - [`wire`]: how calls are encoded as bytes.
//! - [`port`]: how a virtual machine's guest reaches a worker.

#![cfg_attr(not(feature = "std"), no_std)]
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

#[doc(hidden)]
pub extern crate alloc;

pub mod apis;
pub mod port;
pub mod wire;
