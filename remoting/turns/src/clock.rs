//! Time as schedulers see it: the system's, or a simulation's.

use std::{
    ops::{Add, AddAssign},
    time::Duration,
};

/// A point in time, in nanoseconds since a start that all compared moments share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

impl Moment {
    /// The start.
    pub const START: Self = Self(0);

    /// The moment this many nanoseconds after the start.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Now, by the system's monotonic clock: the same for all processes, and read without a system
    /// call.
    pub fn now() -> Self {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `time` outlives the call. This clock exists on every Linux.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        // Neither is negative.
        Self(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
    }

    /// Nanoseconds since the start.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this moment; zero if this one is earlier.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, later: Duration) -> Self {
        // 2^64 nanoseconds are 584 years.
        let later = u64::try_from(later.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(later))
    }
}

impl AddAssign<Duration> for Moment {
    fn add_assign(&mut self, later: Duration) {
        *self = *self + later;
    }
}
