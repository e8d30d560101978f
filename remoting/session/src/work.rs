//! Whether a worker is at work on a state that it makes: one whose driver hangs has no processor time.

use std::time::{Duration, Instant};

use remoting_proto::wire::messages::WORKS;
use remoting_transport::endpoint::Gone;

use super::{backend::Backend, server::Session};

/// How often who waits for a state is told that it is being made.
pub const TOLD: Duration = Duration::from_secs(1);
/// The part of that time for which the worker has to have had a processor: threads that look for something now and then
/// have less.
pub const BUSY: u32 = 100;

/// What this process and those that it has started and waited for have had.
pub fn processor_time() -> Duration {
    let of = |which| {
        // SAFETY: all zeroes are a valid value, which outlives the call.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(which, &raw mut usage);
            usage
        };
        let [user, system] = [usage.ru_utime, usage.ru_stime].map(|time| {
            // Neither is negative.
            Duration::from_secs(time.tv_sec.unsigned_abs())
                + Duration::from_micros(time.tv_usec.unsigned_abs())
        });
        user + system
    };
    of(libc::RUSAGE_SELF) + of(libc::RUSAGE_CHILDREN)
}

/// A state that the client has brought is being made.
#[derive(Clone, Copy, Debug)]
pub struct Making {
    /// When the client was told last, or could have been.
    pub looked: Instant,
    /// The processor time then.
    pub had: Duration,
}

impl Making {
    /// It begins now.
    pub fn begin() -> Self {
        Self {
            looked: Instant::now(),
            had: processor_time(),
        }
    }

    /// Whether this process has worked since, if it is time to say so.
    fn has_worked(&mut self, often: Duration) -> bool {
        let passed = self.looked.elapsed();
        if passed < often {
            return false;
        }
        let before = std::mem::replace(self, Self::begin());
        self.had.saturating_sub(before.had) >= passed / BUSY
    }
}

impl<B: Backend> Session<B> {
    /// Tells the client that has brought a state that it is being made, if it is time to. Called between steps, by the
    /// thread that a driver which hangs does not let go.
    pub fn works(&mut self) -> Result<(), Gone> {
        let making = self.making.as_mut();
        match making.is_some_and(|making| making.has_worked(TOLD)) {
            true => self.send(WORKS, 0, &[]),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_works_has_had_processor_time_and_who_sleeps_has_not() {
        let often = Duration::from_millis(50);
        let mut making = Making::begin();
        assert!(
            !making.has_worked(Duration::from_secs(3600)),
            "it is not time to"
        );
        // Other tests work in this process, too: this much may have been had before it is time to.
        let Making { looked, had } = making;
        while processor_time() - had < often || looked.elapsed() < often {}
        assert!(making.has_worked(often));
        // None is enough here, whatever others have.
        let mut asleep = Making {
            had: Duration::MAX,
            ..Making::begin()
        };
        std::thread::sleep(often);
        assert!(!asleep.has_worked(often));
    }
}
