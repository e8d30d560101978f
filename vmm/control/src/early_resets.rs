//! Notices a guest that resets itself again and again, before it has used a device: firmware or a kernel that cannot
//! start on this machine does that, often without a word.

use std::time::{Duration, Instant};

/// A reset this soon after a boot is early.
const SOON: Duration = Duration::from_secs(2);

/// So many early resets, one after the other, are reported.
const IN_A_ROW: u32 = 3;

/// Early resets since the guest has last run for longer.
#[derive(Debug, Default)]
pub(super) struct EarlyResets {
    booted: Option<Instant>,
    in_a_row: u32,
}

impl EarlyResets {
    /// The VM has booted.
    pub(super) fn booted(&mut self, now: Instant) {
        self.booted = Some(now);
    }

    /// The guest has asked for a reset. Returns whether that is to be reported: once for each row.
    pub(super) fn reset(&mut self, now: Instant, has_driver: bool) -> bool {
        let Some(booted) = self.booted.take() else {
            return false;
        };
        if has_driver || now.saturating_duration_since(booted) >= SOON {
            self.in_a_row = 0;
            return false;
        }
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.in_a_row == IN_A_ROW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_early_resets_in_a_row_without_a_driver_are_reported_and_once() {
        let start = Instant::now();
        let mut resets = EarlyResets::default();
        let mut boot = |after: u64, has_driver| {
            resets.booted(start);
            resets.reset(start + Duration::from_millis(after), has_driver)
        };
        let early = [1999, 0, 100, 100, 100].map(|after| boot(after, false));
        assert_eq!(early, [false, false, true, false, false]);
        // One that runs for a while, and one that has a driver, begin a new row.
        for (after, has_driver) in [(2000, false), (0, true)] {
            assert!(!boot(after, has_driver));
            let again = [0; 4].map(|after| boot(after, false));
            assert_eq!(again, [false, false, true, false]);
        }
        // A second request for the same reset, and one of a guest that was restored.
        assert!(!resets.reset(start, false));
        assert!(!EarlyResets::default().reset(start, false));
    }
}
