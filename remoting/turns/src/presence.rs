//! For how long an application has had work.

use std::time::Duration;

use super::{Moment, pauses::Expected};

/// An application that is usually back within this time counts as having work meanwhile.
pub const SHORT: Duration = Duration::from_micros(500);

/// For how long an application has had work, or was away for a short pause only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// The total until `since`.
    pub before: Duration,
    /// Since when it counts as having work, or when it last did.
    pub since: Moment,
    /// Until when it does, if nothing happens.
    pub until: Moment,
}

impl Presence {
    /// A moment that never comes.
    const NEVER: Moment = Moment::from_nanos(u64::MAX);

    /// It has work. Said twice, the first counts.
    pub fn begin(&mut self, now: Moment) {
        if self.until == Self::NEVER {
            return;
        }
        if self.until <= now {
            self.before = self.total(now);
            self.since = now;
        }
        self.until = Self::NEVER;
    }

    /// It has no work, and is expected to continue as its pauses until now tell.
    pub fn rest(&mut self, expected: Expected, now: Moment) {
        if self.until != Self::NEVER {
            return;
        }
        self.until = match expected.usual <= SHORT {
            true => now + expected.within,
            false => now,
        };
    }

    /// The total until `now`. It never decreases.
    pub fn total(&self, now: Moment) -> Duration {
        self.before
            .saturating_add(self.until.min(now).since(self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(count: u64) -> Moment {
        Moment::from_nanos(count * 1000)
    }

    fn expected(usual: u64, within: u64) -> Expected {
        Expected {
            within: Duration::from_micros(within),
            usual: Duration::from_micros(usual),
            batch: Duration::ZERO,
        }
    }

    #[test]
    fn a_short_usual_pause_counts_as_work_until_it_is_late() {
        for (expected, total) in [
            (expected(200, 1000), 1100),
            (expected(501, 1000), 100),
            // Not expected at all.
            (expected(0, 0), 100),
        ] {
            let mut presence = Presence::default();
            presence.begin(Moment::START);
            presence.rest(expected, micros(100));
            assert_eq!(presence.total(micros(9000)), Duration::from_micros(total));
            presence.begin(micros(9000));
            presence.begin(micros(9050));
            let now = presence.total(micros(9100));
            assert_eq!(now, Duration::from_micros(total + 100));
        }
    }

    #[test]
    fn who_comes_back_in_time_was_present_all_the_time() {
        let mut presence = Presence::default();
        let mut now = micros(5);
        for _ in 0..10 {
            presence.begin(now);
            now += Duration::from_micros(100);
            presence.rest(expected(200, 400), now);
            now += Duration::from_micros(200);
        }
        presence.begin(now);
        assert_eq!(presence.total(now), Duration::from_micros(3000));
    }

    #[test]
    fn any_contents_of_the_page_give_a_time() {
        for (since, until) in [(5, 3), (1, u64::MAX), (u64::MAX, 0)] {
            let presence = Presence {
                before: Duration::MAX,
                since: Moment::from_nanos(since),
                until: Moment::from_nanos(until),
            };
            assert_eq!(presence.total(micros(7)), Duration::MAX);
        }
    }
}
