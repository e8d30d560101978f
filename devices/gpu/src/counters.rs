//! What the virtual GPU counts, readable without its lock: a guest can keep that busy.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of counters.
pub const COUNT: usize = 18;

/// Names of the counters.
const NAMES: [&str; COUNT] = [
    "register_reads",
    "register_writes",
    "bar_reads",
    "bar_writes",
    "doorbells",
    "flushes",
    "syncs",
    "walks",
    "entries_compared",
    "entries_told",
    "tables_refused",
    "log_reads",
    "pages_written",
    "pages_armed",
    "pieces_mapped",
    "messages",
    "reconnections",
    "interrupts",
];

/// The counters as of the last access. Publishing them is 18 relaxed stores.
#[derive(Default)]
pub struct Counters([AtomicU64; COUNT]);

impl Counters {
    /// Publishes new values, in the order of their names.
    pub fn publish(&self, values: [u64; COUNT]) {
        for (counter, value) in self.0.iter().zip(values) {
            counter.store(value, Ordering::Relaxed);
        }
    }

    /// The counters, as (name, value) pairs.
    pub fn all(&self) -> Vec<(&'static str, u64)> {
        let values = self.0.iter().map(|counter| counter.load(Ordering::Relaxed));
        NAMES.into_iter().zip(values).collect()
    }
}
