//! A client of a worker, reduced to what is measured: it speaks the protocol over the rings as the
//! OpenCL driver or CUDA's does, from one thread, and needs no operating system. So the same code runs as a
//! process beside the worker and in ring 3 of a guest, and what differs is the border between.
//!
//! - [`opencl::run`], [`cuda::run`]: compute, check what was computed, and measure.
//! - [`rounds`]: computes round after round on state of the device's while its machine moves.
//! - [`desk`]: how a guest without devices is told what to do, and hands on what it has measured.

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
