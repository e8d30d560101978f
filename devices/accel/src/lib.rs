//! The accelerator port: a guest's way to the worker processes that serve its accelerator calls.
//!
//! ```text
//!   guest: agent ── registers ──> Registers ─ state ─> Service ── attachment ──> worker
//!          application ── doorbell ─ ioeventfd ──────────────────────────────────> │
//!               │ <──────────────────────────── irqfd, MSI-X ───────────────────── │
//!               │ <── agent <── line, if MSI-X is off <── Service <── irqfd ────── │
//!               └────────── slice of the window (shared memory) ────────────────── ┘
//! ```
//!
//! - [`function`]: the PCI function with its three BARs, as [`gantry_remoting::port`] lays them out.
//! - `registers`: what the agent reads and writes, trapped; a doorbell that KVM did not take.
//! - `slices`: the state of each slice, which vCPUs and the service change by atomic steps.
//! - `window`: the memory, a file of its own for each slice, so that a worker can be given one
//!   slice and nothing else.
//! - [`gantry_remoting::account`]: how much of the device's memory the workers of all slices have.
//! - `service`: the thread that finds workers for slices and sees them end; `attach`: how it hands a
//!   slice over; `lend`: who speaks to workers beside it.
//! - [`saved`]: what a snapshot has of applications.
//! - [`moving`]: applications that go on with another worker while the guest runs.
//! - [`rounds`]: applications of a machine that leaves, copied while they go on; `standby`: workers that
//!   make what was copied where it arrives; `blocks`: what of a slice's contents has changed.
//! - `wish`: who serves the guest's applications, as the host wishes and the guest's agent does.
//! - `line`: interrupts by the function's line, while MSI-X is off.
//!
//! This process never looks into the window and takes no part in a call. What it does for a guest
//! is bounded: as many workers as there are slices, ends of old ones included, and a new one every
//! [`PACE`] at most.
//!
//! [`PACE`]: service::PACE

mod attach;
mod blocks;
pub mod function;
pub mod left;
mod lend;
mod line;
pub mod moving;
mod registers;
pub mod rounds;
pub mod saved;
mod service;
mod slices;
mod standby;
mod window;
mod wish;

use std::{fs::File, io, path::PathBuf, sync::Arc};

pub use attach::Pool;
pub use function::{Accel, Resources};
pub use gantry_remoting::{
    link::window::SMALLEST as SMALLEST_SLICE,
    port::{Apis, MOST_SLICES, NAME as LONGEST_NAME},
    wire::api::ApiId,
};
use pci::ConfigError;
pub use slices::Claim;

/// How a port is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of its thread.
    pub thread_name: String,
    /// The APIs that its applications may call.
    pub apis: Apis,
    /// Where the worker pool listens.
    pub socket: PathBuf,
    /// Slices: a power of two up to [`MOST_SLICES`].
    pub slices: u32,
    /// Bytes of a slice: a power of two, [`SMALLEST_SLICE`] at least.
    pub slice_size: u64,
    /// Part of the names of the devices that are offered; all if empty.
    pub device: String,
    /// Share of the device against other clients'.
    pub weight: u32,
    /// Bytes of device memory for all applications together; all that there is if zero.
    pub memory: u64,
    /// Whose applications they are, to workers and arbiter.
    pub client: String,
    /// What the snapshot that it comes from has of its applications.
    pub archive: Option<Arc<File>>,
    /// What the machine's compiled programs are called: its applications find what they have
    /// compiled before. Nothing is kept if empty.
    pub compiled: String,
}

/// Why there is no port.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Numbers that make no port.
    #[error(
        "an accelerator port cannot have {slices} slices of {size} bytes: both are powers of two, \
         up to {MOST_SLICES} slices of at least {SMALLEST_SLICE} bytes"
    )]
    Sizes {
        /// Slices.
        slices: u32,
        /// Bytes of each.
        size: u64,
    },
    /// Memory.
    #[error("cannot {what} {size} bytes for an accelerator's window")]
    Memory {
        /// What was tried.
        what: &'static str,
        /// Bytes.
        size: u64,
        /// Why.
        source: io::Error,
    },
    /// A slice's file.
    #[error(transparent)]
    Slice(#[from] gantry_remoting::link::window::Error),
    /// Eventfds.
    #[error("cannot create an eventfd for an accelerator port")]
    EventFd(#[source] io::Error),
    /// The configuration space.
    #[error("cannot lay out an accelerator port's configuration space")]
    Config(#[from] ConfigError),
}

#[cfg(test)]
mod tests;
