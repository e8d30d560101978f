//! How long an application stays away between two batches.
//!
//! An application that waits for its results has no work on the device for a moment at the end of each batch. Whoever
//! takes the device from it then gives it to others for a whole turn: "deceptive idleness", as Iyer and Druschel named
//! it for disks (Anticipatory scheduling, SOSP 2001). The recent pauses, and the device time between them, tell how
//! long waiting pays off. A percentile of the pauses is expected, not their mean, so that most pauses end in time. A
//! pause that does not costs the application its trust, until it has returned in time for some pauses.
//!
//! The caller tells it what happens and when; it reads no clock.

use std::time::Duration;

use super::Moment;

/// Number of pauses that are remembered.
const RECENT: usize = 16;
/// A shorter gap is no pause: within a batch the next command may be on its way.
const SHORTEST: Duration = Duration::from_micros(20);
/// No arbiter waits for longer pauses: the device is returned without asking.
pub const LONGEST: Duration = Duration::from_millis(200);
/// What a pause may take longer than those that are remembered: a quarter, and the system's wake-ups.
const MARGIN: Duration = Duration::from_micros(100);
/// An application that has stayed away for longer than expected is trusted again after this many pauses in time.
const EARNS: u8 = 3;

/// When an application is expected back that has just finished a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// For how long it is away at most; [`LONGEST`] at most, and zero if it is not expected.
    pub within: Duration,
    /// For how long on average.
    pub usual: Duration,
    /// What it uses of the device between two pauses, on average.
    pub batch: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pause {
    away: Duration,
    /// The time of the device since the pause before.
    batch: Duration,
}

/// The pauses of an application.
#[derive(Clone, Debug, Default)]
pub struct Pauses {
    recent: [Pause; RECENT],
    count: usize,
    /// Since when it has been away.
    since: Option<Moment>,
    /// Time of the device at the end of the last pause that counts.
    busy: Duration,
    /// How many pauses in time it is from being trusted.
    owes: u8,
}

impl Pauses {
    /// Nothing is left to do at this moment. Said twice, the first counts.
    pub fn begin(&mut self, now: Moment) {
        self.since.get_or_insert(now);
    }

    /// Since when the application has been away, if it is.
    pub fn since(&self) -> Option<Moment> {
        self.since
    }

    /// There is something to do again. `busy` is the time of the device that the application has used
    /// in all.
    pub fn end(&mut self, busy: Duration, now: Moment) {
        let Some(since) = self.since.take() else {
            return;
        };
        let away = now.since(since);
        if away < SHORTEST {
            return;
        }
        // Nothing was expected of a newcomer.
        if self.count > 0 && away > self.bound() {
            self.owes = EARNS;
        } else {
            self.owes = self.owes.saturating_sub(1);
        }
        let batch = busy.saturating_sub(self.busy);
        self.busy = busy;
        self.recent[self.count % RECENT] = Pause { away, batch };
        // Only whether it has reached the length matters beyond that.
        self.count = match self.count + 1 {
            count if count >= RECENT * 2 => RECENT,
            count => count,
        };
    }

    fn known(&self) -> &[Pause] {
        &self.recent[..self.count.min(RECENT)]
    }

    /// What pauses of this application stay below, as far as is known: all but one in so many as are
    /// remembered, and a margin.
    fn bound(&self) -> Duration {
        let (mut longest, mut second) = (Duration::ZERO, Duration::ZERO);
        for pause in self.known() {
            if pause.away > longest {
                (longest, second) = (pause.away, longest);
            } else {
                second = second.max(pause.away);
            }
        }
        let usual = match self.count {
            ..RECENT => longest,
            _ => second,
        };
        usual.saturating_add(usual / 4).saturating_add(MARGIN)
    }

    /// When the application is expected back, if it is away now.
    pub fn expected(&self) -> Expected {
        let bound = self.bound();
        if self.owes > 0 || bound > LONGEST {
            return Expected::default();
        }
        let known = self.known();
        let count = known.len().max(1) as u32;
        let sum = |part: fn(&Pause) -> Duration| known.iter().map(part).sum::<Duration>() / count;
        Expected {
            within: bound,
            usual: sum(|pause| pause.away),
            batch: sum(|pause| pause.batch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    /// Lets an application use the device for a millisecond and stay away, so often.
    fn away(pauses: &mut Pauses, now: &mut Moment, times: u32, length: Duration) {
        for _ in 0..times {
            *now += MILLI;
            pauses.begin(*now);
            *now += length;
            // Each uses a millisecond more.
            let busy = pauses.busy + MILLI;
            pauses.end(busy, *now);
        }
    }

    #[test]
    fn who_comes_back_regularly_is_expected_a_little_later_than_its_longest_pauses() {
        let (mut pauses, mut now) = (Pauses::default(), Moment::START);
        away(&mut pauses, &mut now, 8, MILLI);
        away(&mut pauses, &mut now, 8, MILLI * 2);
        let expected = pauses.expected();
        assert_eq!(expected.within, MILLI * 5 / 2 + MARGIN);
        assert_eq!(expected.usual, MILLI * 3 / 2);
        assert_eq!(expected.batch, MILLI);
    }

    #[test]
    fn one_long_pause_costs_trust_until_some_were_in_time_and_changes_no_expectation() {
        let (mut pauses, mut now) = (Pauses::default(), Moment::START);
        away(&mut pauses, &mut now, 20, MILLI);
        let before = pauses.expected();
        away(&mut pauses, &mut now, 1, MILLI * 500);
        for _ in 0..EARNS {
            assert_eq!(pauses.expected(), Expected::default());
            away(&mut pauses, &mut now, 1, MILLI);
        }
        assert_eq!(pauses.expected().within, before.within);
    }

    #[test]
    fn who_stays_away_for_longer_than_anybody_is_waited_for_is_not_expected() {
        let (mut pauses, mut now) = (Pauses::default(), Moment::START);
        away(&mut pauses, &mut now, 40, LONGEST * 2);
        assert_eq!(pauses.expected(), Expected::default());
        // It becomes another program.
        away(&mut pauses, &mut now, 40, MILLI);
        assert!(pauses.expected().within < MILLI * 2);
    }

    #[test]
    fn gaps_within_a_batch_are_no_pauses() {
        let (mut pauses, mut now) = (Pauses::default(), Moment::START);
        for _ in 0..10 {
            away(&mut pauses, &mut now, 100, SHORTEST / 2);
            away(&mut pauses, &mut now, 1, MILLI);
        }
        assert_eq!(pauses.expected().usual, MILLI);
    }

    #[test]
    fn a_newcomer_is_waited_for_as_long_as_a_wakeup_takes() {
        let expected = Pauses::default().expected();
        assert_eq!((expected.within, expected.usual), (MARGIN, Duration::ZERO));
    }
}
