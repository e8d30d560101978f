//! A fair lock: a thread that locks it in a loop cannot starve the others.
//!
//! A mutex of the standard library goes to the first thread that tries when it is free. That is
//! mostly the thread that has just released it: a worker that a guest keeps busy would hold it
//! permanently, and the thread that owns the VM would wait as long. Here the waiting thread is
//! next, and further threads queue behind it at a second mutex.
//! ```text
//!   lock():   next ──> inner ──> (next is given back) ──> the guard, which gives inner back
//! ```

use std::sync::{Mutex, MutexGuard};

use base::Unpoisoned;

/// A mutex that a thread cannot acquire twice in a row while another one waits. Costs one more
/// uncontended mutex. A panic while it is locked does not poison it: the value stays as it was.
#[derive(Debug, Default)]
pub struct FairLock<T> {
    /// Held by the one thread that waits for `inner`.
    next: Mutex<()>,
    inner: Mutex<T>,
}

impl<T> FairLock<T> {
    /// Waits for the current holder, and for the thread that is next.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let next = self.next.lock_unpoisoned();
        let guard = self.inner.lock_unpoisoned();
        drop(next);
        guard
    }

    /// Whether a thread waits for it, or is about to acquire it.
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
