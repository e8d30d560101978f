//! How sleepers are woken: a futex between processes of one machine.
//!
//! Across the boundary of a virtual machine, [`port_bell`](super::port_bell) implements the same trait.

use core::time::Duration;

use super::sync::AtomicU32;
#[cfg(feature = "std")]
use super::sync::Ordering;

/// Rings and sleeps on a word of shared memory.
pub trait Bell {
    /// Changes the word and wakes the sleepers.
    fn ring(&self, word: &AtomicU32);
    /// Sleeps while the word is `seen`, at most for the bell's patience. May wake spuriously, and late by a small share
    /// of `waited`, the time waited so far.
    fn wait(&self, word: &AtomicU32, seen: u32, waited: Duration);
}

/// A futex shared between processes.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug)]
pub struct Futex {
    /// Maximum time of one sleep: the delay until a sleeper notices what nobody rings for (its peer's death).
    pub patience: Duration,
}

#[cfg(all(feature = "std", not(loom)))]
impl Bell for Futex {
    fn ring(&self, word: &AtomicU32) {
        word.fetch_add(1, Ordering::Release);
        // SAFETY: the word is a live, aligned 32-bit word; FUTEX_WAKE reads nothing else.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
                0,
                0,
                0,
            );
        }
    }

    fn wait(&self, word: &AtomicU32, seen: u32, _: Duration) {
        let patience = libc::timespec {
            tv_sec: self.patience.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(self.patience.subsec_nanos()),
        };
        // SAFETY: the word is a live, aligned 32-bit word, and `patience` outlives the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                seen,
                &raw const patience,
                0,
                0,
            );
        }
    }
}

#[cfg(loom)]
impl Bell for Futex {
    fn ring(&self, word: &AtomicU32) {
        word.fetch_add(1, Ordering::Release);
    }

    fn wait(&self, _: &AtomicU32, _: u32, _: Duration) {
        loom::thread::yield_now();
    }
}
