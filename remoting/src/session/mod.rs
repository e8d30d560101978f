//! Serving one application.
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

pub mod backend;
pub(crate) mod carry;
pub mod checkpoint;
pub mod drain;
pub mod image;
pub(crate) mod limit;
pub mod notice;
pub mod passive;
pub mod postcopy;
pub mod precopy;
pub mod quota;
pub mod server;
pub mod sharing;
pub mod table;
pub(crate) mod watch;
pub mod work;
