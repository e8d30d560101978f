//! A virtual GPU: the part of a GPU that a mediator (`gantry-gpu`) gives a VM, as the guest's own
//! driver, nouveau, sees it.
//!
//! ```text
//!   guest --BAR 0--------> front -- registers, page tables, channels -- link --> mediator
//!         --BAR 1, BAR 3-> aperture: pages of the partition, no exit
//!         --submissions--> channels -------------------------------- link --> mediator
//! ```
//!
//! - [`front`]: registers, BARs and their side effects. [`function`]: the PCI function.
//! - [`views`], [`aperture`]: BARs that are memory. [`memory`]: the VM's part of VRAM. [`mirror`]:
//!   registers that are read without an exit.
//! - [`tables`]: the guest's page tables. [`watch`]: detects which pages of them were written.
//!   [`channels`]: the guest's channels.
//! - [`deadline`]: how long work for the guest may hold the lock. [`counters`]: readable without it.
//! - [`recorder`]: records the guest's accesses to a file.
//! - [`lines`]: interrupts. [`link`]: the connection to the mediator.
//!
//! The front has access only to the VM's own part of VRAM, and the mediator validates everything
//! that the front sends. If the guest writes invalid data, it causes a fault or has no effect.

mod aperture;
mod channels;
mod counters;
mod deadline;
mod directory;
#[cfg(test)]
mod fake_space;
mod front;
mod function;
mod lines;
mod link;
mod memory;
mod mirror;
mod recorder;
mod tables;
#[cfg(test)]
mod tests;
mod views;
mod watch;

use std::{io, path::PathBuf};

use gpu_mediator::gpu::wire::{Event, Nonsense};

pub use function::{Gpu, Resources};
use pci::ConfigError;

/// Configuration of a virtual GPU.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of the mediator's socket.
    pub socket: PathBuf,
    /// Size of VRAM in bytes, whole MiB.
    pub vram: u64,
    /// Maximum number of channels at a time, 1 to 128.
    pub channels: u8,
    /// Weight of this VM in the sharing of the GPU.
    pub weight: u32,
    /// BARs are mapped as memory, and so are registers without side effects of reads; otherwise
    /// every access is trapped.
    pub remap: bool,
    /// Changed page tables are sent to the mediator when they are next used, not when the guest
    /// flushes them.
    pub lazy: bool,
    /// Only pages of tables that were written are compared, instead of all pages.
    pub watch: bool,
    /// A file in which all accesses of the guest are recorded. Requires that all accesses are
    /// trapped.
    pub record: Option<PathBuf>,
    /// Name of its threads.
    pub thread_name: String,
}

/// Why a virtual GPU cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The communication with the mediator failed.
    #[error("cannot talk to gantry-gpu at {}: is it started?", path.display())]
    Socket {
        /// Path of its socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The mediator refuses the request.
    #[error(
        "gantry-gpu refuses: is there so much VRAM left, and do channels and weight fit? Its log \
         says why"
    )]
    Refused,
    /// The mediator sent another message than a welcome.
    #[error("gantry-gpu answers {0:?} instead of a partition of the size that was asked for")]
    Welcome(Event),
    /// The mediator sent an invalid message.
    #[error("gantry-gpu has sent an invalid message")]
    Nonsense(#[from] Nonsense),
    /// Memory cannot be allocated or mapped.
    #[error("cannot map the virtual GPU's memory")]
    Memory(#[source] io::Error),
    /// Guest memory cannot be shared with the GPU.
    #[error(
        "guest memory at {0:#x} is private to Gantry, and the GPU cannot reach it: start the VM \
         with --memory shared=on (or --memory-zone with shared=on)"
    )]
    Private(u64),
    /// The recording cannot be created.
    #[error("cannot make {} to record what the guest does", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The configuration space cannot be laid out.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
