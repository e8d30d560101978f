//! How long work that a guest has caused may hold the lock of the virtual GPU.

use std::time::{Duration, Instant};

/// When the work must stop for now, because others wait for the lock. The rest is left to the
/// thread of the virtual GPU, which takes the lock again for each step.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    /// `step` from now on.
    pub fn after(step: Duration) -> Self {
        Self(Instant::now() + step)
    }

    /// Whether it is over. Ask after a piece of work, not before: then each step makes progress.
    pub fn is_over(self) -> bool {
        Instant::now() >= self.0
    }

    /// Time left.
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}
