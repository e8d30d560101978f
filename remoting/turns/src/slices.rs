//! Time slices of a worker's contexts, as the arbiter says.

use std::{sync::atomic::Ordering, time::Duration};

use super::{Moment, page::sight, presence::Presence, session::Session};

/// The length of slices that the driver sets by itself.
pub const DRIVERS_SLICE: Duration = Duration::from_micros(2048);
/// How often to look while stopped: whether the stop is to go on, and whether it has ended by itself.
const STOPPED: Duration = Duration::from_millis(20);
/// How often if contexts could not be stopped: a call that waits for them is in progress, or one was just made.
const UNSTOPPED: Duration = Duration::from_millis(2);
/// How often to look otherwise: whether there are new contexts.
const RUNNING: Duration = Duration::from_millis(50);
/// How often to report use where it is read from a record of the device's, while this client and others use it.
const METERED: Duration = Duration::from_millis(10);

/// What this process's contexts have had of the device, by a record of the device's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// In all, without what they have had while nobody else used the device.
    pub total: Duration,
    /// Whether nobody else uses it now.
    pub alone: bool,
}

/// For how long this process's contexts have had work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worked {
    /// Whoever submits knows.
    Known,
    /// So long, by the device's record, while others used the device, too. Waiting for them counts as having work.
    Recorded(Duration),
}

/// Sets the time slices of this process's contexts, and stops them.
pub trait Slices: Send {
    /// Whether what the following functions do has any effect, as far as is known. If not, the process takes no part.
    fn works(&mut self) -> bool {
        true
    }
    /// Slices last so long from now on, those of contexts that were made since the last call, too. Nothing is done for
    /// contexts whose slices are right.
    fn set(&mut self, slice: Duration);
    /// Takes all contexts off the device. Returns whether all are.
    fn stop(&mut self) -> bool;
    /// They stay stopped. Returns whether all still are; otherwise none is.
    fn keep(&mut self) -> bool;
    /// They continue.
    fn start(&mut self);
    /// What they have used; `None` if the device keeps no record of that. `round` is the sum of the others' slices.
    fn used(&mut self, round: Duration) -> Option<Use>;
    /// For how long they have had work until [`Self::used`] was called last. `stopped` tells whether they are stopped.
    fn worked(&mut self, stopped: bool, round: Duration) -> Worked {
        let _ = (stopped, round);
        Worked::Known
    }
    /// Nobody asks for that for now.
    fn end_use(&mut self);
    /// The GPUs on which there are contexts, as bits, by the driver's number.
    fn gpus(&self) -> u64;
}

/// The slices of this process, and what they are.
pub(super) struct Sliced {
    slices: Box<dyn Slices>,
    stopped: bool,
    /// Whether slices were set that are not the driver's.
    set: bool,
    /// The number of completed requests at the last look.
    completions: u64,
    recorded: Recorded,
}

/// Work that is known from the device's record only, as the arbiter is told: between two looks, it goes on as it was before.
#[derive(Debug, Default)]
struct Recorded {
    /// What the arbiter is told.
    presence: Presence,
    /// The last look, what was recorded until then, and what the arbiter was told.
    last: Option<(Moment, Duration, Duration)>,
    /// By how many seconds the arbiter was told more than was recorded.
    ahead: f64,
}

impl Recorded {
    /// More is not made up for, in seconds.
    const MOST_AHEAD: f64 = 0.05;
    /// Who has had work for more than this part of the time has it until the next look.
    const ALWAYS: f64 = 0.9;

