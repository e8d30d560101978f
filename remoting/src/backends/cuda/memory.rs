//! Which addresses are the client's: everything that copies and fills may touch.
//!
//! The driver itself takes any address of this process where it takes one of a device, so that what
//! is not in this list is refused before.

use std::{collections::BTreeMap, sync::Arc};

use crate::session::quota::Charge;

/// A stretch of addresses that the client may use.
#[derive(Debug)]
pub(super) struct Stretch {
    pub(super) size: u64,
    /// The context that it goes with; 0 for none.
    pub(super) context: u32,
    /// The module or library that it goes with; 0 for none.
    pub(super) owner: u32,
    /// The client frees it by itself.
    pub(super) freed: bool,
    /// The graphs, also executable ones, that allocate it: as long as there is one, it is the client's.
    pub(super) graphs: Vec<u32>,
    pub(super) _charge: Option<Arc<Charge>>,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Memory(BTreeMap<u64, Stretch>);

impl Memory {
    /// Adds a stretch.
    pub(super) fn insert(&mut self, at: u64, stretch: Stretch) {
        self.0.insert(at, stretch);
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// Bytes that a graph allocates.
    pub(super) fn of_graph(&self, graph: u32) -> u64 {
        let own = self.0.values().filter(|one| one.graphs.contains(&graph));
        own.fold(0, |all, one| all.saturating_add(one.size))
    }

    /// An executable graph has been made of a graph.
    pub(super) fn instantiated(&mut self, graph: u32, executable: u32) {
        let own = self.0.values_mut();
        for stretch in own.filter(|one| one.graphs.contains(&graph)) {
            stretch.graphs.push(executable);
        }
    }

    /// A graph has gone, executable or not.
    pub(super) fn forget_graph(&mut self, graph: u32) {
        self.0.retain(|_, stretch| {
            let before = stretch.graphs.len();
            stretch.graphs.retain(|one| *one != graph);
            before == 0 || !stretch.graphs.is_empty()
        });
    }

    /// Takes the stretch that begins here.
    pub(super) fn remove(&mut self, at: u64) -> Option<Stretch> {
        self.0.remove(&at)
    }

    /// The stretch that begins here.
    pub(super) fn get(&self, at: u64) -> Option<&Stretch> {
        self.0.get(&at)
    }

    /// Whether all of a stretch is the client's: within one, or within several that follow each
    /// other.
    pub(super) fn holds(&self, at: u64, size: u64) -> bool {
        let Some(end) = at.checked_add(size) else {
            return false;
        };
        let mut at = at;
        loop {
            let Some((start, stretch)) = self.0.range(..=at).next_back() else {
                return false;
            };
            let until = start + stretch.size;
            if end <= until {
                return true;
            }
            if until <= at {
                return false;
            }
            at = until;
        }
    }

    /// Takes all stretches within another.
    pub(super) fn remove_within(&mut self, at: u64, size: u64) {
        let end = at.saturating_add(size);
        let inside: Vec<u64> = self.0.range(at..end).map(|(start, _)| *start).collect();
        for start in inside {
            self.0.remove(&start);
        }
    }

    /// Forgets what goes with a context.
    pub(super) fn forget_context(&mut self, context: u32) {
        self.0.retain(|_, stretch| stretch.context != context);
    }

    /// Forgets what goes with a module or library.
    pub(super) fn forget_owner(&mut self, owner: u32) {
        self.0.retain(|_, stretch| stretch.owner != owner);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_held_together_and_nothing_beyond() {
        let mut memory = Memory::default();
        for at in [0x1000, 0x2000] {
            memory.insert(
                at,
                Stretch {
                    size: 0x1000,
                    context: 16,
                    owner: 0,
                    freed: true,
                    graphs: Vec::new(),
                    _charge: None,
                },
            );
        }
        assert!(memory.holds(0x1800, 0x1800));
        assert!(!memory.holds(0x1800, 0x1801));
        assert!(!memory.holds(0xfff, 2) && !memory.holds(u64::MAX, 2));
        memory.forget_context(16);
        assert!(!memory.holds(0x1000, 1));
    }
}
