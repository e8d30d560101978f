//! The device memory that all applications of a pool have together.
//!
//! The pool and its workers share a page of counters, one for each worker, as a machine and the workers of its port do. A
//! worker charges its application's allocations to its counter, and the pool clears the counter when the worker has ended.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use remoting_proto::port::MOST_SLICES;
use remoting_session::quota::Quota;
use remoting_transport::{account::Account, mapping};

use super::options::Options;

/// The descriptor on which a worker finds the page.
pub(super) const ACCOUNT: i32 = 6;

/// How many workers a pool with such a page has at most.
pub(super) const MOST_WORKERS: usize = MOST_SLICES as usize;

/// The page, as its pool sees it.
#[derive(Clone, Debug)]
pub(super) struct Total(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    account: Account,
    file: OwnedFd,
    /// A bit for each counter that a worker has.
    taken: Mutex<u64>,
}

/// A counter of a worker. An application that moves to another worker keeps it. Cleared on drop.
#[derive(Debug)]
pub(super) struct Counter {
    shared: Arc<Shared>,
    index: u32,
}

impl Total {
    pub fn create() -> Result<Self, mapping::Error> {
        let (account, file) = Account::create()?;
        Ok(Self(Arc::new(Shared {
            account,
            file,
            taken: Mutex::new(0),
        })))
    }

    /// A counter for a new worker, if one is left.
    pub fn counter(&self) -> Option<Arc<Counter>> {
        let mut taken = self.0.taken.lock_unpoisoned();
        let index = taken.trailing_ones();
        if index >= MOST_SLICES {
            return None;
        }
        *taken |= 1 << index;
        Some(Arc::new(Counter {
            shared: Arc::clone(&self.0),
            index,
        }))
    }
}

impl Counter {
    /// Its number among those of the page.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The page's file.
    pub fn file(&self) -> &OwnedFd {
        &self.shared.file
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.shared.account.clear(self.index);
        *self.shared.taken.lock_unpoisoned() &= !(1 << self.index);
    }
}

/// The quota of this worker's application, if it is one of this machine: its own, or with those of all others of the pool.
/// To be called once in a worker.
///
/// # Errors
/// The page cannot be mapped.
pub(super) fn quota(options: &Options) -> io::Result<Arc<Quota>> {
    let bytes = |mib: u64| mib.saturating_mul(1 << 20);
    let Some((total, counter)) = options.memory_total.zip(options.counter) else {
        return Ok(Quota::new(bytes(options.memory)));
    };
    // SAFETY: the pool has put the page's file there, and nothing else in this process uses it.
    let file = unsafe { OwnedFd::from_raw_fd(ACCOUNT) };
    Ok(Quota::shared(bytes(total), Account::map(&file)?, counter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_cleared_and_free_again_when_its_last_worker_has_ended() {
        let total = Total::create().unwrap();
        let mut counters: Vec<_> = (0..MOST_SLICES).map(|_| total.counter().unwrap()).collect();
        assert!(total.counter().is_none());
        let counter = counters.remove(5);
        let account = Account::map(counter.file()).unwrap();
        assert!(account.add(counter.index(), 7, 10));
        // As while an application moves.
        let destination = Arc::clone(&counter);
        drop(counter);
        assert_eq!((account.total(), total.counter().is_none()), (7, true));
        drop(destination);
        assert_eq!(account.total(), 0);
        assert_eq!(total.counter().map(|counter| counter.index()), Some(5));
    }
}
