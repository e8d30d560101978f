//! What host functions of graphs look at, and what they leave. When a graph copies to memory of the
//! program that is not pinned, the data first arrives in the window. If the graph calls a function of
//! the program after such a copy, the data is moved to its destination before the function is called:
//! once, since the function may change it. When a graph copies from registered memory after a
//! function, the data is moved to the window after the function has returned: natively, the device
//! reads registered memory when the copy is executed, and other memory when the graph is launched.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use remoting_proto::apis::cuda::{Kind, codes};

use crate::{
    entry::Outcome,
    forward::forward,
    handles,
    paged::{Call, Paged},
};

/// The order of functions and copies of a graph.
#[derive(Debug, Default)]
pub struct Before {
    /// For each node that calls a function, the preceding nodes that copy to the program.
    copies: HashMap<u32, HashSet<u32>>,
    /// For each node that copies from the program, the preceding nodes that call functions.
    calls: HashMap<u32, HashSet<u32>>,
}

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

/// The order of the functions and copies of a graph. None if it has only one of these, or if it is unknown. Copies from
/// memory that is not registered do not count: they read it when the graph is launched, whatever precedes them.
pub fn before(graph: u32, calls: &[Call], copies: &[Paged]) -> Option<Before> {
    let (back, there): (Vec<&Paged>, Vec<&Paged>) = copies
        .iter()
        .filter(|copy| copy.is_to_host() || copy.is_registered())
        .partition(|copy| copy.is_to_host());
    let [back, there] = [back, there].map(|all| nodes(all.into_iter().map(Paged::node)));
    let called = nodes(calls.iter().map(|call| call.node));
    if calls.is_empty() || back.is_empty() && there.is_empty() {
        return None;
    }
    // For nodes of child graphs, the order is unknown.
    if [&back, &there, &called].iter().any(|all| all.contains(&0)) {
        return None;
    }
    let mut above: HashMap<u32, Vec<u32>> = HashMap::new();
    for (from, to) in edges(graph).ok()? {
        above.entry(to).or_default().push(from);
    }
    let preceding = |nodes: HashSet<u32>, wanted: &HashSet<u32>| {
        let found = nodes.into_iter().map(|node| {
            let (mut seen, mut next) = (HashSet::new(), vec![node]);
            while let Some(node) = next.pop() {
                let all = above.get(&node).into_iter().flatten();
                next.extend(all.copied().filter(|node| seen.insert(*node)));
            }
            (node, seen.intersection(wanted).copied().collect())
        });
        found.collect()
    };
    Some(Before {
        calls: preceding(there, &called),
        copies: preceding(called, &back),
    })
}

fn nodes(all: impl Iterator<Item = u32>) -> HashSet<u32> {
    all.collect()
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

/// What is moved when a graph calls a function.
#[derive(Clone, Debug, Default)]
struct Around {
    /// What lands before.
    before: Vec<Arc<Landing>>,
    /// What the graph copies from the program afterwards.
    after: Vec<Paged>,
}

/// By the connection's number of the function.
type Awaited = HashMap<u64, Around>;

/// For the launches in flight. Of launches with a common function, only one is in flight at a time.
static UNDER_WAY: Mutex<Option<Awaited>> = Mutex::new(None);

/// A launch of a graph that copies to or from the program.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    all: Vec<Arc<Landing>>,
    awaited: Awaited,
}

impl Launch {
    /// A launch with these copies to the program, and those from it.
    ///
    /// # Errors
    /// It is unknown which copies to the program precede a function, or which functions precede a copy from registered
    /// memory.
    pub fn new(
        back: Vec<Paged>,
        there: &[Paged],
        calls: &[Call],
        before: Option<&Before>,
    ) -> Outcome<Self> {
        let landing = |copy| {
            let has_landed = AtomicBool::new(false);
            Arc::new(Landing { copy, has_landed })
        };
        let all: Vec<_> = back.into_iter().map(landing).collect();
        let mut awaited = Awaited::new();
        let unknown = codes::NOT_SUPPORTED;
        if !all.is_empty() {
            for call in calls {
                let before = before.and_then(|before| before.copies.get(&call.node));
                let before = before.ok_or(unknown)?;
                let own = all.iter().filter(|one| before.contains(&one.copy.node()));
                awaited.entry(call.function).or_default().before = own.cloned().collect();
            }
        }
        for copy in there.iter().filter(|copy| copy.is_registered()) {
            if calls.is_empty() {
                break;
            }
            let before = before.ok_or(unknown)?;
            let is_known = |call: &Call| before.copies.contains_key(&call.node);
            let preceding = before.calls.get(&copy.node()).ok_or(unknown)?;
            for call in calls {
                if !is_known(call) {
                    return Err(unknown);
                }
                if preceding.contains(&call.node) {
                    let around = awaited.entry(call.function).or_default();
                    around.after.push(copy.clone());
                }
            }
        }
        Ok(Self { all, awaited })
    }

    /// Whether anything is moved when functions are called.
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

fn around(function: u64) -> Around {
    let all = UNDER_WAY.lock_unpoisoned();
    let around = all.as_ref().and_then(|all| all.get(&function).cloned());
    around.unwrap_or_default()
}

/// Called before a graph calls a function.
pub fn before_call(function: u64) {
    around(function).before.iter().for_each(|one| one.land());
}

/// Called when a function that a graph calls has returned.
pub fn after_call(function: u64) {
    for copy in around(function).after {
        // SAFETY: the program's memory exists until the launch's work is done, and that of the copy comes after this.
        unsafe { copy.carry() };
    }
}
