//! Graphs with nodes that copy from or to memory of the program that is not pinned. Each such node has a place in the
//! window, which is filled before each launch and emptied after it, in stream order, and before host functions that
//! come after the node in the graph ([`landing`]). A change to such a node is refused if it is unknown which node it
//! is. Such a node is also refused in the graph of a conditional node, since nothing tells whether that graph runs.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{Kind, codes},
    wire::messages::WindowRange,
};

use crate::{
    capture::{self, capturing},
    context,
    entry::{Outcome, connected},
    forward::forward,
    handles,
    landing::{self, Before, Launch},
    link::Link,
    registered,
    streams::copy_in,
    turns::{self, Common},
};

/// The number of places in the window to try for what has to be in one part that the driver knows, in addition to the first:
/// more than there are places where two parts meet in a window of 2 GiB. A place that the driver knows in two parts is
/// unsuitable, but makes the driver know what follows it as one part.
pub const PLACES: usize = 1024;

/// Rows of the program's memory, which are contiguous in the window.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The start of the first row.
    pub at: u64,
    /// Bytes per row, rows per plane, planes.
    pub size: [u64; 3],
    /// The distance between two rows in bytes; `height` is the distance between two planes in rows.
    pub pitch: u64,
    pub height: u64,
}

/// Explains why there is no place for a node's copy. If the window is full, reports once how to make room.
fn no_place(link: &Link, length: u64) -> i32 {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !link.is_shared() {
        return codes::NOT_SUPPORTED;
    }
    if !TOLD.swap(true, Ordering::Relaxed) {
        base::note!(
            "gantry-cuda: the window has no room for a graph's copy of {length} bytes from or to memory that is not pinned, as \
             graphs and pinned memory have the rest: destroy graphs, copy pinned memory, or give the VM's port a larger window"
        );
    }
    codes::OUT_OF_MEMORY
}

/// Space in the window, which is freed with the last copy that refers to it.
#[derive(Debug)]
struct Place {
    offset: u64,
    length: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Ok(link) = connected() {
            link.free(self.offset, self.length);
        }
    }
}

/// A node's copy.
#[derive(Clone, Debug)]
pub struct Paged {
    rows: Rows,
    _place: Arc<Place>,
    /// The address of the place in the program.
    there: u64,
    to_host: bool,
    /// Whether all of its memory is registered.
    is_registered: bool,
    /// The node's number, or 0 if unknown because the node is in a child graph.
    node: u32,
}

impl Paged {
    /// Reserves a place for rows of the program's memory.
    ///
    /// # Errors
    /// There is no shared window, or no room in it.
    pub fn new(link: &Link, rows: Rows, to_host: bool) -> Outcome<(Self, WindowRange)> {
        let [width, count, planes] = rows.size;
        let length = width
            .checked_mul(count)
            .and_then(|bytes| bytes.checked_mul(planes));
        let length = length.ok_or(codes::INVALID_VALUE)?;
        let offset = link.reserve_block(length);
        let offset = offset.ok_or_else(|| no_place(link, length))?;
        let place = Arc::new(Place { offset, length });
        let paged = Self {
            rows,
            _place: place,
            there: link.pointer(offset, length)? as u64,
            to_host,
            is_registered: false,
            node: 0,
        };
        let (first, end) = paged.extent();
        let is_registered = registered::holds(link, first, end - first);
        let paged = Self {
            is_registered,
            ..paged
        };
        let range = WindowRange {
            offset,
            length,
            stage: None,
        };
        Ok((paged, range))
    }

    /// Whether it copies to the program's memory.
    pub fn is_to_host(&self) -> bool {
        self.to_host
    }

    /// Whether it copies from or to registered memory.
    pub fn is_registered(&self) -> bool {
        self.is_registered
    }

    /// The node's number, or 0 if unknown.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// The range of the program's addresses that it may access: the first, and one past the last.
    fn extent(&self) -> (u64, u64) {
        let Rows {
            at,
            size: [width, count, planes],
            pitch,
            height,
        } = self.rows;
        let rows = planes.saturating_sub(1).saturating_mul(height);
        let rows = rows.saturating_add(count.saturating_sub(1));
        let last = at.saturating_add(rows.saturating_mul(pitch));
        (at, last.saturating_add(width))
    }

