//! Files that are handed over with a machine to another process of the same host (`local=on`).

use std::{os::fd::OwnedFd, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Maximum number of files that are handed over with a machine.
pub const MAX_FILES: usize = 1024;

/// The purpose of a file. Untrusted at the destination.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum FileUse {
    /// The memory of a region of the offer.
    Memory {
        /// Index of the region, from 0.
        region: usize,
        /// Offset in the file at which it begins, in bytes.
        offset: u64,
    },
    /// A listening socket of the machine.
    Socket {
        /// Its path.
        path: PathBuf,
    },
    /// A queue of the tap of a network card.
    Tap {
        /// Name of the card.
        id: String,
        /// Number of the queue, from 0.
        queue: usize,
    },
}

/// A file that is handed over with a machine.
#[derive(Debug)]
pub struct GivenFile {
    /// Its purpose.
    pub what: FileUse,
    /// The file.
    pub file: OwnedFd,
}
