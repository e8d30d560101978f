//! Executes OpenCL calls with a driver of the host.
//!
//! - [`backend`]: the backend of a [session](remoting_session).
//! - [`driver`]: the host's OpenCL, opened at run time.
//! - [`objects`]: shadow objects, in a [`table`](remoting_session::table) per kind; [`records`]: how programs and kernels
//!   were made; [`provenance`]: what objects were made in and from. Calls on them by subject: `contexts`, `memory`,
//!   `programs`, `kernels`, `events`; [`query`]: queries. [`told`]: the answers that an application relies on.
//!   `headers`: an application's header files for the compiler.
//! - [`commands`]: commands for queues; [`transfers`]: transfers to and from the window, whose [`cover`] is the part
//!   that is registered with the driver. `svm`: shared virtual memory, whose addresses mean the same to the
//!   application; `freed`: freed allocations that commands may still use.
//! - `state`: saves all objects and recreates them in another process; `variables`: those of programs, which no image
//!   holds; `touched`: which parts of buffers have contents
//!   at all; `written`: which objects commands may have written meanwhile; `missing`: objects whose contents have not
//!   arrived yet.
//! - [`handlers`]: how a gate calls a passive worker.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod driver;

pub mod backend;
pub(crate) mod callbacks;

pub mod commands;
mod contexts;
pub mod cover;
mod enqueue;
mod events;
pub(crate) mod freed;
pub mod handlers;
mod headers;
mod kernels;
mod memory;
mod missing;
pub mod objects;
pub mod platform;
pub(crate) mod programs;
pub mod provenance;
pub mod query;
pub mod records;
#[cfg(test)]
mod session_tests;
mod state;
pub(crate) mod svm;
#[cfg(any(test, feature = "test-support"))]
#[doc(hidden)]
#[allow(clippy::unwrap_used)]
pub mod testing;
pub mod told;
pub(crate) mod touched;
pub mod transfers;
mod variables;
mod written;

pub use backend::{OpenClBackend, Server};
