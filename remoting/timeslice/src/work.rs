//! Whether this process's contexts have work, by the record of context switches alone: for a process that does not see what
//! is submitted.
//!
//! While others use the GPU, a context that has no more work is taken off at once, and comes back when it has some and the
//! others' slices are over. So it has work while it is on the GPU, and while it waits for no longer than one round of the others'
//! slices. An absence that is longer was a pause, of which the last part may have been waiting: how much is not known, and
//! half a round counts.

use std::time::Duration;

/// An application that is back so soon counts as having work meanwhile.
use remoting_turns::presence::SHORT;

/// How much longer than it is set a round may last: slices are rounded, and switching takes time.
const TOLERANCE: f64 = 1.25;
/// Nothing counts as longer, in nanoseconds: something was lost, or the clock has changed.
const LONGEST: u64 = 1_000_000_000;

/// Where the contexts are. Times are nanoseconds of the GPU's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// They have no work, or it is not known.
    #[default]
    Away,
    /// One is on the GPU. All is counted until then.
    On(u64),
    /// The last one was taken off then. Nothing is counted since.
    Off(u64),
    /// They were stopped with work left. All is counted until then.
    Stopped(u64),
}

/// For how long contexts have had work.
#[derive(Debug, Default)]
pub(super) struct Work {
    place: Place,
    /// Nanoseconds.
    total: u64,
}

/// The longest absence that may have been waiting, in nanoseconds; `round` is the sum of the others' slices.
fn longest_wait(round: Duration) -> u64 {
    (round.mul_f64(TOLERANCE) + SHORT).as_nanos() as u64
}

impl Work {
    fn add(&mut self, from: u64, until: u64) {
        let time = until.saturating_sub(from);
        if time <= LONGEST {
            self.total = self.total.saturating_add(time);
        }
    }

    /// A context is put on the GPU (`begins`), or taken off, at this time; `own` tells whether it is one of this process.
    pub fn note(&mut self, begins: bool, own: bool, time: u64, round: Duration) {
        match (self.place, own) {
            (Place::On(since), true) => self.add(since, time),
            // Its end was lost.
            (Place::On(since), false) if begins => {
                self.add(since, time);
                self.place = Place::Off(time);
            }
            (Place::Off(since), true) if begins => {
                let absent = time.saturating_sub(since);
                match absent <= longest_wait(round) {
                    true => self.add(since, time),
                    false => self.total += round.as_nanos() as u64 / 2,
                }
            }
            // What the record still had from before, or a start that was not noticed yet.
            (Place::Stopped(since), true) => {
                self.add(since, time);
                if !begins {
                    self.place = Place::Stopped(since.max(time));
                    return;
                }
            }
            _ => {}
        }
        if own {
            self.place = match begins {
                true => Place::On(time),
                false => Place::Off(time),
            };
        }
    }

    /// Whether it counts as having work at this time.
    fn has_work(&self, now: u64, round: Duration) -> bool {
        match self.place {
            Place::Away => false,
            Place::On(_) | Place::Stopped(_) => true,
            Place::Off(since) => now.saturating_sub(since) <= longest_wait(round),
        }
    }

    /// For how long contexts have had work until this time, when all of the record before it has been noted. `stopped` tells
    /// whether they are stopped.
    pub fn until(&mut self, now: u64, stopped: bool, round: Duration) -> Duration {
        if stopped && self.has_work(now, round) {
            if let Place::On(since) | Place::Off(since) | Place::Stopped(since) = self.place {
                self.add(since, now);
            }
            self.place = Place::Stopped(now);
        } else if !stopped && let Place::Stopped(since) = self.place {
            self.add(since, now);
            self.place = Place::Off(now);
        }
        let rest = match self.place {
            Place::On(since) => now.saturating_sub(since),
            Place::Off(since) if self.has_work(now, round) => now.saturating_sub(since),
            _ => 0,
        };
        Duration::from_nanos(self.total.saturating_add(rest))
    }

