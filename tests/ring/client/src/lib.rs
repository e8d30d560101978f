//! A client of a worker, reduced to what is measured. It speaks the protocol over the rings like
//! the OpenCL or CUDA driver, from a single thread, and needs no operating system. So the same code
//! runs as a process next to the worker and in ring 3 of a guest, and the only difference is the
//! boundary in between.
//!
//! - [`opencl::run`], [`cuda::run`]: compute, check what was computed, and measure.
//! - [`rounds`]: computes round after round on state in the device while its machine is migrated.
//! - [`desk`]: how a guest without devices gets orders and returns its measurements.

#![no_std]

extern crate alloc;

mod bench;
mod connection;
pub mod cuda;
pub mod desk;
pub mod opencl;
mod opened;
mod rounds;

pub use bench::{COUNTED, Direction, Surroundings};
pub use connection::{Connection, Failure};
pub use rounds::{Told, rounds};
