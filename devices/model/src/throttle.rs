//! A queue's share of a rate limiter.
//!
//! A limiter may serve all queues of a device, and several disks (`rate_limit_group`), with each
//! queue on its own thread. The limiter's timer is one descriptor, whose event only one of the
//! threads would see. Each waiting queue therefore has a timer of its own, and checks again when it
//! expires.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, Mutex, MutexGuard},
};

use base::Unpoisoned;
use vmm_sys_util::timerfd::TimerFd;

use crate::rate_limiter::{RateLimiter, TokenType};

/// A limiter that any number of queues and devices share.
pub type SharedRateLimiter = Arc<Mutex<RateLimiter>>;

/// Decides whether a queue may continue.
pub struct Throttle {
    limiter: SharedRateLimiter,
    timer: TimerFd,
    waiting: bool,
}

impl Throttle {
    /// Creates a share of `limiter`.
    pub fn new(limiter: SharedRateLimiter) -> io::Result<Self> {
        Ok(Self {
            limiter,
            timer: TimerFd::new()?,
            waiting: false,
        })
    }

    /// Takes tokens for an operation on `bytes`. If there are none, takes nothing, and the timer
    /// expires when to ask again.
    pub fn admit(&mut self, bytes: u64) -> bool {
        if self.waiting {
            return false;
        }
        let admitted = consume(&mut self.limiter(), bytes);
        admitted || !self.wait()
    }

    /// Whether an operation of unknown size, which is charged afterwards, may continue. If not, the
    /// timer expires when to ask again.
    pub fn is_ready(&mut self) -> bool {
        if self.waiting {
            return false;
        }
        let ready = self.limiter().is_ready();
        ready || !self.wait()
    }

    /// Takes tokens for an operation on `bytes` that was executed.
    pub fn charge(&self, bytes: u64) {
        let mut limiter = self.limiter();
        limiter.charge(1, TokenType::Ops);
        limiter.charge(bytes, TokenType::Bytes);
    }

    /// Locks the limiter, and unblocks it if its timer has expired.
    fn limiter(&self) -> MutexGuard<'_, RateLimiter> {
        let mut limiter = self.limiter.lock_unpoisoned();
        // Reading the timer would block before it has expired.
        if limiter.is_blocked()
            && is_readable(limiter.as_raw_fd())
            && let Err(error) = limiter.handle_event()
        {
            log::error!("cannot read a rate limit's timer: {error}");
        }
        limiter
    }

    /// Starts the timer; false if that fails.
    fn wait(&mut self) -> bool {
        // Not shorter than the limiter's own timer, which was started before.
        let retry = self.limiter().retry();
        match self.timer.reset(retry, None) {
            Ok(()) => self.waiting = true,
            // Without a timer the queue would wait forever.
            Err(error) => {
                log::error!("rate limit not applied, its timer does not start: {error}");
            }
        }
        self.waiting
    }

    /// Ends the wait. Call it when the timer is readable.
    pub fn wake(&mut self) {
        if self.waiting && is_readable(self.timer.as_raw_fd()) {
            self.waiting = false;
            // Does not block, since it is readable.
            if let Err(error) = self.timer.wait() {
                log::error!("cannot read a rate limit's timer: {error}");
            }
        }
    }

    /// Cancels a wait, because the worker has stopped.
    pub fn reset(&mut self) {
        self.waiting = false;
        if let Err(error) = self.timer.clear() {
            log::error!("cannot stop a rate limit's timer: {error}");
        }
    }
}

impl AsRawFd for Throttle {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

fn consume(limiter: &mut RateLimiter, bytes: u64) -> bool {
    if !limiter.consume(1, TokenType::Ops) {
        return false;
    }
    let admitted = limiter.consume(bytes, TokenType::Bytes);
    if !admitted {
        limiter.refund(1, TokenType::Ops);
    }
    admitted
}

fn is_readable(fd: RawFd) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd; a timeout of zero does not block.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}
