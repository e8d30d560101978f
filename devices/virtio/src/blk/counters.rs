//! Counters of a disk for `vm.counters`.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// One direction of transfer.
#[derive(Debug)]
pub struct Direction {
    bytes: AtomicU64,
    operations: AtomicU64,
    /// Sum, minimum and maximum of the latency from request to completion, in microseconds.
    total: AtomicU64,
    least: AtomicU64,
    most: AtomicU64,
}

impl Default for Direction {
    fn default() -> Self {
        Self {
            bytes: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            total: AtomicU64::new(0),
            least: AtomicU64::new(u64::MAX),
            most: AtomicU64::new(0),
        }
    }
}

impl Direction {
    /// Counts a transfer. Costs five relaxed atomic operations.
    pub fn count(&self, bytes: u64, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.bytes.fetch_add(bytes, Relaxed);
        self.operations.fetch_add(1, Relaxed);
        self.total.fetch_add(micros, Relaxed);
        self.least.fetch_min(micros, Relaxed);
        self.most.fetch_max(micros, Relaxed);
    }

    fn average(&self) -> u64 {
        let total = self.total.load(Relaxed);
        total
            .checked_div(self.operations.load(Relaxed))
            .unwrap_or(0)
    }

    /// Minimum latency; 0 before the first transfer.
    fn least(&self) -> u64 {
        match self.least.load(Relaxed) {
            u64::MAX => 0,
            least => least,
        }
    }
}

/// All counters of a disk: bytes, operations, and latencies in microseconds.
#[derive(Debug, Default)]
pub struct Counters {
    /// Disk to guest.
    pub read: Direction,
    /// Guest to disk.
    pub write: Direction,
}

impl Counters {
    /// Names and values, with the names that clients of Cloud Hypervisor expect.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        let (read, write) = (&self.read, &self.write);
        vec![
            ("read_bytes", read.bytes.load(Relaxed)),
            ("read_ops", read.operations.load(Relaxed)),
            ("read_latency_min", read.least()),
            ("read_latency_max", read.most.load(Relaxed)),
            ("read_latency_avg", read.average()),
            ("write_bytes", write.bytes.load(Relaxed)),
            ("write_ops", write.operations.load(Relaxed)),
            ("write_latency_min", write.least()),
            ("write_latency_max", write.most.load(Relaxed)),
            ("write_latency_avg", write.average()),
        ]
    }
}
