//! Graphs whose nodes copy from or to memory of the program that is not pinned: each such node has a
//! place in the window, which is filled before each launch and emptied behind it, in the order of the
//! stream.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use cuda_definition::driver::types::*;
use gantry_remoting::{apis::cuda::codes, wire::messages::WindowRange};

use crate::{
    entry::{Outcome, connected},
    forward::forward,
    link::Link,
    streams::host_function,
};

/// Rows of the program's memory, which lie in the window without gaps.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Where the first begins.
    pub at: u64,
    /// Bytes of a row, rows of a plane, planes.
    pub size: [u64; 3],
    /// Bytes from one row to the next, rows from one plane to the next.
    pub pitch: u64,
    pub height: u64,
}

/// A node's copy.
#[derive(Clone, Copy, Debug)]
pub struct Paged {
    rows: Rows,
    /// Where it lies in the window.
    place: u64,
    to_host: bool,
    /// The node's number; 0 if it has been captured.
    node: u32,
}

impl Paged {
    /// A place for rows of the program's memory, which stays.
    ///
    /// # Errors
    /// There is no window in common, or no room in it.
    pub fn new(link: &Link, rows: Rows, to_host: bool) -> Outcome<(Self, WindowRange)> {
        let [width, count, planes] = rows.size;
        let length = width
            .checked_mul(count)
            .and_then(|bytes| bytes.checked_mul(planes));
        let length = length.ok_or(codes::INVALID_VALUE)?;
        let offset = link.reserve_shared(length).ok_or(codes::NOT_SUPPORTED)?;
        let paged = Self {
            rows,
            place: link.pointer(offset, length)? as u64,
            to_host,
            node: 0,
        };
        let range = WindowRange {
            offset,
            length,
            stage: None,
        };
        Ok((paged, range))
    }

    /// Moves all rows between the program's memory and the window.
    ///
    /// # Safety
    /// The program's memory is there, as it promises for each launch.
    unsafe fn carry(&self) {
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
            let there = (self.place + index as u64 * width) as *mut u8;
            let (to, from) = if self.to_host {
                (here, there)
            } else {
                (there, here)
            };
            // SAFETY: the caller's promise; the place is this node's own.
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
}

static ALL: Mutex<Option<All>> = Mutex::new(None);

/// The copies, if any graph has ever had one.
fn all() -> Option<MutexGuard<'static, Option<All>>> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.is_some().then_some(all)
}

/// A graph has a node with a copy.
pub fn add(graph: u32, node: u32, paged: Paged) {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    let paged = Paged { node, ..paged };
    all.graphs.entry(graph).or_default().push(paged);
}

/// The copy of a node, in an executable graph or in all graphs that have the node, is another one; none
/// if it is of memory that needs none.
pub fn replace(executable: u32, node: u32, paged: Option<Paged>) {
    if paged.is_none() && all().is_none() {
        return;
    }
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    let change = |copies: &mut Vec<Paged>, is_there: bool| {
        let had = copies.iter().any(|one| one.node == node);
        copies.retain(|one| one.node != node);
        if let Some(paged) = paged.filter(|_| had || is_there) {
            copies.push(Paged { node, ..paged });
        }
    };
    if executable == 0 {
        for copies in all.graphs.values_mut() {
            change(copies, false);
        }
    } else {
        change(all.executables.entry(executable).or_default(), true);
    }
}

/// An executable graph has been made of a graph, or changed to it.
pub fn instantiate(graph: u32, executable: u32) {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        let copies = all.graphs.get(&graph).cloned().unwrap_or_default();
        all.executables.insert(executable, copies);
    }
}

/// All that one graph has, another one has as well.
pub fn include(graph: u32, within: u32) {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
        && let Some(copies) = all.graphs.get(&graph).cloned()
    {
        all.graphs.entry(within).or_default().extend(copies);
    }
}

/// A graph has been destroyed, or another one has got its number.
pub fn forget(graph: u32) {
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
    {
        all.graphs.remove(&graph);
    }
}

/// The number of the capture that a stream takes part in.
fn capture(stream: u64) -> Outcome<u64> {
    let (mut status, mut id) = (0u32, 0u64);
    let words = [stream, &raw mut status as u64, &raw mut id as u64, 0, 0, 0];
    // SAFETY: pointers are to locals.
    unsafe { forward("cuStreamGetCaptureInfo_v2", &words)? };
    Ok(id)
}

/// A stream that is being captured copies so.
///
/// # Errors
/// It is not.
pub fn captured(stream: u64, paged: Paged) -> Outcome {
    let id = capture(stream)?;
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    all.captures.entry(id).or_default().push(paged);
    Ok(())
}

/// Ends a stream's capture, by which a graph is made.
///
/// # Errors
/// What ending it gives.
pub fn end(stream: u64, end: impl FnOnce() -> Outcome<u32>) -> Outcome {
    let id = match all() {
        Some(_) => capture(stream).ok(),
        None => None,
    };
    let graph = end()?;
    forget(graph);
    if let Some(mut all) = all()
        && let Some(all) = all.as_mut()
        && let Some(copies) = id.and_then(|id| all.captures.remove(&id))
    {
        all.graphs.insert(graph, copies);
    }
    Ok(())
}

/// Launches an executable graph: what it copies from the program is read now, what it copies to it is
/// there when the stream has got so far.
///
/// # Errors
/// The launch's.
pub fn launch(executable: u32, stream: CUstream, launch: impl FnOnce() -> Outcome) -> Outcome {
    let copies = all()
        .and_then(|all| all.as_ref()?.executables.get(&executable).cloned())
        .unwrap_or_default();
    if copies.is_empty() {
        return launch();
    }
    connected()?;
    for one in copies.iter().filter(|one| !one.to_host) {
        // SAFETY: the program's memory is there at a launch.
        unsafe { one.carry() };
    }
    launch()?;
    let back: Vec<Paged> = copies.into_iter().filter(|one| one.to_host).collect();
    if back.is_empty() {
        return Ok(());
    }
    host_function(stream, move || {
        for one in &back {
            // SAFETY: the program's memory is there until the launch's work is done.
            unsafe { one.carry() };
        }
    })
}
