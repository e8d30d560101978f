//! How much a worker submits in its turn.
//!
//! On a device that cannot be preempted, whoever submits all its work keeps the device until all of it is done. FairGV
//! (section 3.3) measures the first requests of a turn one by one, predicts how many fill the rest of it, and submits
//! those. The meter does the same, with two changes: it distinguishes requests by [`RequestClass`] (which kernel, how
//! many work items), and it keeps what it has learnt over turns until a request takes much longer than predicted. Turns
//! then begin without a measuring phase, during which the device would idle between requests.
//!
//! The caller tells the meter what happens and when. The meter reads no clock and calls no driver.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use remoting_proto::wire::api::RequestClass;

use super::Moment;

/// Number of requests of a class that are measured one by one before they are predicted.
pub const SAMPLES: u32 = 5;
/// Maximum number of requests that the driver has at a time. It is enough to hide the latency of the device, and bounds
/// the gain of a client whose kernels suddenly take longer than predicted.
pub const DEPTH: usize = 16;
/// A request that takes this many times longer than predicted has its class measured again.
const SURPRISE: u32 = 4;
/// How much longer the first request of a turn may take than others of its class: a GPU needs time to switch from one
/// process to another (150 us on an H200), and may still execute earlier work.
const START: Duration = Duration::from_millis(2);
/// Maximum number of known classes: bounds the memory that a client can make the meter use.
const CLASSES: usize = 1024;

/// The extent of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// One request, to its completion.
    Request,
    /// Requests for this long, and until the last one has completed.
    Time(Duration),
}

/// The decision about the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Submit it.
    Submit,
    /// Keep it until a request has completed.
    Wait,
    /// Keep it for another turn: what is outstanding fills this one.
    Filled,
    /// Nothing is outstanding, and the turn is over.
    Over,
}

/// How long requests of a class take.
#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    mean: Duration,
    /// Mean deviation from the mean.
    spread: Duration,
    samples: u32,
}

impl Estimate {
    fn known(self) -> Option<Duration> {
        (self.samples >= SAMPLES).then_some(self.mean)
    }

    fn learn(&mut self, took: Duration) {
        if self.known().is_some_and(|mean| took > mean * SURPRISE) {
            *self = Self::default();
        }
        // A mean of the samples at first, then an exponentially weighted one.
        let share = if self.samples < SAMPLES {
            self.samples + 1
        } else {
            8
        };
        if self.samples > 0 {
            self.spread = (self.spread * (share - 1) + took.abs_diff(self.mean)) / share;
        }
        self.mean = (self.mean * (share - 1) + took) / share;
        self.samples = (self.samples + 1).min(SAMPLES);
    }
}

/// A request that was submitted.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    kind: RequestClass,
    submitted: Moment,
    expected: Duration,
    spread: Duration,
    /// Whether it was the first of its turn.
    first: bool,
}

/// Measures a worker's requests and decides how many to submit.
#[derive(Debug)]
pub struct Meter {
    estimates: HashMap<RequestClass, Estimate>,
    slice: Slice,
    begun: Moment,
    submitted: u64,
    outstanding: VecDeque<Outstanding>,
    /// Expected total time of the outstanding requests.
    expected: Duration,
    /// The expected deviation from that.
    spread: Duration,
    /// Whether an outstanding request is of a class that is not known yet.
    sampling: bool,
    /// When a request last completed, or when the turn began.
    completed: Moment,
    /// Total time of all completed requests.
    busy: Duration,
}

impl Default for Meter {
    fn default() -> Self {
        Self {
            estimates: HashMap::new(),
            slice: Slice::Request,
            begun: Moment::START,
            submitted: 0,
            outstanding: VecDeque::new(),
            expected: Duration::ZERO,
            spread: Duration::ZERO,
            sampling: false,
            completed: Moment::START,
            busy: Duration::ZERO,
        }
    }
}

