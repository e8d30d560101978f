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
/// Maximum time for all rounds of one application. A busy device delays copies like everything else, and other
/// applications wait to be moved.
pub const TIME: Duration = Duration::from_secs(120);

/// Which rounds there may be.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Maximum number.
    pub most: u32,
    /// If so much time, and more than the last round took, has passed since it, applications have written enough for
    /// another one. Never, if absent.
    pub again: Option<Duration>,
}

/// One application, whose rounds follow each other.
pub const APPLICATION: Policy = Policy {
    most: 5,
    again: None,
};

/// All applications of a machine, between whose rounds its memory is sent.
pub const MACHINE: Policy = Policy {
    most: 8,
    again: Some(Duration::from_secs(10)),
};

/// No rounds.
pub const NONE: Policy = Policy {
    most: 0,
    again: None,
};

/// The rounds so far.
#[derive(Debug)]
pub struct Rounds {
    policy: Policy,
    count: u32,
    /// Bytes of the last round.
    bytes: u64,
    /// Whether they were much less than those of the one before.
    shrinks: bool,
    ended: Instant,
    took: Duration,
}

impl Rounds {
    /// No rounds yet.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            count: 0,
            bytes: 0,
            shrinks: true,
            ended: Instant::now(),
            took: Duration::ZERO,
        }
    }

    /// The number of rounds so far, which is the next round's number.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Records a round that copied `bytes` and began then.
    pub fn add(&mut self, bytes: u64, began: Instant) {
        self.shrinks = self.count == 0 || bytes <= self.bytes / 2;
        self.count += 1;
        self.bytes = bytes;
        self.ended = Instant::now();
        self.took = self.ended.saturating_duration_since(began);
    }

    /// Whether another round would reduce what is copied while applications are stopped, with `left` for all further
    /// rounds: either there was none yet; or one that takes as long as the last one still fits, and either the last one
    /// had much less to copy than the one before, or applications have run for long since.
    pub fn is_due(&self, left: Duration) -> bool {
        self.is_due_at(Instant::now(), left)
    }

    fn is_due_at(&self, now: Instant, left: Duration) -> bool {
        let since = now.saturating_duration_since(self.ended);
        let have_run = |again: Duration| since > self.took.max(again);
        let is_worth = self.bytes >= FEW && self.shrinks || self.policy.again.is_some_and(have_run);
        self.count < self.policy.most && (self.count == 0 || is_worth && self.took < left)
    }

    /// Maximum bytes of memory objects that may have been created since the last round when applications stop, with
    /// `left` for further rounds and `in_stop` bytes that can be copied during the stop. If there are more, another round
    /// follows. Unlimited where none can.
    pub fn most_new(&self, left: Duration, in_stop: u64) -> u64 {
        match (1..self.policy.most).contains(&self.count) && self.took < left {
            true => in_stop.clamp(FEW, MUCH),
            false => u64::MAX,
        }
    }

    /// Estimated number of bytes left to copy, assuming that applications write as much as before. The first round
    /// contains everything, so it says nothing about this.
    pub fn outstanding(&self) -> u64 {
        match self.count > 1 {
            true => self.bytes,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than enough time.
    const HOUR: Duration = Duration::from_secs(3600);

    /// How many rounds follow each other if they have so many bytes.
    fn rounds(policy: Policy, bytes: impl IntoIterator<Item = u64>) -> u32 {
        let mut rounds = Rounds::new(policy);
        for bytes in bytes {
            rounds.add(bytes, Instant::now());
            if !rounds.is_due_at(rounds.ended, HOUR) {
                break;
            }
        }
        rounds.count()
    }

    #[test]
    fn rounds_end_when_they_hardly_shrink_when_little_is_left_or_after_some() {
        let mib = |count: u64| count << 20;
        for policy in [APPLICATION, MACHINE] {
            assert_eq!(rounds(policy, [mib(256), mib(200), mib(1)]), 2);
            assert_eq!(rounds(policy, [mib(256), mib(128), 4096, 4096]), 3);
            assert_eq!(rounds(policy, [4096, 4096]), 1);
            let halves = (0..20).map(|round| mib(1 << 40) >> round);
            assert_eq!(rounds(policy, halves), policy.most);
        }
    }

    #[test]
    fn a_round_that_shrinks_again_is_worth_another() {
        for policy in [APPLICATION, MACHINE] {
            let mut rounds = Rounds::new(policy);
            let is_due = [64 << 20, 16 << 20, 12 << 20, 1 << 20].map(|bytes| {
                rounds.add(bytes, Instant::now());
                rounds.is_due_at(rounds.ended, HOUR)
            });
            assert_eq!(is_due, [true, true, false, true]);
        }
        assert_eq!((APPLICATION.most, MACHINE.most), (5, 8));
    }

    #[test]
    fn the_bytes_of_the_last_round_are_expected_again_but_for_the_first() {
        let mut rounds = Rounds::new(MACHINE);
        for (bytes, outstanding) in [(64 << 20, 0), (16 << 20, 16 << 20), (4096, 4096)] {
            rounds.add(bytes, Instant::now());
            assert_eq!(rounds.outstanding(), outstanding);
        }
    }

    #[test]
    fn applications_that_have_gone_on_for_long_are_copied_again_but_not_for_ever() {
        for (policy, again) in [(MACHINE, true), (APPLICATION, false)] {
            let mut rounds = Rounds::new(policy);
            for count in 1..=policy.most {
                assert_eq!(rounds.count(), count - 1);
                rounds.add(4096, Instant::now());
                let later = Instant::now() + Duration::from_secs(60);
                assert_eq!(rounds.is_due_at(later, HOUR), again && count < policy.most);
            }
        }
    }

    #[test]
    fn the_first_round_is_always_due_and_no_other_one_that_would_end_too_late() {
        let mut rounds = Rounds::new(APPLICATION);
        assert!(rounds.is_due(Duration::ZERO));
        let took = Duration::from_secs(100);
        rounds.add(64 << 20, Instant::now() - took);
        assert!(rounds.is_due(2 * took));
        assert!(!rounds.is_due(took));
    }

    #[test]
    fn as_much_may_be_new_at_a_stop_as_fits_in_it_while_there_may_be_rounds() {
        let mut rounds = Rounds::new(MACHINE);
        assert_eq!(rounds.most_new(HOUR, 0), u64::MAX, "nothing was copied");
        let took = Duration::from_secs(100);
        for count in 1..=MACHINE.most {
            rounds.add(0, Instant::now() - took);
            let most = [0, 2 * FEW, u64::MAX].map(|in_stop| rounds.most_new(2 * took, in_stop));
            match count < MACHINE.most {
                true => assert_eq!(most, [FEW, 2 * FEW, MUCH]),
                false => assert_eq!(most, [u64::MAX; 3]),
            }
            assert_eq!(rounds.most_new(took, 0), u64::MAX, "no time is left");
        }
    }

    #[test]
    fn rounds_that_are_not_wanted_are_never_due() {
        let rounds = Rounds::new(NONE);
        assert!(!rounds.is_due(HOUR));
        assert_eq!(rounds.most_new(HOUR, 0), u64::MAX);
        assert_eq!((rounds.count(), rounds.outstanding()), (0, 0));
    }
}
