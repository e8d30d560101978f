//! OpenCL's calls, carried out by a driver of the host.
//!
//! - [`backend`]: all of it for a [session](crate::session).
//! - [`driver`]: the host's OpenCL, opened at run time.
//! - [`objects`]: shadow objects, in a [`table`](crate::session::table) for each kind; [`records`]:
//!   how programs and kernels came to be; [`provenance`]: what objects were made in and of. Calls about
//!   them by subject: `contexts`, `memory`, `programs`, `kernels`, `events`; [`query`]: questions.
//!   [`told`]: what an application relies on of the answers. `headers`: an application's files for the compiler.
//! - [`commands`]: what goes into queues; [`transfers`]: to and from the window, of which the
//!   [`cover`] says what the driver knows.
//!   `svm`: memory whose addresses mean the same to the application; `freed`: what commands may
//!   use of it still.
//! - `state`: all objects, saved and made again in another process; `touched`: which parts of buffers have
//!   contents at all; `written`: which objects commands may have written meanwhile; `missing`: whose contents have
//!   yet to come.
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
mod written;

#[cfg(feature = "server")]
pub use backend::{OpenClBackend, Server};
