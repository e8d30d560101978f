//! Counts concurrent users of a bounded resource.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// A place that is counted until it is dropped.
pub struct Place(Arc<AtomicUsize>);

impl Place {
    /// Takes a place.
    pub fn take(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
