//! How far the writing of a snapshot or a core dump is.
//!
//! ```text
//!   Running ──seal──> Sealed: the files get their final names, or the core dump is complete
//!      └────cancel──> Cancelled: what was written is removed
//! ```

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const RUNNING: u8 = 0;
const SEALED: u8 = 1;
const CANCELLED: u8 = 2;

/// How many snapshots are taking an older one's place, for the process.
static SEALS: Seals = Seals(AtomicUsize::new(0));

/// Number of seals, or [`CLOSED`].
#[derive(Debug)]
struct Seals(AtomicUsize);

/// No seal can be taken any more.
const CLOSED: usize = usize::MAX;

impl Seals {
    fn take(&self) -> bool {
        let more = |seals| (seals != CLOSED).then(|| seals + 1);
        let order = Ordering::SeqCst;
        self.0.fetch_update(order, order, more).is_ok()
    }

    fn give_back(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits this long until there are no seals. Returns false, and changes nothing, if there still are.
    fn close(&self, patience: Duration) -> bool {
        const LOOK: Duration = Duration::from_millis(100);
        let started = Instant::now();
        let order = Ordering::SeqCst;
        loop {
            match self.0.compare_exchange(0, CLOSED, order, order) {
                Ok(_) | Err(CLOSED) => return true,
                Err(_) if started.elapsed() >= patience => return false,
                Err(_) => thread::sleep(LOOK),
            }
        }
    }
}

/// What was written takes its place while this exists: neither the older snapshot nor the new one is whole.
#[must_use]
#[derive(Debug)]
pub struct Seal(());

impl Seal {
    /// Lets no further seal begin, as soon as none is held. Returns false if one is held for longer than this: if the
    /// process ends then, neither snapshot is left.
    pub fn close(patience: Duration) -> bool {
        SEALS.close(patience)
    }
}

impl Drop for Seal {
    fn drop(&mut self) {
        SEALS.give_back();
    }
}

/// It was cancelled.
#[derive(Debug, thiserror::Error)]
#[error("it was cancelled; what it would have replaced is as it was")]
pub struct Cancelled;

/// The progress of writing. All clones share one state.
#[derive(Clone, Debug)]
pub struct Writing(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: AtomicU8,
    /// Bytes of memory that were examined, and written unless they are zero.
    done: AtomicU64,
    total: u64,
}

impl Writing {
    /// Nothing of `total` bytes of memory has been written.
    pub fn new(total: u64) -> Self {
        Self(Arc::new(Shared {
            state: AtomicU8::new(RUNNING),
            done: AtomicU64::new(0),
            total,
        }))
    }

    /// Adds to the bytes that are done. Fails if it was cancelled.
    pub fn advance(&self, bytes: u64) -> io::Result<()> {
        self.0.done.fetch_add(bytes, Ordering::Relaxed);
        match self.is_cancelled() {
            true => Err(io::Error::other(Cancelled)),
            false => Ok(()),
        }
    }

    /// From now on it cannot be cancelled. Fails if it was, or if the process ends.
    pub fn seal(&self) -> io::Result<Seal> {
        if !SEALS.take() {
            return Err(io::Error::other(Cancelled));
        }
        let seal = Seal(());
        match self.leave_running(SEALED) {
            true => Ok(seal),
            false => Err(io::Error::other(Cancelled)),
        }
    }

    /// Cancels it; returns false if it is too late.
    pub fn cancel(&self) -> bool {
        self.leave_running(CANCELLED) || self.is_cancelled()
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.state.load(Ordering::SeqCst) == CANCELLED
    }

    /// The bytes of memory that are done, and all of them.
    pub fn bytes(&self) -> (u64, u64) {
        (self.0.done.load(Ordering::Relaxed), self.0.total)
    }

    fn leave_running(&self, to: u8) -> bool {
        let state = &self.0.state;
        state
            .compare_exchange(RUNNING, to, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_cannot_be_cancelled_and_the_reverse() {
        let sealed = Writing::new(3);
        sealed.advance(2).unwrap();
        let seal = sealed.seal().unwrap();
        assert!(!Seal::close(Duration::ZERO));
        drop(seal);
        assert!(!sealed.cancel() && !sealed.is_cancelled());
        assert_eq!(sealed.bytes(), (2, 3));
        let cancelled = Writing::new(3);
        assert!(cancelled.cancel() && cancelled.cancel());
        cancelled.seal().unwrap_err();
        cancelled.advance(1).unwrap_err();
    }

    #[test]
    fn an_end_never_comes_between_the_begin_and_end_of_a_seal() {
        let seals = Seals(AtomicUsize::new(0));
        let closes = || seals.close(Duration::ZERO);
        assert!(seals.take() && seals.take());
        assert!(!closes());
        seals.give_back();
        assert!(!closes() && seals.take());
        seals.give_back();
        // One that ends while it is waited for.
        thread::scope(|scope| {
            let closed = scope.spawn(|| seals.close(Duration::MAX));
            seals.give_back();
            assert!(closed.join().unwrap());
        });
        assert!(closes() && !seals.take() && closes());
    }
}
