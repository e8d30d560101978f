//! A lock that nobody who asks again and again can keep from others.
//!
//! A mutex of the standard library goes to whoever comes first when it is free. That is mostly the
//! thread which has just given it back: a worker that a guest keeps busy would have it for good,
//! and the thread that owns the machine would wait for as long. Here whoever waits is next: the
//! others wait behind it, in front of a second mutex.
//!
//! ```text
//!   lock():   next ──> inner ──> (next is given back) ──> the guard, which gives inner back
//! ```

use std::sync::{Mutex, MutexGuard};

use base::Unpoisoned;

/// A mutex that a thread cannot have twice in a row while another one waits for it. Costs one more
/// uncontended mutex. A panic while it is locked leaves the value as it is then.
#[derive(Debug, Default)]
pub struct FairLock<T> {
    /// Belongs to the one thread that waits for `inner`.
    next: Mutex<()>,
    inner: Mutex<T>,
}

impl<T> FairLock<T> {
    /// Waits for those who have it, and for the one who is next.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let next = self.next.lock_unpoisoned();
        let guard = self.inner.lock_unpoisoned();
        drop(next);
        guard
    }

    /// Whether somebody waits for it, or is about to have it.
    #[cfg(any(test, feature = "test-support"))]
    pub fn is_awaited(&self) -> bool {
        self.next.try_lock().is_err()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn who_waits_is_next_though_the_last_one_asks_again_at_once() {
        let lock = FairLock::<Vec<_>>::default();
        for round in 0..100 {
            let guard = lock.lock();
            thread::scope(|scope| {
                scope.spawn(|| lock.lock().push("other"));
                while !lock.is_awaited() {
                    thread::yield_now();
                }
                drop(guard);
                lock.lock().push("again");
            });
            let order = std::mem::take(&mut *lock.lock());
            assert_eq!(order, ["other", "again"], "in round {round}");
        }
    }

    #[test]
    fn a_panic_under_it_keeps_nobody_out() {
        let lock = FairLock::<u8>::default();
        thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let mut value = lock.lock();
                *value = 2;
                panic!("as it should");
            });
            panics.join().unwrap_err();
        });
        assert_eq!(*lock.lock(), 2);
    }
}