    /// Moves all rows between the program's memory and the window.
    ///
    /// # Safety
    /// The program's memory exists, as it promises for each launch.
    pub unsafe fn carry(&self) {
        let Rows {
            at,
            size: [width, count, planes],
            pitch,
            height,
        } = self.rows;
        for (index, (plane, row)) in (0..planes)
            .flat_map(|plane| (0..count).map(move |row| (plane, row)))
            .enumerate()
        {
            let here = (at + (plane * height + row) * pitch) as *mut u8;
            let there = (self.there + index as u64 * width) as *mut u8;
            let (to, from) = if self.to_host {
                (here, there)
            } else {
                (there, here)
            };
            // SAFETY: the caller's promise; the place belongs to this node alone.
            unsafe { std::ptr::copy(from, to, width as usize) };
        }
    }
}

/// Copies by the numbers of graphs, of executable graphs, and of captures.
#[derive(Debug, Default)]
struct All {
    graphs: HashMap<u32, Vec<Paged>>,
    executables: HashMap<u32, Vec<Paged>>,
    captures: HashMap<u64, Vec<Paged>>,
    /// The graphs of all nodes that copy.
    nodes: HashMap<u32, u32>,
    /// What graphs, executable graphs and captures call.
    calls: HashMap<Calling, Vec<Call>>,
    /// What the functions of executable graphs look at.
    before: HashMap<u32, Arc<Before>>,
    /// The graphs of conditional nodes, with the graph and the number of the node.
    bodies: HashMap<u32, (u32, u32)>,
    /// Captures to such graphs.
    to_bodies: HashSet<u64>,
    /// The captures of streams that have copied or called. An invalidated capture no longer reports its number.
    streams: HashMap<u32, u64>,
    /// The graphs whose nodes executable graphs have: those that they were last instantiated from or updated to.
    made_of: HashMap<u32, u32>,
}

/// Something that calls functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Calling {
    Graph(u32),
    Executable(u32),
    Capture(u64),
}

/// A function of the program that a graph calls.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The connection's number of the function.
    pub function: u64,
    /// The node's number, or 0 if unknown because it is in a child graph or a conditional node.
    pub node: u32,
}

impl All {
    fn calls_of(&self, one: Calling) -> Vec<Call> {
        self.calls.get(&one).cloned().unwrap_or_default()
    }

    /// Adds calls to `one`, and to the graphs that contain it in a conditional node.
    fn add_calls(&mut self, mut one: Calling, mut calls: Vec<Call>) {
        if calls.is_empty() {
            return;
        }
        loop {
            self.calls.entry(one).or_default().extend_from_slice(&calls);
            let Calling::Graph(graph) = one else {
                return;
            };
            let Some((within, _)) = self.bodies.get(&graph) else {
                return;
            };
            one = Calling::Graph(*within);
            calls.iter_mut().for_each(|call| call.node = 0);
        }
    }

    /// Checks that a graph may contain copies.
    fn may_copy(&self, graph: u32) -> Outcome {
        match self.bodies.contains_key(&graph) {
            true => Err(codes::NOT_SUPPORTED),
            false => Ok(()),
        }
    }

    /// Forgets a graph, and those of its conditional nodes.
    fn forget(&mut self, graph: u32) {
        self.graphs.remove(&graph);
        self.calls.remove(&Calling::Graph(graph));
        self.nodes.retain(|_, of| *of != graph);
        self.bodies.remove(&graph);
        self.forget_bodies(|within, _| within == graph);
    }

    /// Forgets a capture. Everything that it had becomes part of a graph, or is dropped.
    fn forget_capture(&mut self, id: u64) {
        self.captures.remove(&id);
        self.calls.remove(&Calling::Capture(id));
        self.to_bodies.remove(&id);
        self.streams.retain(|_, one| *one != id);
    }

    fn forget_bodies(&mut self, go: impl Fn(u32, u32) -> bool) {
        let all = self.bodies.iter();
        let gone = all.filter(|(_, (within, node))| go(*within, *node));
        for body in gone.map(|(body, _)| *body).collect::<Vec<_>>() {
            self.forget(body);
        }
    }
}

impl All {
    /// Whether an executable graph has copies that belong to nodes of a graph other than that of this node.
    fn is_of_another(&self, executable: u32, node: u32) -> bool {
        let copies = self.executables.get(&executable);
        copies.is_some_and(|copies| !copies.is_empty())
            && self.nodes.get(&node).is_some_and(|graph| {
                let made_of = self.made_of.get(&executable);
                made_of.is_some_and(|made_of| made_of != graph)
            })
    }