    /// This was recorded until now, and `next` is the time until the next look. Returns whether there was any work.
    fn look(&mut self, worked: Duration, next: Duration, now: Moment) -> bool {
        let told = self.presence.total(now);
        let (mut part, mut any) = (0.0, false);
        if let Some((before, then, told_then)) = self.last {
            let time = now.since(before).as_secs_f64();
            let done = worked.as_secs_f64() - then.as_secs_f64();
            part = (done / time.max(1e-6)).clamp(0.0, 1.0);
            any = done > 0.0;
            let ahead = self.ahead + told.saturating_sub(told_then).as_secs_f64() - done;
            self.ahead = ahead.clamp(-Self::MOST_AHEAD, Self::MOST_AHEAD);
        }
        self.last = Some((now, worked, told));
        let next = next.as_secs_f64();
        let goes_on = match part > Self::ALWAYS && self.ahead < next {
            // The next look may be late.
            true => 2.0 * next,
            false => (part * next - self.ahead).clamp(0.0, next),
        };
        self.presence = Presence {
            before: told,
            since: now,
            until: now + Duration::from_secs_f64(goes_on),
        };
        any
    }

    /// Nobody looks for a while.
    fn rest(&mut self, now: Moment) {
        let before = self.presence.total(now);
        self.presence = Presence {
            before,
            since: now,
            until: now,
        };
        (self.last, self.ahead) = (None, 0.0);
    }

    fn publish(&self, session: &Session) {
        let (account, presence) = (session.account(), self.presence);
        for (place, value) in [
            (&account.present, presence.before.as_nanos() as u64),
            (&account.present_since, presence.since.nanos()),
            (&account.present_until, presence.until.nanos()),
        ] {
            place.store(value, Ordering::Relaxed);
        }
    }
}

impl Sliced {
    pub(super) fn new(slices: Box<dyn Slices>) -> Self {
        Self {
            slices,
            stopped: false,
            set: false,
            completions: 0,
            recorded: Recorded::default(),
        }
    }

    /// Does what the arbiter says now, and reports it. Returns after which time to look again; `None`: when the arbiter
    /// says something.
    pub(super) fn obey(&mut self, session: &Session) -> Option<Duration> {
        let (grant, account) = (session.grant(), session.account());
        let works = self.slices.works();
        if !works || !grant.mode().is_slices() {
            self.release();
            account.stopped.store(0, Ordering::Relaxed);
            account.is_metered.store(0, Ordering::Relaxed);
            if !works {
                account.sight.store(sight::NOTHING, Ordering::Relaxed);
            } else if let Worked::Recorded(_) = self.slices.worked(false, Duration::ZERO) {
                account.sight.store(sight::RECORD, Ordering::Relaxed);
            }
            if account.sight.load(Ordering::Relaxed) != sight::REQUESTS {
                self.recorded.rest(Moment::now());
                self.recorded.publish(session);
            }
            let gpus = if works { self.slices.gpus() } else { 0 };
            account.gpus.store(gpus, Ordering::Relaxed);
            // Those with contexts on several GPUs keep everybody in turns, and those that take no turns are shown once they have
            // contexts.
            let is_beside = account.sight.load(Ordering::Relaxed) == sight::RECORD;
            return (gpus.count_ones() > 1 || is_beside).then_some(RUNNING);
        }
        let begin = Moment::now();
        let until = Moment::from_nanos(grant.stopped_until.load(Ordering::Acquire));
        match (until > begin, self.stopped) {
            (true, true) => self.stopped = self.slices.keep(),
            (true, false) => self.stopped = self.slices.stop(),
            (false, _) => self.start(),
        }
        let micros = grant.time_slice.load(Ordering::Relaxed);
        if micros != 0 {
            self.set = true;
            self.slices.set(Duration::from_micros(micros.into()));
        }
        let took = Moment::now().since(begin).as_nanos() as u64;
        account.switching.fetch_add(took, Ordering::Relaxed);
        account
            .stopped
            .store(self.stopped.into(), Ordering::Relaxed);
        account.gpus.store(self.slices.gpus(), Ordering::Relaxed);
        let round = match grant.round.load(Ordering::Relaxed) {
            0 => DRIVERS_SLICE,
            micros => Duration::from_micros(micros.into()),
        };
        let is_metered = match self.slices.used(round) {
            Some(used) => {
                let total = used.total.as_nanos() as u64;
                account.metered.store(total, Ordering::Relaxed);
                !used.alone
            }
            None => false,
        };
        account
            .is_metered
            .store(is_metered.into(), Ordering::Release);
        let again = |has_work: bool| match until > begin {
            true if self.stopped => STOPPED,
            true => UNSTOPPED,
            false if is_metered && has_work => METERED,
            false => RUNNING,
        };
        Some(match self.slices.worked(self.stopped, round) {
            Worked::Known => {
                let completions = account.completions.load(Ordering::Relaxed);
                let before = std::mem::replace(&mut self.completions, completions);
                let outstanding = account.oldest_since.load(Ordering::Relaxed) != 0;
                again(before != completions || outstanding)
            }
            Worked::Recorded(worked) => {
                account.sight.store(sight::RECORD, Ordering::Relaxed);
                // As often as it matters while others use the device.
                let next = again(true);
                let any = self.recorded.look(worked, next, Moment::now());
                self.recorded.publish(session);
                again(any)
            }
        })
    }

