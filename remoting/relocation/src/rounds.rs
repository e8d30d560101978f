//! Rounds of precopy: how many are worth their time.
//!
//! An application may allocate much memory after a round that found little. All of that is new, and would be copied
//! while the application is stopped. The one who stops it therefore bounds how much may be new, and runs another round
//! when there is more, as long as further rounds are allowed.

use std::time::{Duration, Instant};

/// Up to this many bytes, copying while the application is stopped is as fast as another round.
const FEW: u64 = 1 << 20;
/// This many bytes allocated since the last round are worth another one: copying them takes about half a second.
pub(crate) const MUCH: u64 = 256 << 20;
/// Maximum number of rounds.
pub(crate) const MOST: u32 = 5;
/// Maximum time for all rounds of one application. A busy device delays copies like everything else, and other
/// applications wait to be moved.
pub const TIME: Duration = Duration::from_secs(120);

/// The rounds so far.
#[derive(Debug)]
pub struct Rounds {
    count: u32,
    /// Bytes of the last round.
    bytes: u64,
    /// Whether they were much less than those of the one before.
    shrinks: bool,
    took: Duration,
}

impl Default for Rounds {
    /// No rounds yet.
    fn default() -> Self {
        Self {
            count: 0,
            bytes: 0,
            shrinks: true,
            took: Duration::ZERO,
        }
    }
}

impl Rounds {
    /// The number of rounds so far, which is the next round's number.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Records a round that copied `bytes` and began then.
    pub fn add(&mut self, bytes: u64, began: Instant) {
        self.shrinks = self.count == 0 || bytes <= self.bytes / 2;
        self.count += 1;
        self.bytes = bytes;
        self.took = began.elapsed();
    }

    /// Whether another round would reduce what is copied while the application is stopped, with `left` for all further
    /// rounds: either there was none yet; or one that takes as long as the last one still fits, and the last one had
    /// much less to copy than the one before.
    pub fn is_due(&self, left: Duration) -> bool {
        let is_worth = self.bytes >= FEW && self.shrinks;
        self.count == 0 || self.count < MOST && is_worth && self.took < left
    }

    /// Maximum bytes of memory objects that may have been created since the last round when the application stops, with
    /// `left` for further rounds. If there are more, another round follows. Unlimited where none can.
    pub fn most_new(&self, left: Duration) -> u64 {
        match (1..MOST).contains(&self.count) && self.took < left {
            true => MUCH,
            false => u64::MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than enough time.
    const HOUR: Duration = Duration::from_secs(3600);

    /// How many rounds there are if they have so many bytes.
    fn rounds(bytes: impl IntoIterator<Item = u64>) -> u32 {
        let mut rounds = Rounds::default();
        for bytes in bytes {
            rounds.add(bytes, Instant::now());
            if !rounds.is_due(HOUR) {
                break;
            }
        }
        rounds.count()
    }

    #[test]
    fn rounds_end_when_they_hardly_shrink_when_little_is_left_or_after_some() {
        let mib = |count: u64| count << 20;
        assert_eq!(rounds([mib(256), mib(200), mib(1)]), 2);
        assert_eq!(rounds([mib(256), mib(128), 4096, 4096]), 3);
        assert_eq!(rounds([4096, 4096]), 1);
        assert_eq!(rounds((0..20).map(|round| mib(1 << 40) >> round)), MOST);
    }

    #[test]
    fn the_first_round_is_always_due_and_no_other_one_that_would_end_too_late() {
        let mut rounds = Rounds::default();
        assert!(rounds.is_due(Duration::ZERO));
        let took = Duration::from_secs(100);
        rounds.add(64 << 20, Instant::now() - took);
        assert!(rounds.is_due(2 * took));
        assert!(!rounds.is_due(took));
    }

    #[test]
    fn rounds_without_time_stop_an_application_whatever_it_has_made() {
        let mut rounds = Rounds::default();
        assert_eq!(rounds.most_new(HOUR), u64::MAX, "nothing was copied");
        let took = Duration::from_secs(100);
        for count in 1..=MOST {
            rounds.add(0, Instant::now() - took);
            let most = if count < MOST { MUCH } else { u64::MAX };
            assert_eq!(rounds.most_new(2 * took), most);
            assert_eq!(rounds.most_new(took), u64::MAX, "no time is left");
        }
    }
}
