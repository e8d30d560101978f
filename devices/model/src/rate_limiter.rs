//! Rate limits: token buckets for bytes and operations.
//!
//! A device takes tokens before it executes a request. When a bucket is empty, the limiter is
//! *blocked* until a timer (a timerfd for the device's event loop) expires. A request that is
//! larger than the whole bucket passes when the bucket is full, and the debt delays later requests,
//! so that no request waits forever.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use vmm_sys_util::timerfd::TimerFd;

/// Maximum time before a blocked limiter checks again: a bucket that refills faster than that would
/// be full for the rest of the time.
const RETRY: Duration = Duration::from_millis(100);

/// Limits for one token type, as in the REST API.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct TokenBucketConfig {
    /// Capacity of the bucket in tokens; 0: no limit.
    pub size: u64,
    /// Additional tokens beyond `size`, available once at the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_time_burst: Option<u64>,
    /// Time in milliseconds to refill an empty bucket; 0: no limit.
    pub refill_time: u64,
}

/// Limits of a device, as in the REST API.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RateLimiterConfig {
    /// Limit of bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<TokenBucketConfig>,
    /// Limit of operations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops: Option<TokenBucketConfig>,
}

/// What a token stands for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TokenType {
    /// A byte.
    Bytes,
    /// An operation.
    Ops,
}

/// A bucket that refills over time.
#[derive(Clone, Debug)]
struct TokenBucket {
    size: u64,
    refill: Duration,
    burst: u64,
    /// Negative while a request that was larger than the bucket is being paid off.
    budget: i128,
    /// The refilled fraction of the next token: nanoseconds times `size`, less than `refill`.
    part: i128,
    updated: Instant,
}

impl TokenBucket {
    fn new(config: TokenBucketConfig, now: Instant) -> Option<Self> {
        (config.size > 0 && config.refill_time > 0).then(|| Self {
            size: config.size,
            refill: Duration::from_millis(config.refill_time),
            burst: config.one_time_burst.unwrap_or(0),
            budget: i128::from(config.size),
            part: 0,
            updated: now,
        })
    }

    fn replenish(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.updated).as_nanos();
        let size = i128::from(self.size);
        // Cannot overflow: years of nanoseconds times a u64 stay below 2^124, and the rest of a
        // token below 2^84.
        let nanos = i128::try_from(elapsed.min(1 << 60)).unwrap_or(0);
        let refill = i128::try_from(self.refill.as_nanos())
            .unwrap_or(i128::MAX)
            .max(1);
        // The remaining fraction of a token is kept for the next time.
        let parts = nanos * size + self.part;
        self.part = parts % refill;
        self.budget = (self.budget + parts / refill).min(size);
        self.updated = self.updated.max(now);
    }

    fn take(&mut self, tokens: u64, now: Instant) -> bool {
        let from_burst = self.burst.min(tokens);
        if from_burst == tokens {
            self.burst -= tokens;
            self.updated = now;
            return true;
        }
        self.replenish(now);
        let needed = i128::from(tokens - from_burst);
        let size = i128::from(self.size);
        if self.budget < needed.min(size) {
            return false;
        }
        self.burst -= from_burst;
        self.budget -= needed;
        true
    }

    /// Whether there is no debt, and at least one token.
    fn is_solvent(&mut self, now: Instant) -> bool {
        self.replenish(now);
        self.burst > 0 || self.budget > 0
    }

    /// Takes tokens even if they are not available.
    fn charge(&mut self, tokens: u64, now: Instant) {
        self.replenish(now);
        let from_burst = self.burst.min(tokens);
        self.burst -= from_burst;
        // Stays far above -2^127: each step takes less than 2^64, and there are fewer than 2^63
        // steps.
        self.budget -= i128::from(tokens - from_burst);
    }

    fn give_back(&mut self, tokens: u64) {
        self.budget = (self.budget + i128::from(tokens)).min(i128::from(self.size));
    }
}

/// Limits of a device, or of several devices that share it behind a lock.
pub struct RateLimiter {
    bytes: Option<TokenBucket>,
    ops: Option<TokenBucket>,
    retry: Duration,
    timer: TimerFd,
    blocked: bool,
}

