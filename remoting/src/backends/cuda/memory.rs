//! Which addresses are the client's: everything that copies and fills may touch.
//!
//! The driver itself takes any address of this process where it takes one of a device, so that what
//! is not in this list is refused before.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use crate::session::quota::Charge;

/// How many stretches before an address are looked at: those of graphs may lie within each other.
const NEAR: usize = 64;

/// A graph that allocates a stretch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocating {
    /// Its number, or an executable graph's.
    pub(super) graph: u32,
    /// Whether it frees what it allocates, so that nothing is left behind a launch.
    pub(super) frees: bool,
}

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
    /// A graph has allocated it.
    pub(super) of_graph: bool,
    /// The graphs, also executable ones, that allocate it: as long as there is one, it is the client's.
    pub(super) graphs: Vec<Allocating>,
    /// What it costs. A graph's stretch has this while a launch may have left it allocated: it is the
    /// client's until that frees it, whatever becomes of the graphs.
    pub(super) charge: Option<Arc<Charge>>,
}

impl Stretch {
    /// Whether the driver may keep the memory for a pool or for graphs when the client has freed it.
    pub(super) fn is_kept(&self) -> bool {
        self.of_graph || self.freed && self.context == 0
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Memory {
    stretches: BTreeMap<u64, Stretch>,
    /// Bytes that graphs allocate, by their numbers.
    of_graphs: HashMap<u32, u64>,
}

impl Memory {
    /// Adds a stretch.
    pub(super) fn insert(&mut self, at: u64, stretch: Stretch) {
        self.stretches.insert(at, stretch);
    }

    /// A graph allocates a stretch: also one that it, or another one, has allocated and freed before.
    pub(super) fn insert_of_graph(&mut self, at: u64, size: u64, context: u32, graph: u32) {
        let bytes = self.of_graphs.entry(graph).or_default();
        *bytes = bytes.saturating_add(size);
        let stretch = self.stretches.entry(at).or_insert(Stretch {
            size: 0,
            context,
            owner: 0,
            freed: true,
            of_graph: true,
            graphs: Vec::new(),
            charge: None,
        });
        stretch.size = stretch.size.max(size);
        // It is allocated anew, to be freed once more.
        stretch.graphs.retain(|one| one.graph != graph);
        let frees = false;
        stretch.graphs.push(Allocating { graph, frees });
    }

    /// A graph frees a stretch that it may allocate itself.
    pub(super) fn freed_by_graph(&mut self, at: u64, graph: u32) {
        let Some(stretch) = self.stretches.get_mut(&at) else {
            return;
        };
        for one in stretch.graphs.iter_mut().filter(|one| one.graph == graph) {
            one.frees = true;
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.stretches.len()
    }

    /// Bytes that a graph allocates.
    pub(super) fn of_graph(&self, graph: u32) -> u64 {
        self.of_graphs.get(&graph).copied().unwrap_or(0)
    }

    /// An executable graph has been made of a graph.
    pub(super) fn instantiated(&mut self, graph: u32, executable: u32) {
        for stretch in self.stretches.values_mut() {
            let of = stretch.graphs.iter().find(|one| one.graph == graph);
            if let Some(&Allocating { frees, .. }) = of {
                let graph = executable;
                stretch.graphs.push(Allocating { graph, frees });
            }
        }
    }

    /// An executable graph has been launched, which costs this.
    pub(super) fn launched(&mut self, executable: u32, charge: &Arc<Charge>) {
        for stretch in self.stretches.values_mut() {
            let mut own = stretch.graphs.iter();
            if own.any(|one| one.graph == executable && !one.frees) {
                stretch.charge = Some(Arc::clone(charge));
            }
        }
    }

    /// A graph has gone, executable or not. What a launch has left allocated stays.
    pub(super) fn forget_graph(&mut self, graph: u32) {
        self.of_graphs.remove(&graph);
        self.stretches.retain(|_, stretch| {
            let before = stretch.graphs.len();
            stretch.graphs.retain(|one| one.graph != graph);
            before == 0 || !stretch.graphs.is_empty() || stretch.charge.is_some()
        });
    }

    /// The client has freed a stretch by itself: what it cost. What a graph allocates, it allocates again.
    pub(super) fn freed(&mut self, at: u64) -> Option<Arc<Charge>> {
        match self.stretches.get_mut(&at) {
            Some(stretch) if !stretch.graphs.is_empty() => stretch.charge.take(),
            _ => self.stretches.remove(&at)?.charge,
        }
    }

    /// The stretch that begins here.
    pub(super) fn get(&self, at: u64) -> Option<&Stretch> {
        self.stretches.get(&at)
    }

    /// Whether all of a stretch is the client's: within one, or within several that follow each
    /// other.
    pub(super) fn holds(&self, at: u64, size: u64) -> bool {
        let Some(end) = at.checked_add(size) else {
            return false;
        };
        let mut at = at;
        loop {
            let before = self.stretches.range(..=at).rev().take(NEAR);
            let mut ends = before.map(|(start, stretch)| start.saturating_add(stretch.size));
            let Some(until) = ends.find(|until| *until >= end || *until > at) else {
                return false;
            };
            if end <= until {
                return true;
            }
            at = until;
        }
    }

    /// Takes all stretches within another.
    pub(super) fn remove_within(&mut self, at: u64, size: u64) {
        let end = at.saturating_add(size);
        let inside: Vec<u64> = self
            .stretches
            .range(at..end)
            .map(|(start, _)| *start)
            .collect();
        for start in inside {
            self.stretches.remove(&start);
        }
    }

    /// Forgets what goes with a context.
    pub(super) fn forget_context(&mut self, context: u32) {
        self.stretches
            .retain(|_, stretch| stretch.context != context);
    }

    /// Forgets what goes with a module or library.
    pub(super) fn forget_owner(&mut self, owner: u32) {
        self.stretches.retain(|_, stretch| stretch.owner != owner);
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
                    of_graph: false,
                    graphs: Vec::new(),
                    charge: None,
                },
            );
        }
        assert!(memory.holds(0x1800, 0x1800));
        assert!(!memory.holds(0x1800, 0x1801));
        assert!(!memory.holds(0xfff, 2) && !memory.holds(u64::MAX, 2));
        memory.forget_context(16);
        assert!(!memory.holds(0x1000, 1));
    }

