//! The addresses that belong to the client, which are all that copies and fills may access.
//!
//! The driver accepts any address of this process where it takes a device address. Anything outside this list is
//! therefore refused first.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use remoting_session::quota::Charge;

/// How many ranges before an address are checked: ranges of graphs may lie within each other.
const NEAR: usize = 64;

/// A graph that allocates a range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocating {
    /// Number of the graph or executable graph.
    pub(super) graph: u32,
    /// Whether the graph frees what it allocates, so that a launch leaves nothing allocated.
    pub(super) frees: bool,
}

/// An address range that the client may use.
#[derive(Debug)]
pub(super) struct Stretch {
    pub(super) size: u64,
    /// The context with which it is freed; 0 for none.
    pub(super) context: u32,
    /// The module or library with which it is freed; 0 for none.
    pub(super) owner: u32,
    /// Whether the client frees it explicitly.
    pub(super) freed: bool,
    /// Whether a graph allocated it.
    pub(super) of_graph: bool,
    /// The graphs, including executable ones, that allocate it. It belongs to the client while there is any.
    pub(super) graphs: Vec<Allocating>,
    /// The charge for it. A graph's range has one while a launch may have left it allocated: it then belongs to the
    /// client until the client frees it, whatever becomes of the graphs.
    pub(super) charge: Option<Arc<Charge>>,
}

impl Stretch {
    /// Whether the driver may cache the memory for a pool or for graphs after the client has freed it.
    pub(super) fn is_kept(&self) -> bool {
        self.of_graph || self.freed && self.context == 0
    }
}

/// All ranges of the client.
#[derive(Debug, Default)]
pub(super) struct Memory {
    stretches: BTreeMap<u64, Stretch>,
    /// Bytes allocated by graphs, by graph number.
    of_graphs: HashMap<u32, u64>,
}

impl Memory {
    /// Adds a range.
    pub(super) fn insert(&mut self, at: u64, stretch: Stretch) {
        self.stretches.insert(at, stretch);
    }

    /// Records that a graph allocates a range, possibly one that this or another graph has allocated and freed before.
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
        // It is allocated again, and must be freed again.
        stretch.graphs.retain(|one| one.graph != graph);
        let frees = false;
        stretch.graphs.push(Allocating { graph, frees });
    }

    /// Records that a graph frees a range, possibly one that it allocates itself.
    pub(super) fn freed_by_graph(&mut self, at: u64, graph: u32) {
        let Some(stretch) = self.stretches.get_mut(&at) else {
            return;
        };
        for one in stretch.graphs.iter_mut().filter(|one| one.graph == graph) {
            one.frees = true;
        }
    }

    /// The number of ranges.
    pub(super) fn count(&self) -> usize {
        self.stretches.len()
    }

    /// The bytes that a graph allocates.
    pub(super) fn of_graph(&self, graph: u32) -> u64 {
        self.of_graphs.get(&graph).copied().unwrap_or(0)
    }

    /// Records that a graph has been instantiated as an executable graph.
    pub(super) fn instantiated(&mut self, graph: u32, executable: u32) {
        for stretch in self.stretches.values_mut() {
            let of = stretch.graphs.iter().find(|one| one.graph == graph);
            if let Some(&Allocating { frees, .. }) = of {
                let graph = executable;
                stretch.graphs.push(Allocating { graph, frees });
            }
        }
    }

    /// Records the launch of an executable graph, with its charge.
    pub(super) fn launched(&mut self, executable: u32, charge: &Arc<Charge>) {
        for stretch in self.stretches.values_mut() {
            let mut own = stretch.graphs.iter();
            if own.any(|one| one.graph == executable && !one.frees) {
                stretch.charge = Some(Arc::clone(charge));
            }
        }
    }

    /// Forgets a destroyed graph, executable or not. What a launch has left allocated stays.
    pub(super) fn forget_graph(&mut self, graph: u32) {
        self.of_graphs.remove(&graph);
        self.stretches.retain(|_, stretch| {
            let before = stretch.graphs.len();
            stretch.graphs.retain(|one| one.graph != graph);
            before == 0 || !stretch.graphs.is_empty() || stretch.charge.is_some()
        });
    }

    /// Records that the client has freed a range explicitly, and returns its charge. A range that graphs allocate is
    /// kept, because they may allocate it again.
    pub(super) fn freed(&mut self, at: u64) -> Option<Arc<Charge>> {
        match self.stretches.get_mut(&at) {
            Some(stretch) if !stretch.graphs.is_empty() => stretch.charge.take(),
            _ => self.stretches.remove(&at)?.charge,
        }
    }

    /// The range that starts at this address.
    pub(super) fn get(&self, at: u64) -> Option<&Stretch> {
        self.stretches.get(&at)
    }

    /// The charge for the memory at this address, if a range has one.
    pub(super) fn charge_at(&self, at: u64) -> Option<Arc<Charge>> {
        let before = self.stretches.range(..=at).rev().take(NEAR);
        let mut holding = before.filter(|(start, stretch)| at - **start < stretch.size);
        holding.find_map(|(_, stretch)| stretch.charge.clone())
    }

    /// Whether the whole range is the client's: within one range, or within several adjacent ones.
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

    /// Removes all ranges within the given range.
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

    /// Forgets the ranges of a context.
    pub(super) fn forget_context(&mut self, context: u32) {
        self.stretches
            .retain(|_, stretch| stretch.context != context);
    }

    /// Forgets the ranges of a module or library.
    pub(super) fn forget_owner(&mut self, owner: u32) {
        self.stretches.retain(|_, stretch| stretch.owner != owner);
    }
}

#[cfg(test)]
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
        // A range within another.
        memory.insert_of_graph(0x1800, 0x100, 16, graph);
        assert_eq!(memory.of_graph(graph), 0x3100);
        assert!(memory.holds(0x1000, 0x2000) && memory.holds(0x1810, 0x1000));
        assert!(!memory.holds(0x1810, 0x2000));
        // An executable graph has all of it, even after the graph is gone.
        memory.instantiated(graph, 21);
        memory.forget_graph(graph);
        assert_eq!(memory.of_graph(graph), 0);
        assert!(memory.holds(0x1000, 0x2000));
        memory.forget_graph(21);
        assert_eq!(memory.count(), 0);
    }

    #[test]
    fn what_a_launch_leaves_allocated_is_charged_until_it_is_freed() {
        let quota = remoting_session::quota::Quota::new(0x4000);
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