impl RateLimiter {
    /// Creates a limiter with full buckets.
    pub fn new(config: &RateLimiterConfig) -> io::Result<Self> {
        let now = Instant::now();
        let bucket = |config: Option<TokenBucketConfig>| {
            config.and_then(|config| TokenBucket::new(config, now))
        };
        let (bytes, ops) = (bucket(config.bandwidth), bucket(config.ops));
        let refills = [&bytes, &ops].into_iter().flatten();
        let retry = refills.fold(RETRY, |retry, bucket| retry.min(bucket.refill));
        Ok(Self {
            bytes,
            ops,
            retry,
            timer: TimerFd::new()?,
            blocked: false,
        })
    }

    /// Takes `tokens`, or takes none, blocks the limiter and returns false.
    pub fn consume(&mut self, tokens: u64, kind: TokenType) -> bool {
        self.consume_at(tokens, kind, Instant::now())
    }

    fn consume_at(&mut self, tokens: u64, kind: TokenType, now: Instant) -> bool {
        if self.blocked {
            return false;
        }
        let Some(bucket) = self.bucket(kind) else {
            return true;
        };
        bucket.take(tokens, now) || !self.block()
    }

    /// Whether a request of unknown size, which is charged when its size is known, may be executed:
    /// all earlier ones are paid for. Otherwise blocks the limiter and returns false.
    pub fn is_ready(&mut self) -> bool {
        self.is_ready_at(Instant::now())
    }

    fn is_ready_at(&mut self, now: Instant) -> bool {
        if self.blocked {
            return false;
        }
        let buckets = [&mut self.bytes, &mut self.ops];
        let solvent = buckets
            .into_iter()
            .flatten()
            .all(|bucket| bucket.is_solvent(now));
        solvent || !self.block()
    }

    /// Takes `tokens` for a request that was executed, even if they are not available: a debt
    /// delays later requests.
    pub fn charge(&mut self, tokens: u64, kind: TokenType) {
        self.charge_at(tokens, kind, Instant::now());
    }

    fn charge_at(&mut self, tokens: u64, kind: TokenType, now: Instant) {
        if let Some(bucket) = self.bucket(kind) {
            bucket.charge(tokens, now);
        }
    }

    /// Starts the timer; false if that fails.
    fn block(&mut self) -> bool {
        match self.timer.reset(self.retry, None) {
            Ok(()) => self.blocked = true,
            // Without a timer the limiter would stay blocked forever.
            Err(error) => {
                log::error!("rate limit not applied, its timer does not start: {error}");
            }
        }
        self.blocked
    }

    /// Returns tokens that were taken for a request that was not executed.
    pub fn refund(&mut self, tokens: u64, kind: TokenType) {
        if let Some(bucket) = self.bucket(kind) {
            bucket.give_back(tokens);
        }
    }

    /// The timeout of the timer for which requests wait.
    pub fn retry(&self) -> Duration {
        self.retry
    }

    /// Whether requests have to wait for the timer.
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Unblocks the limiter. Call it when the timer's descriptor is readable.
    pub fn handle_event(&mut self) -> io::Result<()> {
        self.blocked = false;
        self.timer.wait().map_err(io::Error::from)?;
        Ok(())
    }

    fn bucket(&mut self, kind: TokenType) -> Option<&mut TokenBucket> {
        match kind {
            TokenType::Bytes => self.bytes.as_mut(),
            TokenType::Ops => self.ops.as_mut(),
        }
    }
}

impl AsRawFd for RateLimiter {
    /// The timer's descriptor; readable when a blocked limiter may continue.
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(size: u64, one_time_burst: Option<u64>, refill_time: u64) -> RateLimiter {
        let bandwidth = Some(TokenBucketConfig {
            size,
            one_time_burst,
            refill_time,
        });
        RateLimiter::new(&RateLimiterConfig {
            bandwidth,
            ops: None,
        })
        .unwrap()
    }

    fn consume(limiter: &mut RateLimiter, tokens: u64, now: Instant) -> bool {
        limiter.blocked = false;
        limiter.consume_at(tokens, TokenType::Bytes, now)
    }