impl Meter {
    /// Begins a turn.
    pub fn begin(&mut self, slice: Slice, now: Moment) {
        self.slice = slice;
        self.begun = now;
        self.submitted = 0;
        self.completed = now;
    }

    /// Decides about a request of this class. While nobody else wants the device (`alone`), the turn restarts each
    /// time; outstanding work is still limited to one slice, so that a newcomer waits no longer than that.
    pub fn verdict(&mut self, kind: RequestClass, alone: bool, now: Moment) -> Verdict {
        let idle = self.outstanding.is_empty();
        if alone {
            self.begun = now;
            if idle {
                self.submitted = 0;
            }
        }
        let length = match self.slice {
            Slice::Time(length) => length,
            Slice::Request if self.submitted == 0 => return Verdict::Submit,
            Slice::Request if idle => return Verdict::Over,
            Slice::Request => return Verdict::Wait,
        };
        if self.submitted == 0 && idle {
            return Verdict::Submit;
        }
        let estimate = self
            .estimates
            .get(&kind)
            .and_then(|estimate| estimate.known());
        // When the outstanding work is expected to be done.
        let done = self.expected_end().unwrap_or(now).max(now);
        // A request that is expected to end less than half of its time beyond the turn still belongs to it, so that
        // turns have the right length on average.
        let after = done.since(self.begun) + estimate.unwrap_or_default() / 2;
        match estimate {
            _ if after >= length && idle => Verdict::Over,
            _ if after >= length && self.sampling => Verdict::Wait,
            _ if after >= length => Verdict::Filled,
            _ if idle => Verdict::Submit,
            Some(_) if !self.sampling && self.outstanding.len() < DEPTH => Verdict::Submit,
            _ => Verdict::Wait,
        }
    }

    /// Records that a request was submitted.
    pub fn submitted(&mut self, kind: RequestClass, now: Moment) {
        if self.estimates.len() >= CLASSES && !self.estimates.contains_key(&kind) {
            self.estimates.clear();
        }
        let estimate = *self.estimates.entry(kind).or_default();
        let (known, spread) = (estimate.known(), estimate.spread);
        let expected = known.unwrap_or_default();
        self.sampling |= known.is_none();
        self.spread += spread;
        let first = self.submitted == 0;
        self.submitted += 1;
        self.expected += expected;
        self.outstanding.push_back(Outstanding {
            kind,
            submitted: now,
            expected,
            spread,
            first,
        });
    }

    /// Records that the oldest outstanding request has completed.
    pub fn completed(&mut self, now: Moment) {
        self.completed_behind(0, now);
    }

    /// Records that the outstanding request with `older` older ones before it has completed.
    pub fn completed_behind(&mut self, older: usize, now: Moment) {
        let Some(request) = self.outstanding.remove(older) else {
            return;
        };
        let took = now.since(self.completed.max(request.submitted));
        self.busy += took;
        let estimate = self.estimates.entry(request.kind).or_default();
        let known = estimate.known().filter(|_| request.first);
        if known.is_none_or(|mean| took < mean || took > mean + START) {
            estimate.learn(took);
        }
        self.completed = now;
        self.expected = self.expected.saturating_sub(request.expected);
        self.spread = self.spread.saturating_sub(request.spread);
        if self.outstanding.is_empty() {
            self.sampling = false;
        }
    }

    /// Records that the `count` oldest outstanding requests have completed since the last look. Each is assumed to have
    /// taken an equal part of the time; attributing all of it to the first would make its class seem to change.
    pub fn completed_together(&mut self, count: u32, now: Moment) {
        let start = self.running_since().unwrap_or(now);
        let all = now.since(start);
        for done in 1..=count {
            self.completed(start + all * done / count);
        }
    }

    /// When the outstanding work is expected to be done. Requests of unknown classes count as zero.
    pub fn expected_end(&self) -> Option<Moment> {
        Some(self.running_since()? + self.expected)
    }