    /// Nobody else uses the GPU, so that nothing is recorded from now on.
    pub fn alone(&mut self, now: u64) {
        if let Place::On(since) = self.place {
            self.add(since, now);
        }
        if !matches!(self.place, Place::Stopped(_)) {
            self.place = Place::Away;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: Duration = Duration::from_millis(2);
    const MS: u64 = 1_000_000;

    /// The work in milliseconds after these switches: begins, own, and when.
    fn worked(switches: &[(bool, bool, u64)], now: u64) -> u64 {
        let mut work = Work::default();
        for &(begins, own, time) in switches {
            work.note(begins, own, time * MS, ROUND);
        }
        work.until(now * MS, false, ROUND).as_millis() as u64
    }

    #[test]
    fn waiting_for_a_round_of_others_is_work_and_a_longer_absence_is_a_pause() {
        let steps = |absence: u64| {
            let back = 10 + 1 + absence;
            [
                (true, true, 10),
                (false, true, 11),
                (true, false, 11),
                (false, false, back),
                (true, true, back),
            ]
        };
        assert_eq!(worked(&steps(2), 14), 4);
        // A millisecond on the GPU, half a round, and what it has run since.
        assert_eq!(worked(&steps(20), 33), 1 + 1 + 2);
        // It is not known yet whether it comes back.
        let left = [(true, true, 10), (false, true, 11), (true, false, 11)];
        assert_eq!((worked(&left, 13), worked(&left, 30)), (3, 1));
    }

    #[test]
    fn an_idle_context_has_no_work_while_others_have() {
        let others = [(true, false, 1), (false, false, 3), (true, false, 3)];
        assert_eq!(worked(&others, 100), 0);
    }

    #[test]
    fn a_lost_end_is_where_another_one_begins() {
        let switches = [(true, true, 1), (true, false, 3), (true, true, 4)];
        assert_eq!(worked(&switches, 5), 4);
        // One of an own context, too.
        let own = [(true, true, 1), (true, true, 3), (false, true, 4)];
        assert_eq!(worked(&own, 5), 4);
    }

    #[test]
    fn who_is_stopped_with_work_has_work_until_it_does_not_come_back() {
        let mut work = Work::default();
        work.note(true, true, MS, ROUND);
        assert_eq!(
            work.until(2 * MS, true, ROUND),
            Duration::from_millis(1),
            "on"
        );
        // The end that the stop has made is read later.
        work.note(false, true, 2 * MS, ROUND);
        assert_eq!(
            work.until(42 * MS, true, ROUND),
            Duration::from_millis(41),
            "stopped"
        );
        assert_eq!(
            work.until(43 * MS, false, ROUND),
            Duration::from_millis(42),
            "started"
        );
        let mut idle = Work { ..work };
        work.note(true, true, 44 * MS, ROUND);
        assert_eq!(
            work.until(45 * MS, false, ROUND),
            Duration::from_millis(44),
            "on again"
        );
        assert_eq!(
            idle.until(60 * MS, false, ROUND),
            Duration::from_millis(42),
            "it had none"
        );
    }

    #[test]
    fn who_is_stopped_without_work_has_none() {
        let mut work = Work::default();
        work.note(true, true, MS, ROUND);
        work.note(false, true, 2 * MS, ROUND);
        let before = work.until(20 * MS, true, ROUND);
        assert_eq!((before, work.until(40 * MS, true, ROUND)), (before, before));
    }

    #[test]
    fn what_nobody_records_counts_until_it_is_known_to_be_alone() {
        let mut work = Work::default();
        work.note(true, true, MS, ROUND);
        work.alone(5 * MS);
        assert_eq!(work.until(50 * MS, false, ROUND), Duration::from_millis(4));
        // The first switch after that is the end of an unknown time.
        work.note(false, true, 60 * MS, ROUND);
        assert_eq!(work.until(61 * MS, false, ROUND), Duration::from_millis(5));
    }
}
