//! Serving one application.
//!
//! One thread takes calls out of the ring and hands them to the host's driver. It blocks in the
//! driver only where nothing else can happen meanwhile: while the one thread that an application
//! has waits for commands that wait for nothing of the application's, and waits were short so
//! far. All else that has to be waited for is an event of the driver: polled for a bounded time,
//! then slept on. Building and linking programs takes long and runs in threads of its own.
//!
//! - [`backend`]: what carries out the requests of an API.
//! - [`server`]: the serving thread; [`notice`]: what other threads tell it; `watch`: one that
//!   sees commands complete while it sleeps; `limit`: one that ends what runs for too long.
//! - [`passive`]: passive mode, without a thread, on the caller's vCPU; [`drain`]: one round of it.
//! - [`checkpoint`]: stopping, and going on in another process; [`image`]: the file in between.
//!   `carry`: the client takes its state there by itself; [`precopy`]: before it stops; [`postcopy`]: once it
//!   goes on elsewhere.
//!   `work`: whether that goes on.
//! - [`table`]: an application's objects by their ids.
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
pub(crate) mod work;