    #[test]
    fn a_graph_that_allocates_at_an_address_again_keeps_the_larger_stretch() {
        let mut memory = Memory::default();
        let graph = 20;
        memory.insert_of_graph(0x1000, 0x2000, 16, graph);
        memory.freed_by_graph(0x1000, graph);
        memory.insert_of_graph(0x1000, 0x1000, 16, graph);
        // Within it, too.
        memory.insert_of_graph(0x1800, 0x100, 16, graph);
        assert_eq!(memory.of_graph(graph), 0x3100);
        assert!(memory.holds(0x1000, 0x2000) && memory.holds(0x1810, 0x1000));
        assert!(!memory.holds(0x1810, 0x2000));
        // An executable graph has all of it, also when the graph has gone.
        memory.instantiated(graph, 21);
        memory.forget_graph(graph);
        assert_eq!(memory.of_graph(graph), 0);
        assert!(memory.holds(0x1000, 0x2000));
        memory.forget_graph(21);
        assert_eq!(memory.count(), 0);
    }

    #[test]
    fn what_a_launch_leaves_allocated_is_charged_until_it_is_freed() {
        let quota = crate::session::quota::Quota::new(0x4000);
        let mut memory = Memory::default();
        let (graph, executable) = (20, 21);
        memory.insert_of_graph(0x1000, 0x1000, 16, graph);
        memory.insert_of_graph(0x2000, 0x1000, 16, graph);
        memory.freed_by_graph(0x2000, graph);
        memory.instantiated(graph, executable);
        let charge = Arc::new(quota.charge(memory.of_graph(graph)).unwrap());
        memory.launched(executable, &charge);
        drop(charge);
        memory.forget_graph(executable);
        memory.forget_graph(graph);
        assert!(memory.holds(0x1000, 0x1000) && !memory.holds(0x2000, 1));
        assert_eq!(quota.left(), 0x2000);
        memory.freed(0x1000);
        assert_eq!((quota.left(), memory.count()), (0x4000, 0));
    }
}
