//! What can go wrong as a device is activated, held back, saved or restored.

use std::{io, time::Duration};

/// A device could not be started with the queues that the driver set up.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver enabled fewer queues than the device needs.
    #[error("the driver set up {got} queues, the device needs {needed}")]
    MissingQueues {
        /// Queues that the driver enabled.
        got: usize,
        /// Queues that the device needs.
        needed: usize,
    },
    /// A host resource could not be had.
    #[error("cannot {action}")]
    Host {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// A device's state could not be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The saved state is not one of this device.
    #[error("the saved state does not parse")]
    Format(#[from] serde_json::Error),
    /// The saved state contradicts the device's configuration.
    #[error("the saved state does not fit the device: {0}")]
    Mismatch(String),
    /// A host resource could not be had.
    #[error("cannot {action}")]
    Host {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// What the host has been asked for has not been answered in time.
#[derive(Debug, thiserror::Error)]
#[error(
    "{what} has not answered {requests} requests within {patience:?}: see to its storage, then \
     try again"
)]
pub struct Unanswered {
    /// What was asked.
    pub what: String,
    /// Requests without an answer.
    pub requests: u64,
    /// How long it was waited for.
    pub patience: Duration,
}
