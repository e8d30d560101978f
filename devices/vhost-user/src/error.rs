//! Why a device cannot be made.

use std::path::PathBuf;

use crate::connection::Failure;

/// Why a back end cannot serve a device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The communication failed.
    #[error("cannot use the back end at {}", path.display())]
    Failure {
        /// Its socket.
        path: PathBuf,
        /// What happened.
        source: Failure,
    },
    /// It lacks what every device needs.
    #[error("the back end at {} lacks {what}: use a newer one", path.display())]
    Lacks {
        /// Its socket.
        path: PathBuf,
        /// What it lacks.
        what: &'static str,
    },
    /// It has too few queues.
    #[error(
        "the back end at {} has {has} queues, and {wanted} are wanted: start it with more, or give the device fewer",
        path.display()
    )]
    Queues {
        /// Its socket.
        path: PathBuf,
        /// Number of queues that are wanted.
        wanted: u16,
        /// Number of queues that it has.
        has: u64,
    },
    /// Guest memory that it cannot map.
    #[error(
        "guest memory at {guest:#x} is private to Gantry, and another process cannot reach it: start the VM with \
         --memory shared=on (or --memory-zone with shared=on)"
    )]
    Private {
        /// Guest-physical address.
        guest: u64,
    },
    /// It can map fewer regions than the guest has.
    #[error(
        "the guest has {regions} regions of memory, and the back end maps at most {slots}: use one that has \
         CONFIGURE_MEM_SLOTS, or a VM that is started with all of its memory"
    )]
    Regions {
        /// Number of regions of the guest.
        regions: usize,
        /// Number that the back end maps.
        slots: usize,
    },
    /// The device cannot be started.
    #[error("cannot {action}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
}