    /// Whether any of these copies may belong to this node.
    fn may_have<'a>(&self, node: u32, mut copies: impl Iterator<Item = &'a Paged>) -> bool {
        let is_known = self.nodes.contains_key(&node);
        copies.any(|one| one.node == node || one.node == 0 && !is_known)
    }
}

static ALL: Mutex<Option<All>> = Mutex::new(None);

/// Locks what is known, if any graph has ever had a node that copies.
fn all() -> Option<MutexGuard<'static, Option<All>>> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.is_some().then_some(all)
}

/// Records that a graph has a conditional node with these graphs.
pub fn has_bodies(graph: u32, node: u32, bodies: &[u32]) {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    let bodies = bodies.iter().map(|body| (*body, (graph, node)));
    all.bodies.extend(bodies);
}

/// Checks that a graph can have a node with this copy.
///
/// # Errors
/// The graph is a conditional node's.
pub fn may_add(graph: u32, paged: Option<&Paged>) -> Outcome {
    let all = all();
    match all.as_ref().and_then(|all| all.as_ref()) {
        Some(all) if paged.is_some() => all.may_copy(graph),
        _ => Ok(()),
    }
}

/// Records that a graph has a node that copies.
pub fn add(graph: u32, node: u32, paged: Option<Paged>) {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    all.nodes.insert(node, graph);
    if let Some(paged) = paged {
        let copies = all.graphs.entry(graph).or_default();
        copies.push(Paged { node, ..paged });
    }
}

/// Checks that a node's copy can be replaced, in an executable graph or (with 0) in the node's graph.
///
/// # Errors
/// It is unknown which of the copies belongs to this node, possibly because another graph has updated the executable
/// one; or the node is in a conditional node's graph.
pub fn may_replace(executable: u32, node: u32, paged: Option<&Paged>) -> Outcome {
    let all = all();
    let all = all.as_ref().and_then(|all| all.as_ref());
    if let Some(all) = all.filter(|_| paged.is_some())
        && let Some(graph) = all.nodes.get(&node)
    {
        all.may_copy(*graph)?;
    }
    if all.is_some_and(|all| all.is_of_another(executable, node)) {
        return Err(codes::NOT_SUPPORTED);
    }
    let is_known = all.is_some_and(|all| all.nodes.contains_key(&node));
    let may_have = all.is_some_and(|all| match executable {
        0 => all.may_have(node, all.graphs.values().flatten()),
        executable => all.may_have(node, all.executables.get(&executable).into_iter().flatten()),
    });
    match is_known || !may_have && (paged.is_none() || executable != 0) {
        true => Ok(()),
        false => Err(codes::NOT_SUPPORTED),
    }
}

/// Records that a node's copy was replaced, in an executable graph or (with 0) in the node's graph. `paged` is None if
/// the memory needs no place.
pub fn replace(executable: u32, node: u32, paged: Option<Paged>) {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let All {
        graphs,
        executables,
        nodes,
        ..
    } = all.get_or_insert_default();
    let copies = match (executable, nodes.get(&node)) {
        (0, Some(graph)) => graphs.entry(*graph).or_default(),
        (0, None) => return,
        (executable, _) => executables.entry(executable).or_default(),
    };
    copies.retain(|one| one.node != node);
    copies.extend(paged.map(|paged| Paged { node, ..paged }));
}

/// Checks that a node can be destroyed.
///
/// # Errors
/// It may have a copy that is not known to belong to it.
pub fn may_go(node: u32) -> Outcome {
    may_replace(0, node, None)
}

/// Records that a node has been destroyed.
pub fn gone(node: u32) {
    replace(0, node, None);
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        all.nodes.remove(&node);
        all.forget_bodies(|_, of| of == node);
    }
}

/// Checks that a node of an executable graph can be disabled.
///
/// # Errors
/// It has a copy, or may have one.
pub fn may_disable(executable: u32, node: u32) -> Outcome {
    let has = |all: &All| {
        let copies = all.executables.get(&executable);
        all.is_of_another(executable, node) || all.may_have(node, copies.into_iter().flatten())
    };
    match all().is_some_and(|all| all.as_ref().is_some_and(has)) {
        true => Err(codes::NOT_SUPPORTED),
        false => Ok(()),
    }
}

