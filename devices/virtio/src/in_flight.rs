//! Requests that the host has not completed yet.
//!
//! A worker counts its requests to the host. To stop the worker, a caller waits for them in bounded
//! time, and lets the worker continue if the host does not respond.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use device_model::lifecycle::Unanswered;

/// The number of requests, and whether new ones may begin.
#[derive(Debug, Default)]
pub struct InFlight {
    requests: AtomicU64,
    /// No new request may begin.
    held: AtomicBool,
}

impl InFlight {
    /// Counts a request, unless new requests are held back. Costs two atomic operations.
    pub fn begin(&self) -> bool {
        // With this order, and the one in `quiesce`, at least one side sees the other's store.
        self.requests.fetch_add(1, Ordering::SeqCst);
        if self.held.load(Ordering::SeqCst) {
            self.end();
            return false;
        }
        true
    }

    /// Marks a request as complete.
    pub fn end(&self) {
        self.requests.fetch_sub(1, Ordering::SeqCst);
    }

    /// Holds back new requests and waits up to `patience` until none is in flight. `what` describes
    /// the requests in the error.
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

    /// Whether new requests are held back, because a caller waits for those in flight.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Lets requests begin again.
    pub fn carry_on(&self) {
        self.held.store(false, Ordering::SeqCst);
    }

    /// Lets requests begin. Earlier requests have completed, or were lost with their worker.
    pub fn start_over(&self) {
        self.requests.store(0, Ordering::SeqCst);
        self.carry_on();
    }
}
