//! What a migration is doing, for whoever asks, and how it is cancelled.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base::{Cancel, Unpoisoned};
use serde::{Deserialize, Serialize};

/// How often `gantry ctl` looks at a migration that it watches.
pub const LOOK: Duration = Duration::from_millis(200);

/// Where a migration is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum Phase {
    /// Nothing was agreed yet.
    #[default]
    Offer,
    /// The guest's applications go from its own devices to the host's pool.
    Seats,
    /// The guest gives up what stays here.
    Detach,
    /// The destination makes a machine.
    Prepare,
    /// Memory moves while the VM runs.
    Rounds,
    /// What is outstanding is waited for.
    Quiesce,
    /// The VM stands still.
    Final,
    /// The destination may run the VM.
    Go,
    /// The VM runs at the destination, and contents of its accelerators' applications follow.
    Postcopy,
    /// The connection broke after GO, and no lock says who runs the VM: see `vm.resolve-migration`.
    Undecided,
    /// The VM runs at the destination.
    Completed,
    /// The VM runs at the source as before.
    Failed,
}

/// The answer to `vm.migration`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MigrationInfo {
    /// `Outgoing` or `Incoming`.
    pub direction: Direction,
    /// The other side, or where it is waited for.
    pub url: String,
    /// What is going on.
    pub phase: Phase,
    /// Rounds of memory that have begun.
    pub rounds: u32,
    /// Bytes of RAM, those that were never touched included.
    pub total_bytes: u64,
    /// Bytes of pages that were sent or received, repetitions included.
    pub sent_bytes: u64,
    /// Pages that were zero, and sent as a number.
    pub zero_pages: u64,
    /// Bytes that are yet to be sent, as far as is known.
    pub remaining_bytes: u64,
    /// Bytes per second of the last round.
    pub bytes_per_second: u64,
    /// Bytes of accelerators' applications that were sent while the VM ran.
    #[serde(default)]
    pub accel_bytes: u64,
    /// The same while it stood still.
    #[serde(default)]
    pub accel_stop_bytes: u64,
    /// Bytes of theirs that have yet to follow the VM, as far as is known.
    #[serde(default)]
    pub accel_remaining_bytes: u64,
    /// How much of their time is taken away from the vCPUs, in percent.
    #[serde(default)]
    pub throttle_percent: u8,
    /// Milliseconds for which the VM would stand still if it were stopped now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_downtime_ms: Option<u64>,
    /// Milliseconds for which it stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// Milliseconds since the beginning, or that it took.
    pub elapsed_ms: u64,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Which way the VM goes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum Direction {
    /// It leaves.
    #[default]
    Outgoing,
    /// It comes.
    Incoming,
}

/// Shared by the thread that migrates and the one that answers clients.
#[derive(Clone, Debug)]
pub struct Progress(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    cancel: Cancel,
    began: Instant,
    info: Mutex<MigrationInfo>,
}

impl Progress {
    /// Of a migration that begins now.
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

    /// Asks for its end. Connections notice within a fraction of a second.
    pub fn cancel(&self) {
        self.0.cancel.cancel();
    }

    /// Whether somebody asked for its end.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancel.is_cancelled()
    }

    /// By which its end is asked for.
    pub fn cancellation(&self) -> Cancel {
        self.0.cancel.clone()
    }

    /// Changes what is shown.
    pub fn update(&self, work: impl FnOnce(&mut MigrationInfo)) {
        work(&mut self.0.info.lock_unpoisoned());
    }

    /// What is going on now.
    pub fn phase(&self) -> Phase {
        self.0.info.lock_unpoisoned().phase
    }

    /// What is shown.
    pub fn info(&self) -> MigrationInfo {
        let mut info = self.0.info.lock_unpoisoned();
        if !matches!(info.phase, Phase::Completed | Phase::Failed) {
            info.elapsed_ms = u64::try_from(self.0.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        }
        info.clone()
    }
}
