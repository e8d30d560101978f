//! How long to nap between two looks.

use std::time::Duration;

/// The shortest nap.
pub const SHORTEST_NAP: Duration = Duration::from_micros(20);

/// Above this, naps grow more slowly, and end early when another thread arrives.
pub const USUAL_NAP: Duration = Duration::from_millis(1);

/// The longest nap.
pub const LONGEST_NAP: Duration = Duration::from_millis(20);

/// How long to nap before looking again, after having `waited` so long.
pub fn nap(waited: Duration) -> Duration {
    (waited / 16)
        .min(USUAL_NAP)
        .max(waited / 256)
        .clamp(SHORTEST_NAP, LONGEST_NAP)
}
