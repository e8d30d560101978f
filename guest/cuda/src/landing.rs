//! What host functions of graphs look at. When a graph copies to memory of the program that is not
//! pinned, the data first arrives in the window. If the graph calls a function of the program after
//! such a copy, the data is moved to its destination before the function is called: once, since the
//! function may change it.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use gantry_remoting::apis::cuda::{Kind, codes};

use crate::{
    entry::Outcome,
    forward::forward,
    handles,
    paged::{Call, Paged},
};

/// For each node that calls a function, the preceding nodes that copy to the program.
pub type Before = HashMap<u32, Vec<u32>>;

/// The node numbers at the start and the end of each edge of a graph.
///
/// # Errors
/// The driver's.
pub fn edges(graph: u32) -> Outcome<Vec<(u32, u32)>> {
    let graph = handles::handle(Kind::Graph, graph);
    let mut count = 0usize;
    let words = [graph, 0, 0, 0, &raw mut count as u64];
    // SAFETY: the pointer is to a local.
    unsafe { forward("cuGraphGetEdges_v2", &words)? };
    let [mut from, mut to, mut data] = [(); 3].map(|()| vec![0u64; count]);
    let words = [
        graph,
        from.as_mut_ptr() as u64,
        to.as_mut_ptr() as u64,
        data.as_mut_ptr() as u64,
        &raw mut count as u64,
    ];
    // SAFETY: the arrays have as many elements as are requested, of 8 bytes each.
    unsafe { forward("cuGraphGetEdges_v2", &words)? };
    let node = |handle: &u64| handles::valid(Kind::Node, *handle);
    let pairs = from.iter().zip(&to).take(count);
    pairs
        .map(|(from, to)| Ok((node(from)?, node(to)?)))
        .collect()
}

/// What the functions of a graph look at. None if there is nothing, or if it is unknown.
pub fn before(graph: u32, calls: &[Call], copies: &[Paged]) -> Option<Before> {
    let back: HashSet<u32> = copies
        .iter()
        .filter(|copy| copy.is_to_host())
        .map(Paged::node)
        .collect();
    if calls.is_empty() || back.is_empty() {
        return None;
    }
    // For nodes of child graphs, the order is unknown.
    if back.contains(&0) || calls.iter().any(|call| call.node == 0) {
        return None;
    }
    let mut above: HashMap<u32, Vec<u32>> = HashMap::new();
    for (from, to) in edges(graph).ok()? {
        above.entry(to).or_default().push(from);
    }
    let found = calls.iter().map(|call| {
        let (mut seen, mut next) = (HashSet::new(), vec![call.node]);
        while let Some(node) = next.pop() {
            let all = above.get(&node).into_iter().flatten();
            next.extend(all.copied().filter(|node| seen.insert(*node)));
        }
        (call.node, seen.intersection(&back).copied().collect())
    });
    Some(found.collect())
}

/// A copy to the program in a launch.
#[derive(Debug)]
struct Landing {
    copy: Paged,
    has_landed: AtomicBool,
}

impl Landing {
    fn land(&self) {
        if !self.has_landed.swap(true, Ordering::AcqRel) {
            // SAFETY: the program's memory exists until the launch's work is done.
            unsafe { self.copy.carry() };
        }
    }
}

/// What has to land before a function is called, by the connection's number of the function.
type Awaited = HashMap<u64, Vec<Arc<Landing>>>;

/// For the launches in flight. Of launches with a common function, only one is in flight at a time.
static UNDER_WAY: Mutex<Option<Awaited>> = Mutex::new(None);

/// A launch of a graph that copies to the program.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    all: Vec<Arc<Landing>>,
    awaited: Awaited,
}

impl Launch {
    /// # Errors
    /// It is unknown which copies precede a function.
    pub fn new(copies: Vec<Paged>, calls: &[Call], before: Option<&Before>) -> Outcome<Self> {
        let landing = |copy| {
            let has_landed = AtomicBool::new(false);
            Arc::new(Landing { copy, has_landed })
        };
        let all: Vec<_> = copies.into_iter().map(landing).collect();
        let mut awaited = Awaited::new();
        if !all.is_empty() {
            for call in calls {
                let before = before.and_then(|before| before.get(&call.node));
                let before = before.ok_or(codes::NOT_SUPPORTED)?;
                let own = all.iter().filter(|one| before.contains(&one.copy.node()));
                awaited.insert(call.function, own.cloned().collect());
            }
        }
        Ok(Self { all, awaited })
    }

    /// Whether functions look at what it copies.
    pub fn has_functions(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Called when the launch is about to begin.
    pub fn begin(self) {
        let mut all = UNDER_WAY.lock_unpoisoned();
        all.get_or_insert_default().extend(self.awaited);
    }

    /// Called when the launch has ended.
    pub fn end(self) {
        if let Some(all) = UNDER_WAY.lock_unpoisoned().as_mut() {
            all.retain(|function, _| !self.awaited.contains_key(function));
        }
        self.all.iter().for_each(|one| one.land());
    }
}

/// Called before a graph calls a function.
pub fn before_call(function: u64) {
    let all = UNDER_WAY.lock_unpoisoned();
    let awaited = all.as_ref().and_then(|all| all.get(&function).cloned());
    drop(all);
    awaited.into_iter().flatten().for_each(|one| one.land());
}
