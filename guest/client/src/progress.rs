//! Tracks how far a queue is known to have executed, so that waiting for nothing needs no call.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the commands of a queue. A command is counted after it has been sent, so that a thread
/// that has seen the call return finds it counted. A mark is taken before the call that it is used
/// for, so that it covers no command that the call does not cover.
#[derive(Debug, Default)]
pub struct Progress {
    sent: AtomicU64,
    flushed: AtomicU64,
    done: AtomicU64,
}

/// The commands that had been sent at some point in time.
#[derive(Clone, Copy, Debug)]
pub struct Mark(u64);

impl Progress {
    /// Records that a command was sent that may not be done yet.
    pub fn sent(&self) {
        self.sent.fetch_add(1, Ordering::Release);
    }

    /// The commands that have been sent.
    pub fn mark(&self) -> Mark {
        Mark(self.sent.load(Ordering::Acquire))
    }

    /// Records that these commands were submitted to the device.
    pub fn flushed(&self, Mark(commands): Mark) {
        self.flushed.fetch_max(commands, Ordering::Release);
    }

    /// Records that these commands are done, and that the worker will not report anything else
    /// about them.
    pub fn done(&self, mark: Mark) {
        self.flushed(mark);
        self.done.fetch_max(mark.0, Ordering::Release);
    }

    /// Whether all commands have been submitted to the device.
    pub fn is_flushed(&self) -> bool {
        self.flushed.load(Ordering::Acquire) == self.mark().0
    }

    /// Whether all commands are done.
    pub fn is_idle(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.mark().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_queue_has_nothing_to_wait_for() {
        let progress = Progress::default();
        assert!(progress.is_idle() && progress.is_flushed());
    }

    #[test]
    fn a_command_is_waited_for_until_a_wait_that_began_after_it_is_over() {
        let progress = Progress::default();
        progress.sent();
        assert!(!progress.is_idle() && !progress.is_flushed());
        let mark = progress.mark();
        // A command of another thread, sent while this one waits.
        progress.sent();
        progress.done(mark);
        assert!(!progress.is_idle() && !progress.is_flushed());
        progress.flushed(progress.mark());
        assert!(progress.is_flushed() && !progress.is_idle());
        progress.done(progress.mark());
        assert!(progress.is_idle());
    }

    #[test]
    fn a_late_word_of_an_earlier_wait_takes_nothing_back() {
        let progress = Progress::default();
        let early = progress.mark();
        progress.sent();
        progress.done(progress.mark());
        progress.done(early);
        assert!(progress.is_idle());
    }
}
