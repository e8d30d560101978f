//! Files that go with a machine to another process of the same host (`local=on`).

use std::{os::fd::OwnedFd, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Most files that go with a machine.
pub const MAX_FILES: usize = 1024;

/// What a file is. Untrusted at the destination.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum FileUse {
    /// The memory of a region of the offer.
    Memory {
        /// Which of them, from 0.
        region: usize,
        /// Where in the file it begins, in bytes.
        offset: u64,
    },
    /// A socket that the machine listens on.
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

/// A file that goes with a machine.
#[derive(Debug)]
pub struct GivenFile {
    /// What it is.
    pub what: FileUse,
    /// The file.
    pub file: OwnedFd,
}
