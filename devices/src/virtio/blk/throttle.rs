//! A queue's share in a rate limiter.
//!
//! A limiter may serve several queues, and several disks (`rate_limit_group`), each in a thread
//! of its own. Its timer is one descriptor, whose event only one of them would see: so each
//! waiting queue has a timer of its own and looks again when that is over.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use vmm_sys_util::timerfd::TimerFd;

use crate::rate_limiter::{RateLimiter, TokenType};

/// A limiter that any number of queues and disks share.
pub type SharedRateLimiter = Arc<Mutex<RateLimiter>>;

/// How long a queue waits before it looks again; not less than the limiter's own timer, which is
/// started before.
const RETRY: Duration = Duration::from_millis(100);

/// Decides when a queue may go on.
pub struct Throttle {
    limiter: SharedRateLimiter,
    timer: TimerFd,
    waiting: bool,
}

impl Throttle {
    /// A share in `limiter`.
    pub fn new(limiter: SharedRateLimiter) -> io::Result<Self> {
        Ok(Self {
            limiter,
            timer: TimerFd::new()?,
            waiting: false,
        })
    }

    /// Takes tokens for an operation on `bytes`. If there are none, takes nothing, and the timer
    /// says when to ask again.
    pub fn admit(&mut self, bytes: u64) -> bool {
        if self.waiting {
            return false;
        }
        if consume(&self.limiter, bytes) {
            return true;
        }
        match self.timer.reset(RETRY, None) {
            Ok(()) => self.waiting = true,
            Err(error) => {
                // Without a timer nothing would ever go on.
                log::error!("rate limit not applied, its timer does not start: {error}");
                return true;
            }
        }
        false
    }

    /// To be called when the timer is readable.
    pub fn wake(&mut self) {
        if self.waiting && is_readable(self.timer.as_raw_fd()) {
            self.waiting = false;
            // Does not block, since it is readable.
            if let Err(error) = self.timer.wait() {
                log::error!("cannot read a rate limit's timer: {error}");
            }
        }
    }

    /// Forgets that it waits: the worker has stopped.
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

fn consume(limiter: &Mutex<RateLimiter>, bytes: u64) -> bool {
    let mut limiter = limiter.lock().unwrap_or_else(PoisonError::into_inner);
    // Reading the timer blocks until it has expired.
    if limiter.is_blocked()
        && is_readable(limiter.as_raw_fd())
        && let Err(error) = limiter.handle_event()
    {
        log::error!("cannot read a rate limit's timer: {error}");
    }
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
    // SAFETY: one valid pollfd; a timeout of zero does not wait.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}