    fn start(&mut self) {
        if std::mem::take(&mut self.stopped) {
            self.slices.start();
        }
    }

    /// Starts what is stopped, gives slices the driver's length, and reads no record.
    pub(super) fn release(&mut self) {
        self.slices.end_use();
        self.start();
        if std::mem::take(&mut self.set) {
            self.slices.set(DRIVERS_SLICE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(10);

    /// Looks at work that is recorded so long in each of these looks; returns what the arbiter is told in all.
    fn told(recorded: impl IntoIterator<Item = u64>) -> Duration {
        let (mut now, mut worked) = (Moment::START, Duration::ZERO);
        let mut told = Recorded::default();
        told.look(worked, LOOK, now);
        for millis in recorded {
            now += LOOK;
            worked += Duration::from_millis(millis);
            told.look(worked, LOOK, now);
        }
        // What is not known yet is not told.
        told.presence.total(now)
    }

    #[test]
    fn the_arbiter_is_told_as_much_work_as_is_recorded_in_the_long_run() {
        // Always; never; half of the time; by turns, as steps that are longer than a look.
        for (recorded, part) in [
            ([10, 10], 1.0),
            ([0, 0], 0.0),
            ([5, 5], 0.5),
            ([10, 0], 0.5),
            ([10, 9], 0.95),
        ] {
            let told = told(recorded.into_iter().cycle().take(100));
            let expected = Duration::from_secs(1).mul_f64(part);
            assert!(
                told.abs_diff(expected) <= LOOK * 2,
                "{recorded:?}: {told:?}"
            );
        }
    }

    #[test]
    fn what_turns_out_not_to_have_been_work_is_taken_back_and_the_total_never_falls() {
        let (mut now, mut told) = (Moment::START, Recorded::default());
        let mut last = Duration::ZERO;
        for worked in [0, 10, 20, 17, 17, 17, 17] {
            told.look(Duration::from_millis(worked), LOOK, now);
            assert!(told.presence.total(now) >= last);
            last = told.presence.total(now);
            now += LOOK;
        }
        // Twenty were told by then.
        assert!(told.ahead > 0.0 && told.ahead < 0.011, "{}", told.ahead);
        assert_eq!(told.presence.total(now), last);
    }

    #[test]
    fn work_before_a_pause_of_looks_is_not_of_the_time_after_it() {
        let mut told = Recorded::default();
        told.look(Duration::ZERO, LOOK, Moment::START);
        told.look(LOOK, LOOK, Moment::START + LOOK);
        told.rest(Moment::START + LOOK);
        let later = Moment::START + LOOK * 100;
        assert!(!told.look(LOOK * 50, LOOK, later));
        assert_eq!(told.presence.total(later + LOOK), Duration::ZERO);
    }
}
