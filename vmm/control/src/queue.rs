//! The order in which threads make machines and end them: one at a time, because two of them may need the same files, taps
//! and sockets. A machine that storage keeps from its end holds up the next one, and not the control thread.

use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use base::{Cancel, Unpoisoned};
use vmm_config::VmConfig;
use vmm_machine::Machine;

/// A queue of threads.
#[derive(Clone, Default)]
pub struct Queue(Arc<Shared>);

#[derive(Default)]
struct Shared {
    places: Mutex<Places>,
    left: Condvar,
}

#[derive(Default)]
struct Places {
    next: u64,
    taken: BTreeSet<u64>,
}

/// A place in the queue. It is left when this is dropped.
pub struct Place {
    number: u64,
    queue: Queue,
}

/// A machine that a thread has made.
pub struct Made {
    /// Its configuration.
    pub config: Box<VmConfig>,
    /// The machine.
    pub machine: Box<Machine>,
    /// Dropped after the machine.
    pub _place: Place,
}

impl Queue {
    /// A place behind all others.
    pub fn place(&self) -> Place {
        let mut places = self.0.places.lock_unpoisoned();
        let number = places.next;
        places.next += 1;
        places.taken.insert(number);
        Place {
            number,
            queue: self.clone(),
        }
    }
}

impl Queue {
    /// Waits this long until no thread makes or ends a machine. Returns whether there is none.
    pub fn is_empty_within(&self, patience: Duration) -> bool {
        let Shared { places, left } = &*self.0;
        let places = places.lock_unpoisoned();
        let waited = left.wait_timeout_while(places, patience, |places| !places.taken.is_empty());
        let (places, _) = waited.unwrap_or_else(PoisonError::into_inner);
        places.taken.is_empty()
    }
}

impl Place {
    /// Waits until all places before this one have been left. Returns whether they have; otherwise it was cancelled.
    pub fn wait(&self, cancel: &Cancel) -> bool {
        /// Interval for looking at whether it is cancelled.
        const LOOK: Duration = Duration::from_millis(20);
        let Shared { places, left } = &*self.queue.0;
        let mut places = places.lock_unpoisoned();
        while places.taken.first() != Some(&self.number) {
            if cancel.is_cancelled() {
                return false;
            }
            let waited = left.wait_timeout(places, LOOK);
            places = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        !cancel.is_cancelled()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Shared { places, left } = &*self.queue.0;
        places.lock_unpoisoned().taken.remove(&self.number);
        left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn a_place_is_waited_for_until_those_before_it_are_left() {
        let queue = Queue::default();
        let [first, second] = [queue.place(), queue.place()];
        assert!(first.wait(&Cancel::default()));
        let cancelled = Cancel::default();
        cancelled.cancel();
        assert!(!second.wait(&cancelled));
        let (waits, waited) = mpsc::channel();
        let thread = thread::spawn(move || {
            let is_first = second.wait(&Cancel::default());
            waits.send(is_first).unwrap();
        });
        assert!(waited.recv_timeout(Duration::from_millis(50)).is_err());
        drop(first);
        assert!(waited.recv().unwrap());
        thread.join().unwrap();
        assert!(queue.is_empty_within(Duration::ZERO));
        // A place that is given up delays no other.
        let [_, last] = [queue.place(), queue.place()];
        assert!(last.wait(&Cancel::default()));
    }
}