    /// Whether the outstanding work is expected to end within `soon` before or after `now`, as far as the spread of
    /// these classes allows a prediction.
    pub fn ends_within(&self, soon: Duration, now: Moment) -> bool {
        self.spread <= soon
            && self
                .expected_end()
                .is_some_and(|end| end.since(now) <= soon && now.since(end) <= soon)
    }

    /// Whether the turn's time is over.
    pub fn is_over(&self, now: Moment) -> bool {
        match self.slice {
            Slice::Time(length) => now.since(self.begun) >= length,
            Slice::Request => self.submitted > 0,
        }
    }

    /// Number of requests that the driver has.
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// How long the device has been busy with requests that have completed, over all turns.
    pub fn busy(&self) -> Duration {
        self.busy
    }

    /// The same with what the oldest outstanding request has had of the device by now.
    pub fn busy_until(&self, now: Moment) -> Duration {
        let since = self.running_since();
        self.busy + since.map_or(Duration::ZERO, |since| now.since(since))
    }

    /// Since when nothing has been outstanding.
    pub fn idle_since(&self) -> Option<Moment> {
        self.outstanding.is_empty().then_some(self.completed)
    }

    /// Since when the oldest outstanding request has had the device.
    pub fn running_since(&self) -> Option<Moment> {
        self.outstanding
            .front()
            .map(|request| request.submitted.max(self.completed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: Slice = Slice::Time(Duration::from_millis(6));

    /// Plays one turn against a device that takes `length` per request; how many it took, and
    /// when it ended.
    fn turn(meter: &mut Meter, length: Duration, start: Moment) -> (u64, Moment) {
        let mut now = start;
        let mut free = start;
        let mut ends = VecDeque::new();
        let mut count = 0;
        meter.begin(SLICE, now);
        loop {
            match meter.verdict(RequestClass(0), false, now) {
                Verdict::Submit => {
                    meter.submitted(RequestClass(0), now);
                    free = free.max(now) + length;
                    ends.push_back(free);
                    count += 1;
                }
                Verdict::Wait | Verdict::Filled => {
                    now = ends.pop_front().unwrap();
                    meter.completed(now);
                }
                Verdict::Over => return (count, now),
            }
        }
    }

    #[test]
    fn requests_of_an_unknown_kind_are_measured_one_by_one() {
        let mut meter = Meter::default();
        meter.begin(SLICE, Moment::START);
        let mut now = Moment::START;
        for _ in 0..SAMPLES {
            assert_eq!(meter.verdict(RequestClass(1), false, now), Verdict::Submit);
            meter.submitted(RequestClass(1), now);
            assert_eq!(meter.verdict(RequestClass(1), false, now), Verdict::Wait);
            now += Duration::from_micros(100);
            meter.completed(now);
        }
        meter.submitted(RequestClass(1), now);
        assert_eq!(meter.verdict(RequestClass(1), false, now), Verdict::Submit);
        assert_eq!(meter.verdict(RequestClass(2), false, now), Verdict::Wait);
    }

    #[test]
    fn a_turn_is_filled_and_not_exceeded_whatever_the_requests_length() {
        for micros in [20, 100, 400, 1_700] {
            let mut meter = Meter::default();
            let length = Duration::from_micros(micros);
            let (_, second) = turn(&mut meter, length, Moment::START);
            let (count, end) = turn(&mut meter, length, second);
            let took = end.since(second);
            assert_eq!(took, length * count as u32, "the device was idle");
            let off = took.abs_diff(Duration::from_millis(6));
            assert!(off <= length, "{micros}: {took:?}");
        }
    }

    #[test]
    fn a_request_longer_than_the_turn_is_the_only_one() {
        let mut meter = Meter::default();
        for _ in 0..7 {
            let (count, _) = turn(&mut meter, Duration::from_millis(100), Moment::START);
            assert_eq!(count, 1);
        }
    }

    #[test]
    fn requests_that_grow_suddenly_exceed_the_turn_by_no_more_than_the_depth() {
        let mut meter = Meter::default();
        turn(&mut meter, Duration::from_micros(20), Moment::START);
        let (count, _) = turn(&mut meter, Duration::from_millis(100), Moment::START);
        assert!(count <= DEPTH as u64, "{count}");
        let (count, _) = turn(&mut meter, Duration::from_millis(100), Moment::START);
        assert_eq!(count, 1, "the surprise was not remembered");
    }

    #[test]
    fn who_is_alone_goes_on_with_at_most_a_slice_outstanding() {
        let mut meter = Meter::default();
        turn(&mut meter, Duration::from_millis(4), Moment::START);
        turn(&mut meter, Duration::from_millis(4), Moment::START);
        turn(&mut meter, Duration::from_millis(4), Moment::START);
        let late = Moment::START + Duration::from_secs(9);
        assert_eq!(meter.verdict(RequestClass(0), true, late), Verdict::Submit);
        meter.submitted(RequestClass(0), late);
        meter.submitted(RequestClass(0), late);
        assert_eq!(meter.verdict(RequestClass(0), true, late), Verdict::Filled);
    }

    #[test]
    fn the_end_of_requests_is_foreseen_if_they_take_equally_long() {
        let (mut meter, mut now) = (Meter::default(), Moment::START);
        let micros = Duration::from_micros;
        for round in 0..40 {
            for (kind, length) in [(1, 1_000), (2, 200 + round % 2 * 20_000)] {
                meter.begin(SLICE, now);
                meter.submitted(RequestClass(kind), now);
                now += micros(length);
                meter.completed(now);
            }
        }
        let mut foreseen = |kind, after| {
            meter.begin(SLICE, now);
            meter.submitted(RequestClass(kind), now);
            now += after;
            let soon = meter.ends_within(micros(300), now);
            now += micros(1_000);
            meter.completed(now);
            soon
        };
        assert!(!foreseen(1, micros(600)));
        assert!(foreseen(1, micros(800)));
        assert!((0..40).all(|step| !foreseen(2, micros(500) * step)));
    }

    #[test]
    fn the_first_request_of_a_turn_may_be_late_without_being_a_surprise() {
        let (mut meter, mut now) = (Meter::default(), Moment::START);
        let length = Duration::from_micros(20);
        let (_, end) = turn(&mut meter, length, now);
        now = end;
        meter.begin(SLICE, now);
        meter.submitted(RequestClass(0), now);
        now += length * 10;
        meter.completed(now);
        meter.submitted(RequestClass(0), now);
        // Still known: more than one at a time.
        assert_eq!(meter.verdict(RequestClass(0), false, now), Verdict::Submit);
    }

    #[test]
    fn many_kinds_take_bounded_memory() {
        let mut meter = Meter::default();
        for number in 0..10_000 {
            meter.submitted(RequestClass(number), Moment::START);
            meter.completed(Moment::START);
        }
        assert!(meter.estimates.len() <= CLASSES);
    }

    #[test]
    fn requests_that_are_seen_to_end_together_share_the_time() {
        let (mut meter, mut now) = (Meter::default(), Moment::START);
        let length = Duration::from_millis(1);
        for _ in 0..SAMPLES {
            meter.begin(SLICE, now);
            meter.submitted(RequestClass(0), now);
            now += length;
            meter.completed_together(1, now);
        }
        meter.begin(SLICE, now);
        for _ in 0..5 {
            assert_eq!(meter.verdict(RequestClass(0), false, now), Verdict::Submit);
            meter.submitted(RequestClass(0), now);
        }
        now += length * 5;
        meter.completed_together(5, now);
        assert_eq!(meter.outstanding(), 0);
        assert_eq!(meter.busy(), length * (SAMPLES + 5));
        // They are still known: it is not one at a time.
        meter.begin(SLICE, now);
        meter.submitted(RequestClass(0), now);
        assert_eq!(meter.verdict(RequestClass(0), false, now), Verdict::Submit);
    }
}
