//! The processes that serve applications.
//!
//! - [`pool`]: keeps workers ready; `listener`: its socket; `worker`: a worker as the pool sees it; `starter`: starts
//!   processes that inherit nothing; [`status`]: its figures; `log`: what workers
//!   write to their standard error; `account`: device memory that all applications have together; [`process`]: the worker
//!   itself; [`options`]: its options; [`confine`]: the sandbox of
//!   workers; `group`: limits for a worker and everything that it starts; [`compiled`]: the cache of compiled programs,
//!   which outlives workers; `folders`: where all of them write.
//! - [`control`]: how an application moves from one worker to another: `moves` and `moving` are the pool's side,
//!   `standby` a worker's.
//! - [`stream`]: how applications on other machines reach workers; `handshake`: how a worker accepts its application;
//!   `pending`: connections that have not completed the handshake.
//! - [`gate`]: the process behind a gate.
//! - [`leases`]: pools for jobs of a scheduler, of which each has a part of a device.
//! - [`placement`]: which processors are near each other.
//! - `drivers`: the OpenCL drivers that workers find; [`probe`]: whether a driver works in a worker; [`slices`]:
//!   whether its time slices do.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod account;
pub mod compiled;
pub mod confine;
mod drivers;
mod folders;
pub mod gate;
mod group;
mod handshake;
pub mod leases;
mod listener;
mod log;
pub mod moves;
mod moving;
pub mod options;
mod pending;
mod place;
pub mod placement;
pub mod pool;
pub mod probe;
pub mod process;
pub mod slices;
mod standby;
mod starter;
pub mod status;
pub mod stream;
mod worker;
