//! Records which calls have succeeded: similar calls are not waited for any more.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of calls to remember. Each hash has one place, in which a later one may replace it.
const PLACES: usize = 1 << 13;

/// The hashes of calls that have succeeded.
#[derive(Debug)]
pub struct Learned([AtomicU64; PLACES]);

impl Learned {
    /// No calls yet.
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

    /// Records a success.
    pub fn add(&self, hash: u64) {
        // An empty place, which is zero, never matches.
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
