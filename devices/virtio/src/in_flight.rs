//! Requests that the host has not answered yet.
//!
//! A worker counts what it asks the host for. Whoever wants to stop it waits for that in bounded
//! time, and can let it go on if the host does not answer.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use device_model::lifecycle::Unanswered;

/// How many there are, and whether there may be more.
#[derive(Debug, Default)]
pub struct InFlight {
    requests: AtomicU64,
    /// No request is to be begun.
    held: AtomicBool,
}

impl InFlight {
    /// Counts a request, unless none is to be begun. Costs two atomic operations.
    pub fn begin(&self) -> bool {
        // In this order, and that of `quiesce`, one of the two sees what the other has done.
        self.requests.fetch_add(1, Ordering::SeqCst);
        if self.held.load(Ordering::SeqCst) {
            self.end();
            return false;
        }
        true
    }

    /// A request that was begun is over.
    pub fn end(&self) {
        self.requests.fetch_sub(1, Ordering::SeqCst);
    }

    /// Lets no request begin and waits for at most `patience` until none is in flight. `what` was
    /// asked for them.
    pub fn quiesce(
        &self,
        what: impl FnOnce() -> String,
        patience: Duration,
    ) -> Result<(), Unanswered> {
        const LOOK: Duration = Duration::from_millis(1);
        self.held.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + patience;
        loop {
            match self.requests.load(Ordering::SeqCst) {
                0 => return Ok(()),
                requests if Instant::now() >= deadline => {
                    return Err(Unanswered {
                        what: what(),
                        requests,
                        patience,
                    });
                }
                _ => std::thread::sleep(LOOK),
            }
        }
    }

    /// Whether somebody waits for the end of what is in flight.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Requests may begin again.
    pub fn carry_on(&self) {
        self.held.store(false, Ordering::SeqCst);
    }

    /// Requests may begin; those before are over, or were lost with their worker.
    pub fn start_over(&self) {
        self.requests.store(0, Ordering::SeqCst);
        self.carry_on();
    }
}
