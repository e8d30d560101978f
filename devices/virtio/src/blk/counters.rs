//! Counters of a disk for `vm.counters` and `vmm.metrics`.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Upper limits of latencies in microseconds, by which transfers are counted.
const LIMITS: [u64; 12] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000,
];

/// The names of the counters of transfers within [`LIMITS`].
macro_rules! within {
    ($direction:literal) => {
        [
            concat!($direction, "_within_50us"),
            concat!($direction, "_within_100us"),
            concat!($direction, "_within_200us"),
            concat!($direction, "_within_500us"),
            concat!($direction, "_within_1000us"),
            concat!($direction, "_within_2000us"),
            concat!($direction, "_within_5000us"),
            concat!($direction, "_within_10000us"),
            concat!($direction, "_within_20000us"),
            concat!($direction, "_within_50000us"),
            concat!($direction, "_within_100000us"),
            concat!($direction, "_within_1000000us"),
        ]
    };
}

/// One direction of transfer.
#[derive(Debug)]
pub struct Direction {
    bytes: AtomicU64,
    operations: AtomicU64,
    /// Sum, minimum and maximum of the latency from request to completion, in microseconds.
    total: AtomicU64,
    least: AtomicU64,
    most: AtomicU64,
    /// Transfers by latency: within each limit, but not within the one before.
    within: [AtomicU64; LIMITS.len()],
}

impl Default for Direction {
    fn default() -> Self {
        Self {
            bytes: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            total: AtomicU64::new(0),
            least: AtomicU64::new(u64::MAX),
            most: AtomicU64::new(0),
            within: Default::default(),
        }
    }
}

impl Direction {
    /// Counts a transfer. Costs six relaxed atomic operations.
    pub fn count(&self, bytes: u64, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.bytes.fetch_add(bytes, Relaxed);
        self.operations.fetch_add(1, Relaxed);
        self.total.fetch_add(micros, Relaxed);
        self.least.fetch_min(micros, Relaxed);
        self.most.fetch_max(micros, Relaxed);
        if let Some(at) = LIMITS.iter().position(|limit| micros <= *limit) {
            self.within[at].fetch_add(1, Relaxed);
        }
    }

    /// The number of transfers within each limit, under these names.
    fn distribution(
        &self,
        names: [&'static str; LIMITS.len()],
    ) -> impl Iterator<Item = (&'static str, u64)> {
        let mut sum = 0;
        names
            .into_iter()
            .zip(&self.within)
            .map(move |(name, more)| {
                sum += more.load(Relaxed);
                (name, sum)
            })
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
        let mut list = vec![
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
            ("read_latency_total", read.total.load(Relaxed)),
            ("write_latency_total", write.total.load(Relaxed)),
        ];
        list.extend(read.distribution(within!("read")));
        list.extend(write.distribution(within!("write")));
        list
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_transfer_is_within_its_limit_and_all_larger_ones() {
        let counters = Counters::default();
        for micros in [0, 50, 51, 1_000_000, 1_000_001] {
            counters.read.count(512, Duration::from_micros(micros));
        }
        let list: BTreeMap<_, _> = counters.list().into_iter().collect();
        let within = |limit: u64| list[&*format!("read_within_{limit}us")];
        assert_eq!(LIMITS.map(within), [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4]);
        assert_eq!((list["read_ops"], list["write_within_50us"]), (5, 0));
        assert_eq!(list["read_latency_total"], 2_000_102);
    }
}
