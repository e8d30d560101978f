//! How an application moves.

use std::time::Duration;

/// How an application moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Maximum time for outstanding work to finish.
    pub drain: Duration,
    /// Whether contents of large memory objects follow when the destination serves (postcopy). The source is needed
    /// until then.
    pub postcopy: bool,
}
