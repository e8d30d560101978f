//! Executes OpenCL calls with a driver of the host.
//!
//! - [`backend`]: the backend of a [session](crate::session).
//! - [`driver`]: the host's OpenCL, opened at run time.
//! - [`objects`]: shadow objects, in a [`table`](crate::session::table) per kind; [`records`]: how programs and kernels
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

pub mod driver;

#[cfg(feature = "server")]
pub mod backend;
#[cfg(feature = "server")]
pub(crate) mod callbacks;

#[cfg(feature = "server")]
pub mod commands;
#[cfg(feature = "server")]
mod contexts;
#[cfg(feature = "server")]
pub mod cover;
#[cfg(feature = "server")]
mod enqueue;
#[cfg(feature = "server")]
mod events;
#[cfg(feature = "server")]
pub(crate) mod freed;
#[cfg(feature = "server")]
pub mod handlers;
#[cfg(feature = "server")]
mod headers;
#[cfg(feature = "server")]
mod kernels;
#[cfg(feature = "server")]
mod memory;
#[cfg(feature = "server")]
mod missing;
#[cfg(feature = "server")]
pub mod objects;
#[cfg(feature = "server")]
pub mod platform;
#[cfg(feature = "server")]
pub(crate) mod programs;
#[cfg(feature = "server")]
pub mod provenance;
#[cfg(feature = "server")]
pub mod query;
#[cfg(feature = "server")]
pub mod records;
#[cfg(feature = "server")]
mod state;
#[cfg(feature = "server")]
pub(crate) mod svm;
#[cfg(all(test, feature = "server"))]
#[allow(clippy::unwrap_used)]
pub(crate) mod testing;
#[cfg(feature = "server")]
pub mod told;
#[cfg(feature = "server")]
pub(crate) mod touched;
#[cfg(feature = "server")]
pub mod transfers;
#[cfg(feature = "server")]
mod variables;
#[cfg(feature = "server")]
mod written;

#[cfg(feature = "server")]
pub use backend::{OpenClBackend, Server};
