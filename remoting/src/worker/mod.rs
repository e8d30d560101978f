//! The process that serves one application.
//!
//! One thread takes calls out of the ring and hands them to the host's driver. It blocks in the
//! driver only where nothing else can happen meanwhile: while the one thread that an application
//! has waits for commands that wait for nothing of the application's, and waits were short so
//! far. All else that has to be waited for is an event of the driver: polled for a bounded time,
//! then slept on. Building and linking programs takes long and runs in threads of its own.
//!
//! - [`pool`]: keeps workers ready; [`process`]: what each is; [`confine`]: what they may do;
//!   a `group` has the limits of all that it starts; [`compiled`]: what drivers have compiled, which
//!   outlives them; `folders`: where all of them write.
//! - [`stream`]: how they are reached from other machines; `greet`: by whom, a `crowd` at a time.
//! - [`passive`]: serving without a thread, on CPUs that applications lend; [`lent`]: one round of
//!   that; [`handlers`]: how a gate calls it; [`gate`]: the process.
//! - [`server`]: the serving thread; [`notice`]: what other threads tell it; `watch`: one that
//!   sees commands complete while it sleeps; `limit`: one that ends what runs for too long.
//! - [`objects`]: shadow objects, in a [`table`] for each kind; [`records`]: how programs and kernels
//!   came to be; [`lineage`]: what objects were made in and of. Calls about them by subject:
//!   `contexts`, `memory`, `programs`, `kernels`, `events`; [`query`]: questions.
//!   `headers`: an application's files for the compiler.
//! - [`commands`]: what goes into queues; [`transfers`]: to and from the window, of which the
//!   [`cover`] says what the driver knows.
//!   `svm`: memory whose addresses mean the same to the application; `freed`: what commands may
//!   use of it still.
//! - [`placement`]: which processors are near each other.
//! - [`quota`]: device memory; [`sharing`]: taking turns with others.

pub mod commands;
#[cfg(feature = "worker")]
pub mod compiled;
#[cfg(feature = "worker")]
pub mod confine;
mod contexts;
pub mod cover;
#[cfg(feature = "worker")]
mod crowd;
mod events;
#[cfg(feature = "worker")]
mod folders;
mod freed;
#[cfg(feature = "worker")]
pub mod gate;
#[cfg(feature = "worker")]
mod greet;
#[cfg(feature = "worker")]
mod group;
pub mod handlers;
mod headers;
mod kernels;
pub mod lent;
mod limit;
pub mod lineage;
mod memory;
pub mod notice;
pub mod objects;
pub mod passive;
#[cfg(feature = "worker")]
pub mod placement;
pub mod platform;
#[cfg(feature = "worker")]
pub mod pool;
#[cfg(feature = "worker")]
pub mod process;
mod programs;
pub mod query;
pub mod quota;
pub mod records;
pub mod server;
pub mod sharing;
#[cfg(feature = "worker")]
pub mod stream;
mod svm;
pub mod table;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;
pub mod transfers;
mod watch;
