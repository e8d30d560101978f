//! Executes CUDA driver API calls with the host's driver.
//!
//! - [`backend`]: the backend of a [session](remoting_session).
//! - [`driver`]: the host's `libcuda.so.1`, opened at run time; `fences`: the progress of its work;
//!   [`arena`]: the addresses at which it places memory; [`probe`]: a check that all of this works
//!   on this host; [`trial`]: what a process does whose [time slices](remoting_timeslice) are tried.
//! - `objects`: the client's objects, by number; `memory`: the addresses that belong to the client;
//!   `charges`: what they are charged, and for how long; `reserves`: what contexts reserve for kernels; `cover`: the parts of the window that are
//!   registered with the driver; `printed`: the output of kernels.
//! - `images`: parts of images; `prints`: which kernels may print; `variables`: what variables of modules take, `ptx`: those of text.
//! - Requests by subject: `start`, `allocations`, `copies`, `volumes` (rows, planes and arrays),
//!   `textures`, `modules`, `launches`, `nodes` (of graphs), `waiting`, `signals`,
//!   `host_functions`, `holds` (of streams, for copies of the client), `user_objects` (of graphs); `forwarding`: all calls whose parameters are
//!   marshalled by the API's definition, and `effects`: what their success implies.
//! - `backlog`: how much work each stream has that is not done; `passages`: which of it passes through another context's registrations.
//! - `libraries`: the host's cuBLAS and cuBLASLt; `linear`: cuBLAS calls and the handles of both;
//!   `light`: cuBLASLt calls that take descriptors.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod arena;
pub mod backend;
pub mod driver;
pub mod probe;
pub mod trial;

mod allocations;
mod backlog;
mod captures;
mod charges;
mod copies;
mod cover;
mod effects;
mod fences;
mod forwarding;
mod holds;
mod host_functions;
mod images;
mod instances;
mod launches;
mod libraries;
mod light;
mod linear;
mod memory;
mod modules;
mod nodes;
mod objects;
mod passages;
mod printed;
mod prints;
mod ptx;
mod reserves;
mod signals;
mod start;
mod textures;
mod user_objects;
mod variables;
mod volumes;
mod waiting;

#[cfg(test)]
mod parts_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod turns_tests;
#[cfg(test)]
mod waiting_tests;

pub use backend::{CudaBackend, Server};