/// Checks that another graph can replace a child in an executable graph.
///
/// # Errors
/// Either of the two has copies.
pub fn may_exchange(executable: u32, child: u32) -> Outcome {
    let has = |all: &All| {
        [all.executables.get(&executable), all.graphs.get(&child)]
            .into_iter()
            .flatten()
            .any(|copies| !copies.is_empty())
    };
    match all().is_some_and(|all| all.as_ref().is_some_and(has)) {
        true => Err(codes::NOT_SUPPORTED),
        false => Ok(()),
    }
}

/// Records that an executable graph was instantiated from a graph, or updated to it.
pub fn instantiate(graph: u32, executable: u32) {
    let Some((copies, calls)) = all().and_then(|all| {
        let all = all.as_ref()?;
        let copies = all.graphs.get(&graph).cloned().unwrap_or_default();
        Some((copies, all.calls_of(Calling::Graph(graph))))
    }) else {
        return;
    };
    // Asks the worker, and therefore does not hold the lock.
    let before = landing::before(graph, &calls, &copies);
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        all.executables.insert(executable, copies);
        all.made_of.insert(executable, graph);
        all.calls.insert(Calling::Executable(executable), calls);
        match before {
            Some(before) => all.before.insert(executable, Arc::new(before)),
            None => all.before.remove(&executable),
        };
    }
}

/// Records that another graph has replaced a child in an executable graph.
pub fn exchanged(executable: u32, child: u32) {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        let mut calls = all.calls_of(Calling::Graph(child));
        calls.iter_mut().for_each(|call| call.node = 0);
        all.add_calls(Calling::Executable(executable), calls);
    }
}

/// Records that an executable graph has been destroyed. A launch that is still running keeps its places.
pub fn ended(executable: u32) {
    turns::gone(Common::Executable(executable));
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        all.executables.remove(&executable);
        all.made_of.remove(&executable);
        all.calls.remove(&Calling::Executable(executable));
        all.before.remove(&executable);
    }
}

/// Checks that a graph can contain everything that another graph contains.
///
/// # Errors
/// It is a conditional node's, and there are copies.
pub fn may_include(graph: u32, within: u32) -> Outcome {
    let all = all();
    match all.as_ref().and_then(|all| all.as_ref()) {
        Some(all)
            if all
                .graphs
                .get(&graph)
                .is_some_and(|copies| !copies.is_empty()) =>
        {
            all.may_copy(within)
        }
        _ => Ok(()),
    }
}

/// Records that a graph contains everything that another graph contains, in nodes of its own.
pub fn include(graph: u32, within: u32) {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        let mut calls = all.calls_of(Calling::Graph(graph));
        calls.iter_mut().for_each(|call| call.node = 0);
        all.add_calls(Calling::Graph(within), calls);
        let copies = all.graphs.get(&graph).cloned().unwrap_or_default();
        let copies = copies.into_iter().map(|one| Paged { node: 0, ..one });
        all.graphs.entry(within).or_default().extend(copies);
    }
}

/// Records that a graph has been cloned.
pub fn cloned(graph: u32, clone: u32) {
    let Some((mut copies, mut calls)) = all().and_then(|all| {
        let all = all.as_ref()?;
        let copies = all.graphs.get(&graph).cloned().unwrap_or_default();
        Some((copies, all.calls_of(Calling::Graph(graph))))
    }) else {
        return;
    };
    let nodes = copies.iter_mut().map(|one| &mut one.node);
    for node in nodes.chain(calls.iter_mut().map(|call| &mut call.node)) {
        *node = in_clone(*node, clone);
    }
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        for one in copies.iter().filter(|one| one.node != 0) {
            all.nodes.insert(one.node, clone);
        }
        all.graphs.insert(clone, copies);
        all.add_calls(Calling::Graph(clone), calls);
    }
}

/// The node of a clone that corresponds to a node, or 0 if unknown.
fn in_clone(node: u32, clone: u32) -> u32 {
    if node == 0 {
        return 0;
    }
    let mut found = 0u64;
    let words = [
        &raw mut found as u64,
        handles::handle(Kind::Node, node),
        handles::handle(Kind::Graph, clone),
    ];
    // SAFETY: the pointer is to a local.
    let asked = unsafe { forward("cuGraphNodeFindInClone", &words) };
    let number = asked.and_then(|()| handles::valid(Kind::Node, found));
    number.unwrap_or(0)
}

