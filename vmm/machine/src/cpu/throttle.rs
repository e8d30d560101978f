//! Throttles all vCPUs, so that a guest writes less memory while it is migrated.
//!
//! ```text
//!   guest: run 10 ms, nap, run 10 ms, nap ...      nap = 10 ms * percent / (100 - percent)
//! ```
//!
//! A vCPU that is to be stopped does not finish its nap first.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use devices::thread::{ThreadRole, ThreadSpawner};

use super::thread::Napper;

/// How long a vCPU runs between two naps.
const RUN: Duration = Duration::from_millis(10);

/// Maximum throttling in percent.
const MOST: u8 = 99;

/// A thread that makes vCPUs nap, until this is dropped.
pub struct Throttle {
    percent: Arc<AtomicU8>,
    /// Dropping it ends the thread.
    _alive: mpsc::Sender<()>,
}

impl Throttle {
    /// Starts throttling.
    pub fn start(percent: u8, vcpus: Vec<Napper>, spawner: &dyn ThreadSpawner) -> io::Result<Self> {
        let shared = Arc::new(AtomicU8::new(percent));
        let of_thread = Arc::clone(&shared);
        let (alive, ended) = mpsc::channel();
        let body = move || {
            loop {
                let nap = nap(of_thread.load(Ordering::Relaxed));
                for vcpu in &vcpus {
                    vcpu.nap(nap);
                }
                if ended.recv_timeout(nap + RUN) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        // Dropping the handle detaches the thread; it ends when `alive` is dropped.
        drop(spawner.spawn(ThreadRole::Migration, "_throttle", Box::new(body))?);
        Ok(Self {
            percent: shared,
            _alive: alive,
        })
    }

    /// Changes the throttling.
    pub fn set(&self, percent: u8) {
        self.percent.store(percent, Ordering::Relaxed);
    }
}

fn nap(percent: u8) -> Duration {
    let percent = percent.min(MOST);
    RUN * u32::from(percent) / u32::from(100 - percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nap_is_the_share_that_was_asked_for() {
        assert_eq!(nap(0), Duration::ZERO);
        assert_eq!(nap(50), RUN);
        assert_eq!(nap(20), RUN / 4);
        assert_eq!(nap(99), RUN * 99);
        assert_eq!(nap(255), RUN * 99);
    }
}
