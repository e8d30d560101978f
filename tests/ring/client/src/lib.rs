//! A client of a worker, reduced to what is measured: it speaks the protocol over the rings as the
//! OpenCL driver does, from one thread, and needs no operating system. So the same code runs as a
//! process beside the worker and in ring 3 of a guest, and what differs is the border between.
//!
//! - [`run`]: computes, checks what was computed, and measures.
//! - [`rounds`]: computes round after round on state of the device's while its machine moves.
//! - [`desk`]: how a guest without devices is told what to do, and hands on what it has measured.

#![no_std]

extern crate alloc;

mod connection;
pub mod desk;
mod figures;
mod opened;
mod rounds;

pub use connection::{Connection, Failure};
pub use figures::{COUNTED, Surroundings, run};
pub use rounds::{Told, rounds};
