//! CUDA's driver API, carried out by the host's driver.
//!
//! - [`backend`]: all of it for a [session](crate::session).
//! - [`driver`]: the host's `libcuda.so.1`, opened at run time; `fences`: how far its work is;
//!   [`arena`]: where it puts memory; [`probe`]: whether all of that works here.
//! - `objects`: what the client has, by number; `memory`: which addresses are the client's;
//!   `charges`: what they cost, and how long;
//!   `cover`: what of the window the driver knows; `printed`: what kernels print,
//!   `prints`: which may.
//! - Requests by subject: `start`, `allocations`, `copies`, `volumes` (of rows, planes and arrays),
//!   `textures`, `modules`, `launches`, `nodes` (of graphs), `waiting`, `signals`, `host_functions`,
//!   `user_objects` (of graphs); `forwarding`: all those whose parameters travel by the API's definition, and
//!   `effects`: what their success means.
//! - `libraries`: the host's cuBLAS and cuBLASLt; `linear`: calls of the first and handles of both;
//!   `light`: what takes the other's descriptors.

pub mod arena;
pub mod backend;
pub mod driver;
pub mod probe;

mod allocations;
mod captures;
mod charges;
mod copies;
mod cover;
mod effects;
mod fences;
mod forwarding;
mod host_functions;
mod launches;
mod libraries;
mod light;
mod linear;
mod memory;
mod modules;
mod nodes;
mod objects;
mod printed;
mod prints;
mod signals;
mod start;
mod textures;
mod user_objects;
mod volumes;
mod waiting;

pub use backend::{CudaBackend, Server};
