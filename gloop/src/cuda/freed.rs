//! Memory that is freed while kernels run that do not end by themselves: the driver would wait for
//! them. It is freed once no such kernel runs.

use std::sync::{Mutex, PoisonError};

use super::Address;

/// The number of running kernels, and the memory that waits for their end.
#[derive(Debug, Default)]
pub(super) struct Freed(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    running: usize,
    memory: Vec<Address>,
}

impl Freed {
    fn waiting(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called before a kernel is launched that only ends when it is told to.
    pub(super) fn begins(&self) {
        self.waiting().running += 1;
    }

    /// Called when one of these has ended. Returns what is to be freed now.
    pub(super) fn ends(&self) -> Vec<Address> {
        let mut waiting = self.waiting();
        waiting.running = waiting.running.saturating_sub(1);
        match waiting.running {
            0 => std::mem::take(&mut waiting.memory),
            _ => Vec::new(),
        }
    }

    /// Called when memory is to be freed. Returns whether it is to be freed right now.
    pub(super) fn free(&self, at: Address) -> bool {
        let mut waiting = self.waiting();
        let now = waiting.running == 0;
        if !now {
            waiting.memory.push(at);
        }
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_given_up_while_kernels_run_is_freed_when_the_last_one_ends() {
        let freed = Freed::default();
        assert!(freed.free(1));
        freed.begins();
        freed.begins();
        assert!(!freed.free(2));
        assert_eq!(freed.ends(), []);
        assert!(!freed.free(3));
        assert_eq!(freed.ends(), [2, 3]);
        assert!(freed.free(4));
        freed.begins();
        assert_eq!(freed.ends(), []);
    }
}
