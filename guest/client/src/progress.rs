//! How far a queue is known to be: what has nothing to wait for is no call.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the commands of a queue. A command counts once it has been sent, so that whoever has seen
/// its call return finds it counted; a mark is taken before the call that it is for, so that it
/// covers no command which that call does not.
#[derive(Debug, Default)]
pub struct Progress {
    sent: AtomicU64,
    flushed: AtomicU64,
    done: AtomicU64,
}

/// The commands that had been sent at some time.
#[derive(Clone, Copy, Debug)]
pub struct Mark(u64);

impl Progress {
    /// A command has been sent that may not be done.
    pub fn sent(&self) {
        self.sent.fetch_add(1, Ordering::Release);
    }

    /// The commands that have been sent.
    pub fn mark(&self) -> Mark {
        Mark(self.sent.load(Ordering::Acquire))
    }

    /// The device has been given these commands.
    pub fn flushed(&self, Mark(commands): Mark) {
        self.flushed.fetch_max(commands, Ordering::Release);
    }

    /// These commands are done, and the worker has nothing more to say of them.
    pub fn done(&self, mark: Mark) {
        self.flushed(mark);
        self.done.fetch_max(mark.0, Ordering::Release);
    }

    /// Whether all commands have been given to the device.
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
        // Another thread's command, sent while this one waits.
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
