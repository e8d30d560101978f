//! Sleeping until the machine's interrupt, for applications in a guest.
//!
//! ```text
//!   application: reads the page's count, asks in the word, sleeps on the count
//!   worker:      changes the word, and interrupts if it was asked to      (outside of the guest)
//!   agent:       at an interrupt for the slice, changes the count and wakes who sleeps on it
//! ```
//!
//! An interrupt costs the guest some exits and the wake-up of two threads, so only a thread that has waited for
//! [`LONG`] asks for one. The word counts in steps of two, and its lowest bit is the request for an interrupt. Both
//! sides change the word atomically: either the sleeper sees that somebody has rung, or the ringer sees the request. No
//! wake-up is lost (model-checked by `loom` below), and a sleeper that naps costs the ringer no system call.

use std::{os::fd::OwnedFd, time::Duration};

use base::Mapping;

use super::{
    bell::{Bell, Futex},
    mapping::{self, Error, create},
    sync::{AtomicU32, Ordering},
};

/// A thread that has waited this long asks for an interrupt.
pub const LONG: Duration = Duration::from_millis(1);

const ASKED: u32 = 1;
const RING: u32 = 2;
const SIZE: u64 = 4096;

/// Changes a word on which an application in a guest sleeps. Returns whether the application has asked for an
/// interrupt; the request is cleared.
pub fn ring(word: &AtomicU32) -> bool {
    let asked = word.fetch_add(RING, Ordering::SeqCst) & ASKED != 0;
    if asked {
        // A thread that has asked again since then is interrupted for this ring, and asks once more.
        word.fetch_and(!ASKED, Ordering::SeqCst);
    }
    asked
}

/// Asks for an interrupt, unless somebody has rung since the word was `seen`. Returns whether it asked.
fn ask(word: &AtomicU32, seen: u32) -> bool {
    let asked = word.compare_exchange(seen, seen | ASKED, Ordering::SeqCst, Ordering::SeqCst);
    asked.is_ok()
}

/// Withdraws the request for an interrupt.
fn unask(word: &AtomicU32) {
    word.fetch_and(!ASKED, Ordering::SeqCst);
}

/// A page that an application and its agent share: a count on which threads sleep. The worst that either can do to the
/// other is to make it sleep too long or too short.
#[derive(Debug)]
pub struct Alarm(Mapping);

impl Alarm {
    /// Creates a page, and its file for the other side, which cannot shorten it.
    pub fn create() -> Result<(Self, OwnedFd), Error> {
        let file = create(SIZE)?;
        Ok((Self::map(&file)?, file))
    }

    /// Maps a page that the other side created.
    pub fn map(file: &OwnedFd) -> Result<Self, Error> {
        mapping::map(file, 0, SIZE).map(Self)
    }

    fn count(&self) -> &AtomicU32 {
        // SAFETY: the first bytes of a page that is mapped as long as the value lives; any bytes are a valid number.
        unsafe { &*self.0.start().cast() }
    }

    /// Wakes the sleepers.
    pub fn wake(&self) {
        let patience = Duration::ZERO;
        Futex { patience }.ring(self.count());
    }

    /// Sleeps until somebody has rung since the word was `seen`, or until woken for another reason; at most for
    /// `patience`.
    pub fn sleep(&self, word: &AtomicU32, seen: u32, patience: Duration) {
        let before = self.count().load(Ordering::SeqCst);
        if ask(word, seen) {
            Futex { patience }.wait(self.count(), before, Duration::ZERO);
            unask(word);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const FOR_EVER: Duration = Duration::from_secs(86_400);

    #[test]
    fn who_has_been_rung_for_before_does_not_sleep() {
        let (alarm, _) = Alarm::create().unwrap();
        let word = AtomicU32::new(0);
        assert!(!ring(&word), "nobody asks");
        alarm.sleep(&word, 0, FOR_EVER);
        assert_eq!(word.into_inner(), RING);
    }

    #[test]
    fn who_sleeps_asks_and_is_woken_by_the_other_sides_page() {
        let (ours, file) = Alarm::create().unwrap();
        let theirs = Alarm::map(&file).unwrap();
        let word = AtomicU32::new(RING);
        std::thread::scope(|scope| {
            scope.spawn(|| ours.sleep(&word, RING, FOR_EVER));
            while word.load(Ordering::SeqCst) & ASKED == 0 {
                std::thread::yield_now();
            }
            assert!(ring(&word));
            assert!(!ring(&word), "it has been asked once");
            theirs.wake();
        });
        assert_eq!(word.into_inner(), 3 * RING);
    }

    #[test]
    fn who_sleeps_in_vain_asks_no_more() {
        let (alarm, _) = Alarm::create().unwrap();
        let word = AtomicU32::new(0);
        alarm.sleep(&word, 0, Duration::from_millis(1));
        assert_eq!(word.into_inner(), 0);
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p remoting-transport --lib --release alarm`
#[cfg(loom)]
mod model {
    use loom::{sync::Arc, thread};

    use super::*;

    /// The word, and the count of the page.
    type Shared = Arc<(AtomicU32, AtomicU32)>;

    /// The worker's and the agent's part.
    fn interrupt(shared: &Shared) {
        if ring(&shared.0) {
            shared.1.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// [`Alarm::sleep`], until woken: a lost wake-up is a deadlock, which loom reports. `spurious` is the
    /// number of spurious wake-ups.
    fn sleep(shared: &Shared, seen: u32, spurious: &mut u32) {
        let (word, count) = &**shared;
        let before = count.load(Ordering::SeqCst);
        if ask(word, seen) {
            while *spurious == 0 && count.load(Ordering::SeqCst) == before {
                thread::yield_now();
            }
            *spurious = spurious.saturating_sub(1);
            unask(word);
        }
    }

    /// Sleeps until the word has been rung `rings` times.
    fn wait_for(shared: &Shared, rings: u32, mut spurious: u32) {
        loop {
            let seen = shared.0.load(Ordering::SeqCst);
            if seen / RING >= rings {
                return;
            }
            sleep(shared, seen, &mut spurious);
        }
    }

    fn check(ringers: u32, each: u32, spurious: u32) {
        let mut model = loom::model::Builder::new();
        // LOOM_MAX_PREEMPTIONS asks for more. With three, all models took 48 minutes beside other tests.
        model.preemption_bound.get_or_insert(2);
        model.check(move || {
            let shared = Shared::default();
            let ringers: Vec<_> = (0..ringers)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || (0..each).for_each(|_| interrupt(&shared)))
                })
                .collect();
            wait_for(&shared, ringers.len() as u32 * each, spurious);
            for ringer in ringers {
                ringer.join().unwrap();
            }
            assert_eq!(shared.0.load(Ordering::SeqCst) & ASKED, 0);
        });
    }

    #[test]
    fn no_ring_is_slept_through() {
        check(1, 2, 0);
    }

    #[test]
    fn nor_after_a_sleep_that_ended_for_no_reason() {
        check(1, 2, 1);
    }

    /// The worker, and another thread of the application.
    #[test]
    fn nor_where_two_ring() {
        check(2, 1, 1);
    }
}
