//! Memory that graphs allocate and free.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::streams;
use crate::driver::{
    memory::{Kind, memory},
    stream::{Graph, Stream, Task},
};

/// Memory that launches have left allocated.
static LEFT: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn left() -> MutexGuard<'static, BTreeSet<u64>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records that memory was freed, which may be a graph's.
pub(super) fn freed(at: u64) {
    left().remove(&at);
}

/// Memory that a graph allocates. Here it exists as long as the graph does, and as long as a launch has left it
/// allocated.
struct Allocated(u64);

/// Makes a graph allocate memory on each launch. Returns a launch's work for it.
pub(super) fn allocating(graph: &Graph, at: u64) -> Task {
    graph.keep(at, Arc::new(Allocated(at)));
    Arc::new(move |_: &_| {
        left().insert(at);
        Ok(())
    })
}

/// A launch's work for freeing a graph's memory.
pub(super) fn freeing(at: u64) -> Task {
    Arc::new(move |_: &_| {
        freed(at);
        Ok(())
    })
}

/// If a stream is being captured, makes its graph allocate memory.
pub(super) fn capture_allocation(stream: &Stream, at: u64) {
    if let Some(graph) = &*streams::capture(stream) {
        graph.push(allocating(graph, at));
    }
}

/// If the stream is being captured, makes its graph free memory. Returns whether it is.
pub(super) fn capture_free(stream: &Stream, at: u64) -> bool {
    let graph = streams::capture(stream);
    graph
        .as_ref()
        .map(|graph| graph.push(freeing(at)))
        .is_some()
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if left().contains(&self.0) {
            return;
        }
        // The program may have freed it already.
        let _ = memory().free(self.0, &[Kind::Device]);
    }
}
