//! The accelerator port, through which a guest reaches the worker processes that serve its
//! accelerator calls.
//!
//! ```text
//!   guest: agent ── registers ──> Registers ─ state ─> Service ── attachment ──> worker
//!          application ── doorbell ─ ioeventfd ──────────────────────────────────> │
//!               │ <──────────────────────────── irqfd, MSI-X ───────────────────── │
//!               │ <── agent <── line, if MSI-X is off <── Service <── irqfd ────── │
//!               └────────── slice of the window (shared memory) ────────────────── ┘
//! ```
//!
//! - [`function`]: the PCI function with its BARs, in the layout of
//!   [`remoting_proto::port`].
//! - `registers`: the trapped registers for the agent, and doorbells that KVM did not register.
//! - `slices`: the state of each slice, which vCPUs and the service change atomically.
//! - `pages`, `page_requests`: the fourth BAR of a port for native contexts, and what its worker asks
//!   of it.
//! - `closing`: threads that close what a worker has sent.
//! - `window`: the memory, with one file per slice, so that a worker can be given one slice and
//!   nothing else.
//! - [`remoting_transport::account`]: how much device memory the workers of all slices use.
//! - `service`: the thread that finds workers for slices and notices their end; `attach`: passes a
//!   slice to a worker; `lend`: lends workers to other threads.
//! - `handle`: the port as those see it who save and move its applications.
//! - [`saved`]: the applications in a snapshot; `saved_slice`: each in the port's state.
//! - [`moving`]: moves applications to other workers while the guest runs.
//! - [`rounds`]: copies the applications of a migrating VM while they run; `standby`: workers at
//!   the destination that receive the copies.
//! - `wish`: the host's requests to the guest's agent about who serves its applications.
//! - `line`: interrupts through the function's INTx line, while MSI-X is disabled.
//!
//! This process never examines the window and takes no part in a call. The resources that a guest
//! can use are bounded: at most one worker per slice, including workers that are ending, and at
//! most one new worker per [`PACE`].
//!
//! [`PACE`]: service::PACE

mod attach;
mod closing;
pub mod function;
mod handle;
pub mod left;
mod lend;
mod line;
pub mod moving;
mod page_requests;
mod pages;
mod registers;
pub mod rounds;
pub mod saved;
mod saved_slice;
mod service;
mod slices;
mod standby;
mod suspended;
mod window;
mod wish;

use std::{fs::File, io, path::PathBuf, sync::Arc};

pub use attach::Pool;
pub use function::{Accel, Resources};
pub use pages::Pages;
use pci::ConfigError;
pub use remoting_proto::{
    port::{Apis, MOST_SLICES, NAME as LONGEST_NAME},
    wire::api::ApiId,
};
pub use remoting_transport::window::SMALLEST as SMALLEST_SLICE;
pub use slices::Claim;

/// Configuration of a port.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of its thread.
    pub thread_name: String,
    /// The APIs that its applications may use.
    pub apis: Apis,
    /// Socket of the worker pool.
    pub socket: PathBuf,
    /// Number of slices: a power of two up to [`MOST_SLICES`].
    pub slices: u32,
    /// Size of a slice in bytes: a power of two, at least [`SMALLEST_SLICE`].
    pub slice_size: u64,
    /// The devices offered, as `base::gpus` names them; empty: all devices.
    pub device: String,
    /// Weight of this client in the sharing of the device; 0: only while nobody else has work.
    pub weight: u32,
    /// For how many milliseconds it waits at most for time slices of others; 0: it does not matter.
    pub latency: u32,
    /// Limit of device memory in bytes for all applications together; 0: no limit.
    pub memory: u64,
    /// Name of the client, for workers and arbiter.
    pub client: String,
    /// Archive of its applications, if it is restored from a snapshot or migration.
    pub archive: Option<Arc<File>>,
    /// Size of BAR 4 in bytes, a power of two: where the worker of a port for native contexts has
    /// pages of device files shown. 0: there is none.
    pub pages: u64,
    /// Key under which the VM's compiled programs are cached, so that applications find earlier
    /// results. Empty: nothing is cached.
    pub compiled: String,
}

/// Why a port cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid number or size of slices.
    #[error(
        "an accelerator port cannot have {slices} slices of {size} bytes: both are powers of two, \
         up to {MOST_SLICES} slices of at least {SMALLEST_SLICE} bytes"
    )]
    Sizes {
        /// Number of slices.
        slices: u32,
        /// Size of each in bytes.
        size: u64,
    },
    /// Memory cannot be allocated or mapped.
    #[error("cannot {what} {size} bytes for an accelerator's window")]
    Memory {
        /// The action that failed.
        what: &'static str,
        /// Size in bytes.
        size: u64,
        /// The cause.
        source: io::Error,
    },
    /// A slice's file cannot be created.
    #[error(transparent)]
    Slice(#[from] remoting_transport::mapping::Error),
    /// An eventfd cannot be created.
    #[error("cannot create an eventfd for an accelerator port")]
    EventFd(#[source] io::Error),
    /// The configuration space cannot be laid out.
    #[error("cannot lay out an accelerator port's configuration space")]
    Config(#[from] ConfigError),
}

#[cfg(test)]
mod tests;
