//! How long clients have waited lately until some of their work was done.

use std::time::Duration;

use remoting_turns::waits::{CLASSES, bound};

use crate::status::Waits;

/// Figures are of the last one to two of these.
pub(super) const WINDOW: Duration = Duration::from_secs(10);

type Counts = [u64; CLASSES];

/// The waits of a client.
#[derive(Debug)]
pub(super) struct Tails {
    /// Those of workers that have ended.
    ended: Counts,
    /// What had been counted when the last two windows began.
    marks: [Counts; 2],
}

impl Default for Tails {
    fn default() -> Self {
        Self {
            ended: [0; CLASSES],
            marks: [[0; CLASSES]; 2],
        }
    }
}

impl Tails {
    /// A worker has ended that had counted this.
    pub(super) fn keep(&mut self, counts: &Counts) {
        add(&mut self.ended, counts);
    }

    fn all(&self, counts: impl Iterator<Item = Counts>) -> Counts {
        let mut all = self.ended;
        counts.for_each(|counts| add(&mut all, &counts));
        all
    }

    /// Another window begins; `counts` are those of its workers.
    pub(super) fn mark(&mut self, counts: impl Iterator<Item = Counts>) {
        self.marks = [self.marks[1], self.all(counts)];
    }

    /// The waits of the last windows; `counts` are those of its workers.
    pub(super) fn recent(&self, counts: impl Iterator<Item = Counts>) -> Waits {
        let mut recent = self.all(counts);
        for (count, before) in recent.iter_mut().zip(self.marks[0]) {
            // Workers may say anything.
            *count = count.saturating_sub(before);
        }
        waits(&recent)
    }
}

fn add(to: &mut Counts, counts: &Counts) {
    for (to, count) in to.iter_mut().zip(counts) {
        *to = to.saturating_add(*count);
    }
}

fn waits(counts: &Counts) -> Waits {
    let count = counts
        .iter()
        .fold(0, |sum: u64, of| sum.saturating_add(*of));
    // The bound of the class of the wait that so many in a thousand are not longer than.
    let quantile = |thousandths: u64| {
        let rank = (u128::from(count) * u128::from(thousandths))
            .div_ceil(1000)
            .max(1);
        let mut below = 0;
        let found = counts.iter().position(|of| {
            below += u128::from(*of);
            below >= rank
        });
        found.map_or(0, |class| bound(class).as_nanos() as u64)
    };
    Waits {
        count,
        p50: quantile(500),
        p95: quantile(950),
        p99: quantile(990),
        longest: quantile(1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(of: &[(usize, u64)]) -> Counts {
        let mut counts = [0; CLASSES];
        of.iter().for_each(|(class, count)| counts[*class] = *count);
        counts
    }

    fn nanos(class: usize) -> u64 {
        bound(class).as_nanos() as u64
    }

    #[test]
    fn one_of_a_hundred_decides_about_p99_and_the_last_about_the_longest() {
        assert_eq!(waits(&counts(&[])), Waits::default());
        let waits = waits(&counts(&[(20, 94), (30, 5), (40, 1)]));
        assert_eq!(waits.count, 100);
        let found = [waits.p50, waits.p95, waits.p99, waits.longest];
        assert_eq!(found, [20, 30, 30, 40].map(nanos));
        let most = counts(&[(0, u64::MAX), (91, u64::MAX)]);
        assert_eq!(super::waits(&most).count, u64::MAX);
    }

    #[test]
    fn what_was_long_ago_is_forgotten_and_what_a_worker_said_that_has_ended_is_not() {
        let mut tails = Tails::default();
        let longest = |tails: &Tails, now: &Counts| tails.recent([*now].into_iter()).longest;
        let first = counts(&[(40, 1)]);
        assert_eq!(longest(&tails, &first), nanos(40));
        tails.keep(&first);
        let none = counts(&[]);
        assert_eq!(longest(&tails, &none), nanos(40));
        tails.mark([none].into_iter());
        let second = counts(&[(10, 3)]);
        assert_eq!(longest(&tails, &second), nanos(40));
        tails.mark([second].into_iter());
        assert_eq!(longest(&tails, &second), nanos(10));
        // One that says less than before.
        tails.mark([second].into_iter());
        assert_eq!(longest(&tails, &none), 0);
    }
}
