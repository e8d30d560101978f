//! Progress of a migration, for clients that ask, and its cancellation.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base::{Cancel, Unpoisoned};
use serde::{Deserialize, Serialize};

/// Interval at which `gantry ctl` polls a migration that it watches.
pub const LOOK: Duration = Duration::from_millis(200);

/// Phase of a migration.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum Phase {
    /// Nothing has been agreed yet.
    #[default]
    Offer,
    /// The guest's applications move from its own devices to the host's pool.
    Seats,
    /// The guest gives up the devices that stay here.
    Detach,
    /// The destination creates a machine.
    Prepare,
    /// Memory is transferred while the VM runs.
    Rounds,
    /// Outstanding requests are drained.
    Quiesce,
    /// The VM is stopped.
    Final,
    /// The destination may run the VM.
    Go,
    /// The VM runs at the destination, and contents of its accelerators' applications follow.
    Postcopy,
    /// The connection broke after GO, and no lock shows which side runs the VM: see
    /// `vm.resolve-migration`.
    Undecided,
    /// The VM runs at the destination.
    Completed,
    /// The VM runs at the source as before.
    Failed,
}

/// The reply to `vm.migration`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MigrationInfo {
    /// `Outgoing` or `Incoming`.
    pub direction: Direction,
    /// Address of the peer, or the address at which the peer is awaited.
    pub url: String,
    /// The current phase.
    pub phase: Phase,
    /// Number of memory rounds started.
    pub rounds: u32,
    /// Size of RAM in bytes, including pages that were never touched.
    pub total_bytes: u64,
    /// Bytes of pages sent or received, including repetitions.
    pub sent_bytes: u64,
    /// Number of zero pages, which are only counted, not sent.
    pub zero_pages: u64,
    /// Estimated number of bytes left to send.
    pub remaining_bytes: u64,
    /// Throughput of the last round in bytes per second.
    pub bytes_per_second: u64,
    /// Bytes of accelerators' applications that were sent while the VM ran.
    #[serde(default)]
    pub accel_bytes: u64,
    /// Bytes of accelerators' applications that were sent while the VM was stopped.
    #[serde(default)]
    pub accel_stop_bytes: u64,
    /// Estimated number of bytes of accelerators' applications that have yet to follow the VM.
    #[serde(default)]
    pub accel_remaining_bytes: u64,
    /// Percentage of their time by which the vCPUs are throttled.
    #[serde(default)]
    pub throttle_percent: u8,
    /// Downtime in milliseconds if the VM were stopped now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_downtime_ms: Option<u64>,
    /// Actual downtime in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// Milliseconds since the start, or the duration of a migration that has ended.
    pub elapsed_ms: u64,
    /// The reason of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Direction of a migration.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum Direction {
    /// The VM leaves this host.
    #[default]
    Outgoing,
    /// The VM arrives at this host.
    Incoming,
}

/// Shared between the migration's thread and the thread that serves clients.
#[derive(Clone, Debug)]
pub struct Progress(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    cancel: Cancel,
    began: Instant,
    info: Mutex<MigrationInfo>,
}

impl Progress {
    /// For a migration that starts now.
    pub fn new(direction: Direction, url: &str) -> Self {
        Self(Arc::new(Shared {
            cancel: Cancel::default(),
            began: Instant::now(),
            info: Mutex::new(MigrationInfo {
                direction,
                url: url.to_owned(),
                ..MigrationInfo::default()
            }),
        }))
    }

    /// Requests cancellation. Connections notice it within a fraction of a second.
    pub fn cancel(&self) {
        self.0.cancel.cancel();
    }

    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancel.is_cancelled()
    }

    /// The handle through which cancellation is requested.
    pub fn cancellation(&self) -> Cancel {
        self.0.cancel.clone()
    }

    /// Changes the reported progress.
    pub fn update(&self, work: impl FnOnce(&mut MigrationInfo)) {
        work(&mut self.0.info.lock_unpoisoned());
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        self.0.info.lock_unpoisoned().phase
    }

    /// The reported progress.
    pub fn info(&self) -> MigrationInfo {
        let mut info = self.0.info.lock_unpoisoned();
        if !matches!(info.phase, Phase::Completed | Phase::Failed) {
            info.elapsed_ms = u64::try_from(self.0.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        }
        info.clone()
    }
}
