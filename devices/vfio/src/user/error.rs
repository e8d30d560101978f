//! Why a device of another process cannot be used.

use std::io;

use super::Failure;

/// Why a device of another process cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The communication with its server failed.
    #[error(transparent)]
    Server(#[from] Failure),
    /// The server reports an unusable configuration space.
    #[error("its configuration space is {size:#x} bytes instead of 0x100 to 0x1000")]
    Config {
        /// Its size.
        size: u64,
    },
    /// Guest memory cannot be shared with the server.
    #[error(
        "guest memory at {guest:#x} is private to Gantry, and another process cannot reach it: \
         start the VM with --memory shared=on (or --memory-zone with shared=on)"
    )]
    Private {
        /// Guest-physical address.
        guest: u64,
    },
    /// More interrupts were requested than the device has.
    #[error("{wanted} interrupts are wanted, and its server has {count}")]
    Interrupts {
        /// Number that the guest wants.
        wanted: usize,
        /// Number that the device has.
        count: u32,
    },
    /// The connection to the server cannot be watched.
    #[error("cannot watch its server")]
    Watch(#[source] io::Error),
    /// The server is lost.
    #[error("its server is gone")]
    Gone,
}
