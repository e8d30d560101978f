//! How long an application that has work waits until some of it is done: the time since it began to have work, or since its last
//! completion, at each completion.
//!
//! Times are counted by class: four classes for each doubling, from 4 us to 69 s.

use std::{
    array,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::Moment;

/// Number of classes. The last one has all longer times, too.
pub const CLASSES: usize = 92;
/// The shortest difference, in nanoseconds, as a power of two.
const UNIT: u32 = 12;

/// The class of a time.
fn class(time: Duration) -> usize {
    let units = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) >> UNIT;
    let class = match units.checked_ilog2() {
        Some(doublings @ 2..) => {
            let quarter = units >> (doublings - 2) & 3;
            4 * (u64::from(doublings) - 1) + quarter
        }
        _ => units,
    };
    (class as usize).min(CLASSES - 1)
}

/// The time that all of a class are shorter than.
///
/// # Panics
/// There is no such class.
pub fn bound(class: usize) -> Duration {
    assert!(class < CLASSES);
    let units = match class as u64 {
        few @ 0..4 => few + 1,
        class => (5 + class % 4) << (class / 4 - 1),
    };
    Duration::from_nanos(units << UNIT)
}

/// Number of waits by class.
#[derive(Debug)]
#[repr(transparent)]
pub struct Counts([AtomicU64; CLASSES]);

impl Default for Counts {
    fn default() -> Self {
        Self(array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counts {
    /// Counts a wait. Nobody else may count at the same time.
    pub fn count(&self, time: Duration) {
        let count = &self.0[class(time)];
        count.store(
            count.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
    }

    /// All numbers.
    pub fn read(&self) -> [u64; CLASSES] {
        array::from_fn(|class| self.0[class].load(Ordering::Relaxed))
    }
}

/// Since when an application waits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waiting(Option<Moment>);

impl Waiting {
    /// It has work.
    pub fn begin(&mut self, now: Moment) {
        self.0.get_or_insert(now);
    }

    /// Some of it is done, and this is left. Returns for how long it has waited.
    pub fn end(&mut self, left: bool, now: Moment) -> Option<Duration> {
        let waited = self.0.map(|since| now.since(since));
        self.0 = left.then_some(now);
        waited
    }

    /// A call has submitted nothing, and nothing else is outstanding.
    pub fn forget(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_below_the_bound_of_its_class_and_not_below_that_of_the_one_before() {
        let mut time = 0;
        while time < 68_000_000_000 {
            let one = class(Duration::from_nanos(time));
            assert!(time < bound(one).as_nanos() as u64, "{time}");
            if let Some(before) = one.checked_sub(1) {
                assert!(time >= bound(before).as_nanos() as u64, "{time}");
            }
            time += 1 + time / 100;
        }
        assert_eq!(class(Duration::MAX), CLASSES - 1);
    }

    #[test]
    fn who_always_has_work_waits_from_one_completion_to_the_next() {
        let at = Moment::from_nanos;
        let mut waiting = Waiting::default();
        assert_eq!(waiting.end(false, at(1)), None);
        waiting.begin(at(10));
        waiting.begin(at(20));
        assert_eq!(waiting.end(true, at(50)), Some(Duration::from_nanos(40)));
        waiting.begin(at(60));
        assert_eq!(waiting.end(false, at(70)), Some(Duration::from_nanos(20)));
        waiting.begin(at(100));
        waiting.forget();
        waiting.begin(at(130));
        assert_eq!(waiting.end(false, at(135)), Some(Duration::from_nanos(5)));
    }
}
