//! Locks that stay usable after a panic of another holder.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Locks a [`Mutex`] even if a thread panicked while holding it. The value is then as that thread
/// left it. Code that holds such a lock must not leave the value half updated where it can panic.
pub trait Unpoisoned<T: ?Sized> {
    /// Waits for the lock. It costs the same as [`Mutex::lock`].
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
    /// Waits until there is no writer.
    fn read_unpoisoned(&self) -> RwLockReadGuard<'_, T>;

    /// Waits until there are no readers and no writer.
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