    #[test]
    fn tokens_come_back_at_the_configured_rate() {
        let mut limiter = limiter(1000, None, 1000);
        let start = limiter.bytes.as_ref().unwrap().updated;
        assert!(consume(&mut limiter, 1000, start));
        assert!(!consume(&mut limiter, 1, start));
        assert!(!consume(
            &mut limiter,
            101,
            start + Duration::from_millis(100)
        ));
        assert!(consume(
            &mut limiter,
            100,
            start + Duration::from_millis(100)
        ));
        assert!(!consume(
            &mut limiter,
            1,
            start + Duration::from_millis(100)
        ));
    }

    #[test]
    fn the_rate_does_not_depend_on_how_often_is_asked() {
        for (size, millis) in [(15, 100), (3, 400), (1999, 1)] {
            let mut limiter = limiter(size, None, 1000);
            let start = limiter.bytes.as_ref().unwrap().updated;
            assert!(consume(&mut limiter, size, start));
            let mut taken = 0;
            for step in 1..=20_000 / millis {
                let now = start + Duration::from_millis(step * millis);
                while consume(&mut limiter, 1, now) {
                    taken += 1;
                }
            }
            assert_eq!(taken, 20 * size, "{size} tokens a second");
        }
    }

    #[test]
    fn a_bucket_that_fills_up_quickly_is_not_left_full() {
        assert_eq!(limiter(100, None, 10).retry(), Duration::from_millis(10));
        assert_eq!(limiter(100, None, 1000).retry(), RETRY);
        assert_eq!(limiter(0, None, 10).retry(), RETRY);
    }

    #[test]
    fn the_burst_is_there_once() {
        let mut limiter = limiter(10, Some(100), 1000);
        let start = limiter.bytes.as_ref().unwrap().updated;
        assert!(consume(&mut limiter, 105, start));
        assert!(consume(&mut limiter, 5, start));
        assert!(!consume(&mut limiter, 1, start));
        assert!(!consume(
            &mut limiter,
            11,
            start + Duration::from_millis(500)
        ));
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_and_delays_the_next() {
        let mut limiter = limiter(10, None, 1000);
        let start = limiter.bytes.as_ref().unwrap().updated;
        assert!(consume(&mut limiter, 30, start));
        assert!(!consume(
            &mut limiter,
            1,
            start + Duration::from_millis(2000)
        ));
        assert!(consume(
            &mut limiter,
            1,
            start + Duration::from_millis(2100)
        ));
    }

    #[test]
    fn what_is_charged_afterwards_delays_the_next_request() {
        let mut limiter = limiter(1000, None, 1000);
        let start = limiter.bytes.as_ref().unwrap().updated;
        let ready = |limiter: &mut RateLimiter, millis| {
            limiter.blocked = false;
            limiter.is_ready_at(start + Duration::from_millis(millis))
        };
        assert!(ready(&mut limiter, 0));
        limiter.charge_at(1500, TokenType::Bytes, start);
        assert!(!ready(&mut limiter, 0));
        assert!(limiter.is_blocked());
        assert!(!ready(&mut limiter, 500));
        assert!(ready(&mut limiter, 501));
        // There is no limit of operations here.
        limiter.charge_at(1 << 40, TokenType::Ops, start);
        assert!(ready(&mut limiter, 501));
    }

    #[test]
    fn extreme_numbers_do_not_overflow() {
        let mut limiter = limiter(u64::MAX, Some(u64::MAX), u64::MAX);
        let start = limiter.bytes.as_ref().unwrap().updated;
        for _ in 0..5 {
            consume(&mut limiter, u64::MAX, start + Duration::from_secs(1 << 40));
            limiter.refund(u64::MAX, TokenType::Bytes);
            limiter.charge_at(u64::MAX, TokenType::Bytes, start);
        }
    }

    #[test]
    fn a_blocked_limiter_waits_for_its_timer() {
        let mut limiter = limiter(1, None, 1_000_000);
        assert!(limiter.consume(1, TokenType::Bytes));
        assert!(!limiter.consume(1, TokenType::Bytes));
        assert!(limiter.is_blocked());
        assert!(!limiter.consume(1, TokenType::Ops));
        limiter.handle_event().unwrap();
        assert!(!limiter.is_blocked());
        assert!(limiter.consume(1, TokenType::Ops));
    }
}
