//! Locks that a panic elsewhere does not make unusable.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Locking a [`Mutex`] whether or not a thread has panicked with it locked. The value is then as that
/// thread has left it; whoever holds such a lock leaves nothing in it half done where a panic is
/// possible.
pub trait Unpoisoned<T: ?Sized> {
    /// Waits for the lock. Costs what [`Mutex::lock`] does.
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T>;
}

impl<T: ?Sized> Unpoisoned<T> for Mutex<T> {
    #[inline]
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same for an [`RwLock`].
pub trait UnpoisonedRw<T: ?Sized> {
    /// Waits until nobody writes.
    fn read_unpoisoned(&self) -> RwLockReadGuard<'_, T>;

    /// Waits until nobody reads or writes.
    fn write_unpoisoned(&self) -> RwLockWriteGuard<'_, T>;
}

impl<T: ?Sized> UnpoisonedRw<T> for RwLock<T> {
    #[inline]
    fn read_unpoisoned(&self) -> RwLockReadGuard<'_, T> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn write_unpoisoned(&self) -> RwLockWriteGuard<'_, T> {
        self.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{panic::catch_unwind, sync::Arc};

    use super::*;

    #[test]
    fn a_panic_of_another_holder_leaves_the_lock_usable() {
        let (mutex, rw) = (Arc::new(Mutex::new(1)), Arc::new(RwLock::new(2)));
        let (poisoned, poisoned_rw) = (Arc::clone(&mutex), Arc::clone(&rw));
        let panicked = catch_unwind(move || {
            let (_one, _two) = (poisoned.lock(), poisoned_rw.write());
            panic!("while both are locked");
        });
        assert!(panicked.is_err() && mutex.is_poisoned() && rw.is_poisoned());
        *mutex.lock_unpoisoned() += 1;
        *rw.write_unpoisoned() += 1;
        assert_eq!((*mutex.lock_unpoisoned(), *rw.read_unpoisoned()), (2, 3));
    }
}
