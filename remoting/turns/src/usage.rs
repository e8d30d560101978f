//! How long requests use a device that serves several processes in time slices.
//!
//! The time between the ends of two requests is the length of the second one, if the first was before it in the device
//! all the time, and nobody else's slice came in between. Others interrupt few of the requests that are shorter than a
//! slice. So the length of a class of requests is a low quantile of these times, and an interrupted request counts as if it
//! were a usual one. Requests that are longer than a slice are always interrupted: they are not measured, and the arbiter
//! charges their client for the time that nobody else accounts for.
//!
//! The caller tells what happens and when; this reads no clock.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use remoting_proto::wire::api::RequestClass;

use super::Moment;

/// Maximum number of known classes: bounds the memory that a client can make this use.
const CLASSES: usize = 4096;
/// By how much of itself a length grows after a longer time and shrinks after a shorter one at most: three to one, so that it
/// stays near the time that one in four is below.
const GROWS: f64 = 0.02;
const SHRINKS: f64 = 0.06;
/// A request that took more than twice its usual length and this was interrupted.
const JITTER: f64 = 20e-6;

/// The length of a class, in seconds.
#[derive(Clone, Copy, Debug)]
struct Length {
    seconds: f64,
    /// Whether it was measured between the ends of two requests, and not from the submission on.
    exact: bool,
}

#[derive(Clone, Copy, Debug)]
struct Outstanding {
    class: RequestClass,
    submitted: Moment,
    /// Whether it was submitted while an older one was outstanding.
    follows: bool,
}

/// What a worker's requests have used.
#[derive(Debug, Default)]
pub struct Usage {
    lengths: HashMap<RequestClass, Length>,
    outstanding: VecDeque<Outstanding>,
    /// Since when the oldest outstanding request has been the oldest.
    oldest: Moment,
    used: Duration,
}

impl Usage {
    /// A request was submitted.
    pub fn submitted(&mut self, class: RequestClass, now: Moment) {
        let follows = !self.outstanding.is_empty();
        if !follows {
            self.oldest = now;
        }
        self.outstanding.push_back(Outstanding {
            class,
            submitted: now,
            follows,
        });
    }

    /// The oldest request has completed. `span` is the time since the end of the one before it by the device's clock, if
    /// that is known, and `slice` the length of a time slice.
    pub fn completed(&mut self, span: Option<Duration>, slice: Duration, now: Moment) {
        let Some(request) = self.outstanding.pop_front() else {
            return;
        };
        let took = match span.filter(|_| request.follows) {
            Some(span) => {
                self.learn(request.class, span.as_secs_f64(), true);
                span
            }
            None => {
                let took = now.since(self.oldest.max(request.submitted));
                self.learn(request.class, took.as_secs_f64(), false);
                took
            }
        };
        self.oldest = now;
        let seconds = self.length(request.class).unwrap_or_default();
        if seconds > slice.as_secs_f64() {
            return;
        }
        let took = took.as_secs_f64();
        let used = match took > seconds * 2.0 + JITTER {
            true => seconds,
            false => took,
        };
        self.used += Duration::from_secs_f64(used);
    }

    /// The request with so many older ones before it has completed. It counts as a usual one.
    pub fn completed_behind(&mut self, older: usize, slice: Duration) {
        if let Some(request) = self.outstanding.remove(older)
            && let Some(seconds) = self.length(request.class)
            && seconds <= slice.as_secs_f64()
        {
            self.used += Duration::from_secs_f64(seconds);
        }
    }

    fn learn(&mut self, class: RequestClass, seconds: f64, exact: bool) {
        if self.lengths.len() >= CLASSES && !self.lengths.contains_key(&class) {
            self.lengths.clear();
        }
        let new = Length { seconds, exact };
        let length = self.lengths.entry(class).or_insert(new);
        match (length.exact, exact) {
            (false, true) => *length = new,
            (true, false) => {}
            _ if seconds < length.seconds => {
                length.seconds -= (length.seconds - seconds).min(length.seconds * SHRINKS);
            }
            _ => length.seconds += (seconds - length.seconds).min(length.seconds * GROWS),
        }
    }

    fn length(&self, class: RequestClass) -> Option<f64> {
        self.lengths.get(&class).map(|length| length.seconds)
    }