/// Records that a graph has been destroyed.
pub fn forget(graph: u32) {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        all.forget(graph);
    }
}

/// The number of the capture that a stream takes part in.
fn capture(stream: u32) -> Outcome<u64> {
    Ok(capture::state(connected()?, stream)?.id)
}

/// The node that was last captured from a stream, or 0 if there is not exactly one or it is unknown.
fn captured_last(stream: u32) -> u32 {
    let state = connected().and_then(|link| capture::state(link, stream));
    match state.as_ref().map(|state| &state.after[..]) {
        Ok([node]) => *node,
        _ => 0,
    }
}

/// Records that a stream's capture adds to this graph.
///
/// # Errors
/// The stream is not being captured.
pub fn captures_to(stream: u32, graph: u32) -> Outcome {
    let is_body = |all: &All| all.bodies.contains_key(&graph);
    if !all().is_some_and(|all| all.as_ref().is_some_and(is_body)) {
        return Ok(());
    }
    let id = capture(stream)?;
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    all.to_bodies.insert(id);
    all.streams.insert(stream, id);
    Ok(())
}

/// Adds a copy to the capture of a stream. `ask` is called with a place in the window, several of which are tried.
///
/// # Errors
/// The stream is not being captured, or is captured to a conditional node's graph; the error of `ask`.
pub fn captured(
    stream: u32,
    rows: Rows,
    to_host: bool,
    ask: impl Fn(WindowRange) -> Outcome,
) -> Outcome {
    let link = connected()?;
    let id = capture(stream)?;
    let is_to_body = |all: &All| all.to_bodies.contains(&id);
    if all().is_some_and(|all| all.as_ref().is_some_and(is_to_body)) {
        return Err(codes::NOT_SUPPORTED);
    }
    let mut tried = Vec::new();
    let paged = loop {
        let (paged, place) = Paged::new(link, rows, to_host)?;
        match ask(place) {
            Ok(()) => break paged,
            Err(codes::NOT_SUPPORTED) if tried.len() < PLACES => tried.push(paged),
            Err(code) => return Err(code),
        }
    };
    // It is in the graph now, whether or not its node can be determined.
    let node = captured_last(stream);
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    let copies = all.captures.entry(id).or_default();
    copies.push(Paged { node, ..paged });
    all.streams.insert(stream, id);
    Ok(())
}

/// Adds a call of a function of the program to the capture of a stream.
///
/// # Errors
/// The stream is not being captured; the error of `ask`.
pub fn captured_call(stream: u32, function: u64, ask: impl FnOnce() -> Outcome) -> Outcome {
    let id = capture(stream)?;
    ask()?;
    let node = captured_last(stream);
    calls(Calling::Capture(id), Call { function, node });
    Ok(())
}

/// Records that a graph calls a function of the program.
pub fn calls_function(graph: u32, call: Call) {
    calls(Calling::Graph(graph), call);
}

fn calls(one: Calling, call: Call) {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.get_or_insert_default().add_calls(one, vec![call]);
}

/// Records that a node's function was replaced, in an executable graph or (with 0) in the node's graph.
pub fn calls_instead(executable: u32, call: Call) {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        let changed = all.calls.iter_mut().filter(|(one, _)| match executable {
            0 => matches!(one, Calling::Graph(_)),
            executable => **one == Calling::Executable(executable),
        });
        let mut is_known = false;
        for (_, calls) in changed {
            for one in calls.iter_mut().filter(|one| one.node == call.node) {
                one.function = call.function;
                is_known = true;
            }
        }
        if !is_known && executable != 0 {
            // The executable graph was updated by another graph since, whose nodes are known. What precedes this
            // function is not, so launches that copy for functions are refused.
            all.add_calls(Calling::Executable(executable), vec![call]);
        }
    }
}

/// Ends a stream's capture, which creates a graph or adds nodes to an existing one.
///
/// # Errors
/// The error of `end`.
pub fn end(stream: u32, end: impl FnOnce() -> Outcome<u32>) -> Outcome {
    let id = match all() {
        Some(_) => capture(stream).ok(),
        None => None,
    };
    let graph = end();
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
        && let Some(id) = id
            .filter(|id| *id != 0)
            .or(all.streams.get(&stream).copied())
    {
        match graph {
            Ok(graph) => {
                let copies = all.captures.remove(&id).unwrap_or_default();
                let calls = all.calls.remove(&Calling::Capture(id)).unwrap_or_default();
                all.add_calls(Calling::Graph(graph), calls);
                for one in copies.iter().filter(|one| one.node != 0) {
                    all.nodes.insert(one.node, graph);
                }
                all.graphs.entry(graph).or_default().extend(copies);
                all.forget_capture(id);
            }
            // Another stream has begun the capture, which continues there.
            Err(codes::STREAM_CAPTURE_UNMATCHED) => {}
            Err(_) => all.forget_capture(id),
        }
    }
    graph.map(drop)
}

