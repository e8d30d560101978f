//! A fair lock: threads acquire it in the order in which they asked, so none of them can starve the
//! others by asking again and again.
//!
//! A mutex of the standard library goes to the first thread that tries when it is free. That is
//! mostly the thread that has just released it: a worker that a guest keeps busy would hold it
//! permanently, and the thread that owns the VM would wait as long. Here each thread takes a ticket,
//! and only the thread whose ticket is called waits for the mutex.
//! ```text
//!   lock():   ticket ──> called ──> inner ──> (the next ticket is called) ──> the guard, which gives inner back
//! ```

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use base::Unpoisoned;

/// A mutex that threads acquire in the order in which they asked. Costs two more uncontended
/// acquisitions of a mutex. A panic while it is locked does not poison it: the value stays as it was.
#[derive(Debug, Default)]
pub struct FairLock<T> {
    tickets: Mutex<Tickets>,
    /// Another ticket was called.
    called: Condvar,
    /// Only the thread whose ticket is called waits for this.
    inner: Mutex<T>,
}

/// The tickets. A u64 holds centuries of them.
#[derive(Debug, Default)]
struct Tickets {
    /// The next that is handed out.
    next: u64,
    /// The one that is called. It equals `next` if no thread waits.
    called: u64,
}

impl<T> FairLock<T> {
    /// A lock of this value.
    pub fn new(value: T) -> Self {
        Self {
            tickets: Mutex::default(),
            called: Condvar::new(),
            inner: Mutex::new(value),
        }
    }

    /// Waits for the current holder, and for the threads that have asked before.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let mut tickets = self.tickets.lock_unpoisoned();
        let ticket = tickets.next;
        tickets.next += 1;
        while tickets.called != ticket {
            let waited = self.called.wait(tickets);
            tickets = waited.unwrap_or_else(PoisonError::into_inner);
        }
        drop(tickets);
        let guard = self.inner.lock_unpoisoned();
        let mut tickets = self.tickets.lock_unpoisoned();
        tickets.called += 1;
        let is_awaited = tickets.called != tickets.next;
        drop(tickets);
        if is_awaited {
            self.called.notify_all();
        }
        guard
    }

    /// Whether a thread waits for it, or is about to acquire it.
    #[cfg(any(test, feature = "test-support"))]
    pub fn is_awaited(&self) -> bool {
        self.waiting() > 0
    }

    /// Number of threads that wait for it, or are about to acquire it.
    #[cfg(any(test, feature = "test-support"))]
    fn waiting(&self) -> u64 {
        let tickets = self.tickets.lock_unpoisoned();
        tickets.next - tickets.called
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
    fn threads_acquire_it_in_the_order_in_which_they_asked() {
        let lock = FairLock::<Vec<_>>::default();
        let all: Vec<_> = (0..4).collect();
        for round in 0..100 {
            let guard = lock.lock();
            thread::scope(|scope| {
                for nth in &all {
                    let lock = &lock;
                    scope.spawn(move || lock.lock().push(*nth));
                    while lock.waiting() <= *nth {
                        thread::yield_now();
                    }
                }
                drop(guard);
                lock.lock().push(4);
            });
            let order = std::mem::take(&mut *lock.lock());
            assert_eq!(order, [0, 1, 2, 3, 4], "in round {round}");
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
