//! Why a device of another process cannot be used.

use std::io;

use super::Failure;

/// A device of another process cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The conversation with its server failed.
    #[error(transparent)]
    Server(#[from] Failure),
    /// The server says nothing of a configuration space.
    #[error("its configuration space is {size:#x} bytes instead of 0x100 to 0x1000")]
    Config {
        /// Its size.
        size: u64,
    },
    /// The server cannot be given guest memory.
    #[error(
        "guest memory at {guest:#x} is private to Gantry, and another process cannot reach it: \
         start the VM with --memory shared=on (or --memory-zone with shared=on)"
    )]
    Private {
        /// Guest-physical address.
        guest: u64,
    },
    /// Interrupts that the device does not have.
    #[error("{wanted} interrupts are wanted, and its server has {count}")]
    Interrupts {
        /// How many the guest wants.
        wanted: usize,
        /// How many there are.
        count: u32,
    },
    /// Nobody can wait for its server to go.
    #[error("cannot watch its server")]
    Watch(#[source] io::Error),
    /// It is dead.
    #[error("its server is gone")]
    Gone,
}