    /// Number of requests that have not completed.
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// What requests that are shorter than a slice have used so far.
    pub fn used(&self) -> Duration {
        self.used
    }

    /// Since when the oldest outstanding request has been the oldest, and whether it is longer than a slice.
    pub fn oldest(&self, slice: Duration) -> Option<(Moment, bool)> {
        let request = self.outstanding.front()?;
        let length = self.length(request.class);
        let long = length.is_some_and(|seconds| seconds > slice.as_secs_f64());
        Some((self.oldest, long))
    }

    /// The number of the outstanding request that ends about so long from now, or the last one's.
    pub fn ending_after(&self, time: Duration) -> Option<usize> {
        let mut left = time.as_secs_f64();
        let reached = self.outstanding.iter().position(|request| {
            left -= self.length(request.class).unwrap_or_default();
            left <= 0.0
        });
        reached.or(self.outstanding.len().checked_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASS: RequestClass = RequestClass(1);
    const SLICE: Duration = Duration::from_millis(2);

    fn micros(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    /// Submits requests together, which take so long by the device's clock; all are seen when the last has ended.
    fn batch(usage: &mut Usage, spans: &[Duration], now: &mut Moment) {
        for _ in spans {
            usage.submitted(CLASS, *now);
        }
        *now += spans.iter().sum();
        for span in spans {
            usage.completed(Some(*span), SLICE, *now);
        }
    }

    #[test]
    fn uninterrupted_requests_use_what_they_take() {
        let (mut usage, mut now) = (Usage::default(), Moment::START);
        batch(&mut usage, &[micros(70); 25], &mut now);
        let before = usage.used();
        batch(&mut usage, &[micros(70); 25], &mut now);
        assert_eq!(usage.used() - before, micros(70 * 25));
    }

    #[test]
    fn others_slices_are_not_its_use() {
        let (mut usage, mut now) = (Usage::default(), Moment::START);
        let mut spans = [micros(70); 25];
        spans[12] += micros(3000);
        for _ in 0..10 {
            batch(&mut usage, &spans, &mut now);
        }
        let before = usage.used();
        batch(&mut usage, &spans, &mut now);
        let used = (usage.used() - before).as_secs_f64() / micros(70 * 25).as_secs_f64();
        assert!((0.95..1.05).contains(&used), "{used}");
    }

    #[test]
    fn a_request_that_was_interrupted_at_first_is_known_soon() {
        let (mut usage, mut now) = (Usage::default(), Moment::START);
        batch(&mut usage, &[micros(70), micros(3000)], &mut now);
        assert!(usage.oldest(SLICE).is_none());
        for _ in 0..5 {
            batch(&mut usage, &[micros(70); 25], &mut now);
        }
        let before = usage.used();
        batch(&mut usage, &[micros(70); 25], &mut now);
        let used = (usage.used() - before).as_secs_f64() / micros(70 * 25).as_secs_f64();
        assert!((0.95..1.1).contains(&used), "{used}");
    }

    #[test]
    fn requests_longer_than_a_slice_are_not_measured() {
        let (mut usage, mut now) = (Usage::default(), Moment::START);
        for _ in 0..5 {
            usage.submitted(CLASS, now);
            now += SLICE * 10;
            usage.completed(None, SLICE, now);
        }
        let before = usage.used();
        usage.submitted(CLASS, now);
        assert_eq!(usage.oldest(SLICE), Some((now, true)));
        now += SLICE * 10;
        usage.completed(None, SLICE, now);
        assert_eq!(usage.used(), before);
    }

    #[test]
    fn the_next_look_is_when_enough_has_ended() {
        let (mut usage, mut now) = (Usage::default(), Moment::START);
        assert_eq!(usage.ending_after(SLICE), None);
        batch(&mut usage, &[micros(500); 4], &mut now);
        for _ in 0..8 {
            usage.submitted(CLASS, now);
        }
        let at = usage.ending_after(SLICE).unwrap();
        assert!((3..=4).contains(&at), "{at}");
        assert_eq!(usage.ending_after(SLICE * 100), Some(7));
    }

    #[test]
    fn many_classes_take_bounded_memory() {
        let mut usage = Usage::default();
        for number in 0..10_000 {
            usage.submitted(RequestClass(number), Moment::START);
            usage.completed(None, SLICE, Moment::START);
        }
        assert!(usage.lengths.len() <= CLASSES);
    }
}
