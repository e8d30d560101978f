//! A virtual GPU: what a guest's own driver, nouveau, sees of the part of a GPU that a mediator
//! (`gantry-gpu`) gives its VM.
//!
//! ```text
//!   guest --BAR 0--------> front -- registers, page tables, channels -- link --> mediator
//!         --BAR 1, BAR 3-> aperture: pages of the partition, no exit
//!         --submissions--> channels -------------------------------- link --> mediator
//! ```
//!
//! - [`front`]: registers, BARs and what follows from them. [`function`]: the PCI function.
//! - [`views`], [`aperture`]: BARs that are memory. [`memory`]: the VM's part of VRAM. [`mirror`]:
//!   registers that are read without an exit.
//! - [`tables`]: the guest's page tables. [`watch`]: which pages of them were written. [`channels`]:
//!   its channels.
//! - [`recorder`]: what the guest does, as a file.
//! - [`lines`]: interrupts. [`link`]: the conversation with the mediator.
//!
//! The front holds the VM's own part of VRAM and nothing else: what it says to the mediator is
//! validated there. A guest that writes nonsense gets a fault or nothing.

mod aperture;
mod channels;
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

/// What is configured.
#[derive(Clone, Debug)]
pub struct Options {
    /// The mediator's socket.
    pub socket: PathBuf,
    /// Bytes of VRAM, whole MiB.
    pub vram: u64,
    /// Channels at a time, 1 to 128.
    pub channels: u8,
    /// Share of the GPU against other VMs'.
    pub weight: u32,
    /// BARs are memory, and so are registers that are only read; otherwise each access is trapped.
    pub remap: bool,
    /// Changed page tables are told when they are used next, and not when the guest says that they
    /// have changed.
    pub lazy: bool,
    /// Only pages of tables that were written are compared, and not all of them.
    pub watch: bool,
    /// A file in which all that the guest does with it is recorded, which needs all accesses to be trapped.
    pub record: Option<PathBuf>,
    /// Name of its threads.
    pub thread_name: String,
}

/// A virtual GPU cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The mediator cannot be talked to.
    #[error("cannot talk to gantry-gpu at {}: is it started?", path.display())]
    Socket {
        /// Its socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The mediator does not want it.
    #[error(
        "gantry-gpu refuses: is there so much VRAM left, and do channels and weight fit? Its log \
         says why"
    )]
    Refused,
    /// The mediator says something else.
    #[error("gantry-gpu answers {0:?} instead of a partition of the size that was asked for")]
    Welcome(Event),
    /// The mediator makes no sense.
    #[error("gantry-gpu makes no sense")]
    Nonsense(#[from] Nonsense),
    /// Memory is missing.
    #[error("cannot map the virtual GPU's memory")]
    Memory(#[source] io::Error),
    /// The GPU cannot be given guest memory.
    #[error(
        "guest memory at {0:#x} is private to Gantry, and the GPU cannot reach it: start the VM \
         with --memory shared=on (or --memory-zone with shared=on)"
    )]
    Private(u64),
    /// The recording cannot be made.
    #[error("cannot make {} to record what the guest does", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The configuration space has no room.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
