//! Errors of activating, quiescing, saving and restoring a device.

use std::{io, time::Duration};

/// Why a device could not be started with the queues that the driver set up.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver enabled fewer queues than the device needs.
    #[error("the driver set up {got} queues, the device needs {needed}")]
    MissingQueues {
        /// Number of queues that the driver enabled.
        got: usize,
        /// Number of queues that the device needs.
        needed: usize,
    },
    /// A host resource is unavailable.
    #[error("cannot {action}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// Why a device's state could not be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The saved state does not belong to this kind of device.
    #[error("the saved state does not parse")]
    Format(#[from] serde_json::Error),
    /// The saved state contradicts the device's configuration.
    #[error("the saved state does not fit the device: {0}")]
    Mismatch(String),
    /// A host resource is unavailable.
    #[error("cannot {action}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// The host has not completed requests in time.
#[derive(Debug, thiserror::Error)]
#[error(
    "{what} has not answered {requests} requests within {patience:?}: see to its storage, then \
     try again"
)]
pub struct Unanswered {
    /// What the requests were sent to.
    pub what: String,
    /// Number of requests without a reply.
    pub requests: u64,
    /// How long the caller waited.
    pub patience: Duration,
}
