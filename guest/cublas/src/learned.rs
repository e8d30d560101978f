//! Which calls have succeeded: their like is not waited for any more.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many are remembered: each has one place, from which a later one may drive it.
const PLACES: usize = 1 << 13;

/// Hashes of calls that have succeeded.
#[derive(Debug)]
pub struct Learned([AtomicU64; PLACES]);

impl Learned {
    /// None yet.
    pub const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; PLACES])
    }

    fn place(&self, hash: u64) -> &AtomicU64 {
        &self.0[(hash >> 20) as usize % PLACES]
    }

    /// Whether a call of this hash has succeeded.
    pub fn knows(&self, hash: u64) -> bool {
        self.place(hash).load(Ordering::Relaxed) == hash | 1
    }

    /// One has.
    pub fn add(&self, hash: u64) {
        // No place that has nothing looks like it.
        self.place(hash).store(hash | 1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_succeeded_is_known_until_another_takes_its_place() {
        static LEARNED: Learned = Learned::new();
        assert!(!LEARNED.knows(0) && !LEARNED.knows(77));
        LEARNED.add(77);
        assert!(LEARNED.knows(77) && !LEARNED.knows(77 + (1 << 20)));
        LEARNED.add(77 + ((PLACES as u64) << 20));
        assert!(!LEARNED.knows(77));
    }
}