/// Called when nothing is being captured any more.
pub fn no_captures() {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        all.captures.clear();
        all.to_bodies.clear();
        all.streams.clear();
        all.calls
            .retain(|one, _| !matches!(one, Calling::Capture(_)));
    }
}

/// Whether any of the copies in `back` writes what one of those in `there` reads.
fn overlap(back: &[Paged], there: &[Paged]) -> bool {
    back.iter().any(|one| {
        let (first, end) = one.extent();
        there.iter().any(|other| {
            let (from, to) = other.extent();
            from < end && first < to
        })
    })
}

/// Launches an executable graph. What it copies from the program is read when the stream has reached the launch, and if
/// it is registered, again when a function has returned that comes before the copy. What it copies to the program has
/// arrived after the launch, and when a function is called that comes after the copy.
///
/// # Errors
/// The error of `launch`. Also fails if the stream is being captured, if the graph reads what it writes, or if it calls
/// a function and it is unknown whether that comes after a copy to the program, or before one from registered memory.
pub fn launch(executable: u32, stream: CUstream, launch: impl FnOnce() -> Outcome) -> Outcome {
    let (copies, calls, before) = all()
        .and_then(|all| {
            let all = all.as_ref()?;
            let copies = all.executables.get(&executable).cloned();
            let calls = all.calls_of(Calling::Executable(executable));
            let before = all.before.get(&executable).cloned();
            Some((copies.unwrap_or_default(), calls, before))
        })
        .unwrap_or_default();
    if copies.is_empty() && calls.is_empty() {
        return launch();
    }
    let link = connected()?;
    let number = handles::valid(Kind::Stream, stream as u64)?;
    if capturing(link, context::need()?, number) {
        return match copies.is_empty() {
            true => launch_captured(number, calls, launch),
            false => Err(codes::NOT_SUPPORTED),
        };
    }
    let functions = calls.iter().map(|call| Common::Function(call.function));
    let common = functions.chain([Common::Executable(executable)]).collect();
    turns::in_turn(&common, stream, || {
        let known = before.as_deref();
        launch_with(copies, (&calls, known), stream, launch)
    })
}

/// Launches an executable graph that calls functions into a stream that is being captured. The functions become those
/// of a child of the resulting graph.
fn launch_captured(
    stream: u32,
    mut functions: Vec<Call>,
    launch: impl FnOnce() -> Outcome,
) -> Outcome {
    let id = capture(stream)?;
    launch()?;
    functions.iter_mut().for_each(|call| call.node = 0);
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    all.add_calls(Calling::Capture(id), functions);
    Ok(())
}

fn launch_with(
    copies: Vec<Paged>,
    (calls, before): (&[Call], Option<&Before>),
    stream: CUstream,
    launch: impl FnOnce() -> Outcome,
) -> Outcome {
    if copies.is_empty() {
        return launch();
    }
    let (back, there): (Vec<_>, Vec<_>) = copies.into_iter().partition(|one| one.to_host);
    if overlap(&back, &there) {
        return Err(codes::NOT_SUPPORTED);
    }
    let launched = Launch::new(back, &there, calls, before)?;
    let link = connected()?;
    let place = (
        context::need()?,
        handles::valid(Kind::Stream, stream as u64)?,
    );
    if !there.is_empty() || launched.has_functions() {
        let (there, launched) = (there.clone(), launched.clone());
        copy_in(link, place, move |status| {
            if status == 0 {
                for one in &there {
                    // SAFETY: the program's memory exists until the launch's work is done.
                    unsafe { one.carry() };
                }
                launched.begin();
            }
        })?;
    }
    launch()?;
    // All places belong to this launch until it has ended, even if the graph has been destroyed by then.
    copy_in(link, place, move |status| {
        drop(there);
        if status == 0 {
            launched.end();
        }
    })
}
