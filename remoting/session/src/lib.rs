//! Serves one application that calls its accelerator's usual API in a guest.
//!
//! ```text
//!   application -> driver (guest/opencl) -> ring of calls -> worker -> the host's driver
//!                        ^----------------- ring of answers <---'
//!                        '------ data window, seen by both and by the device ------'
//! ```
//!
//! The calls of each API are [`remoting_proto`]'s, their transport is [`remoting_transport`]'s, a backend of each API
//! (`remoting-opencl`, `remoting-cuda`) executes them, and `remoting-pool` keeps a process for each application. It trusts
//! nothing that it reads from the rings. When it ends, its application gets an error code, and no other application
//! notices. Nothing here knows the machine around it: a window is a file, wherever it comes from, or existing memory.
//!
//! One thread takes calls from the ring and passes them to the host's driver. It blocks in the driver only where
//! nothing else can happen meanwhile: while the application's only thread waits for commands that depend on nothing of
//! the application's, and waits have been short so far. Everything else that must be waited for is a driver event:
//! polled for a bounded time, then slept on. Building and linking programs takes long and runs in threads of its own.
//!
//! - [`backend`]: executes the requests of an API.
//! - [`server`]: the serving thread; [`notice`]: what other threads tell it; `watch`: a thread that sees commands
//!   complete while the serving thread sleeps; `limit`: a thread that ends commands that run for too long.
//! - [`passive`]: passive mode, on the caller's vCPU, without a thread; [`drain`]: one round of it.
//! - [`checkpoint`]: stopping, and resuming in another process; [`image`]: the file in between. `carry`: the client
//!   transfers its state itself; [`precopy`]: copies before the session stops; [`postcopy`]: copies after it has
//!   resumed elsewhere. `work`: whether that makes progress.
//! - [`table`]: an application's objects by id.
//! - [`quota`]: device memory; [`sharing`]: taking turns with others.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod backend;
pub mod carry;
pub mod checkpoint;
pub mod drain;
pub mod image;
pub mod limit;
pub mod notice;
pub mod passive;
pub mod postcopy;
pub mod precopy;
pub mod quota;
pub mod server;
pub mod sharing;
pub mod table;
mod watch;
pub mod work;
