//! Stream capture: beginning, end, and queries.

use std::{
    collections::HashMap,
    ptr::null,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{CaptureInfo, Captured},
        codes,
    },
    wire::messages::Call,
};

use crate::{
    context,
    entry::{Outcome, connected, entry_points, offer, put},
    forward::forward,
    handles,
    link::Link,
    paged, turns,
};

/// The streams in which this process has begun captures that have not ended, by number (a handle may mean another stream
/// in each thread), and the context of each.
static BEGUN: Mutex<Option<HashMap<u32, u64>>> = Mutex::new(None);
/// Their number.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Whether any stream is being captured.
pub fn captures() -> bool {
    CAPTURES.load(Ordering::Relaxed) > 0
}

/// The stream that a handle means in this thread.
fn number(stream: CUstream) -> Outcome<u32> {
    connected()?;
    handles::valid(Kind::Stream, stream as u64)
}

fn begun(stream: u32) {
    let current = context::top().unwrap_or(0);
    let handle = handles::handle(Kind::Stream, stream);
    let context = turns::context_of(handle, current).unwrap_or(current);
    let mut all = BEGUN.lock_unpoisoned();
    let all = all.get_or_insert_default();
    all.insert(stream, context);
    CAPTURES.store(all.len(), Ordering::Relaxed);
}

/// Records that the capture which was begun in this stream, if any, is over, with or without a
/// graph.
fn over(stream: u32) {
    forget(stream);
    let mut all = BEGUN.lock_unpoisoned();
    let Some(all) = all.as_mut() else { return };
    if all.remove(&stream).is_some() {
        CAPTURES.store(all.len(), Ordering::Relaxed);
        if all.is_empty() {
            paged::no_captures();
        }
    }
}

/// Records that a context has ended, and with it the captures of its streams.
pub fn forget_context(context: u64) {
    let begun = BEGUN.lock_unpoisoned();
    let own = begun.iter().flatten().filter(|(_, of)| **of == context);
    let own: Vec<u32> = own.map(|(stream, _)| *stream).collect();
    drop(begun);
    own.into_iter().for_each(over);
}

/// Whether a stream is being captured, according to the worker.
fn asked(stream: u32) -> bool {
    let mut status = 0u32;
    let stream = handles::handle(Kind::Stream, stream);
    // SAFETY: the pointer is to a local.
    let asked = unsafe { forward("cuStreamIsCapturing", &[stream, &raw mut status as u64]) };
    asked.is_ok() && status != 0
}

/// Whether a stream is being captured. Costs one atomic load if none is.
pub fn capturing(link: &Link, _context: u32, stream: u32) -> bool {
    let _ = link;
    if !captures() || stream == 0 {
        return false;
    }
    asked(stream)
}

/// Has the worker submit something to a stream. Its result is waited for if the stream is being captured: a call that the
/// driver refuses must not silently be missing in the graph.
///
/// # Errors
/// The driver's.
pub fn submit<C: Call<Answer = ()>>(link: &Link, context: u32, stream: u32, call: &C) -> Outcome {
    match capturing(link, context, stream) {
        true => link.ask(call),
        false => link.post(call),
    }
}

/// The state of a stream's capture.
///
/// # Errors
/// The driver's.
pub fn state(link: &Link, stream: u32) -> Outcome<Captured> {
    let context = context::need()?;
    link.ask(&CaptureInfo { context, stream })
}

/// The size of an edge's data in bytes.
const EDGE: usize = size_of::<CUgraphEdgeData>();

/// The dependencies of the next captured node, in arrays that a program may look at.
struct Told {
    nodes: Box<[u64]>,
    edges: Box<[u8]>,
}

/// By stream. Valid until the program asks again or the capture ends.
static TOLD: Mutex<Option<HashMap<u32, Told>>> = Mutex::new(None);

/// Pointers for the results that a program wants of a capture query, or null.
struct Wanted {
    status: *mut CUstreamCaptureStatus,
    id: *mut cuuint64_t,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    edges: *mut *const CUgraphEdgeData,
    count: *mut usize,
}

impl Wanted {
    /// # Safety
    /// They are valid for writing, or null.
    unsafe fn tell(&self, stream: CUstream) -> Outcome {
        let link = connected()?;
        // SAFETY: the caller's promise.
        unsafe {
            if !captures() {
                let none = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                return put(self.status, none);
            }
            let stream = number(stream)?;
            let known = state(link, stream)?;
            let status = CUstreamCaptureStatus_enum(known.status);
            put(self.status, status)?;
            if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE {
                return Ok(());
            }
            offer(self.id, known.id);
            offer(
                self.graph,
                handles::handle(Kind::Graph, known.graph) as CUgraph,
            );
            offer(self.count, known.after.len());
            // A caller that does not ask for the edges' data must not miss any.
            let is_plain = known.edges.0.iter().all(|byte| *byte == 0);
            if !self.nodes.is_null() && self.edges.is_null() && !is_plain {
                return Err(codes::LOSSY_QUERY);
            }
            let nodes = known.after.iter();
            let told = Told {
                nodes: nodes
                    .map(|node| handles::handle(Kind::Node, *node))
                    .collect(),
                edges: known.edges.0.into_boxed_slice(),
            };
            if told.edges.len() != EDGE * told.nodes.len() {
                return Err(codes::UNKNOWN);
            }
            let edges = if is_plain {
                null()
            } else {
                told.edges.as_ptr()
            };
            offer(self.nodes, told.nodes.as_ptr().cast());
            offer(self.edges, edges.cast());
            let mut all = TOLD.lock_unpoisoned();
            all.get_or_insert_default().insert(stream, told);
        }
        Ok(())
    }
}

fn forget(stream: u32) {
    if let Some(all) = TOLD.lock_unpoisoned().as_mut() {
        all.remove(&stream);
    }
}

entry_points! {
    fn cuStreamBeginCapture_v2(hStream: CUstream, mode: CUstreamCaptureMode) {
        // The capture mode restricts the worker's one thread only, and is meaningless for the
        // calling thread.
        let _ = mode;
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED.0;
        let stream = number(hStream)?;
        forward("cuStreamBeginCapture_v2", &[hStream as u64, relaxed.into()])?;
        begun(stream);
        Ok(())
    }

    fn cuStreamBeginCaptureToGraph(
        hStream: CUstream,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        dependencyData: *const CUgraphEdgeData,
        numDependencies: usize,
        mode: CUstreamCaptureMode,
    ) {
        let _ = mode;
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED.0;
        let stream = number(hStream)?;
        forward("cuStreamBeginCaptureToGraph", &[
            hStream as u64,
            hGraph as u64,
            dependencies as u64,
            dependencyData as u64,
            numDependencies as u64,
            relaxed.into(),
        ])?;
        begun(stream);
        paged::captures_to(stream, handles::valid(Kind::Graph, hGraph as u64)?)
    }

    // Libraries ask this before much of what they do. The worker is only asked while anything is
    // being captured.
    fn cuStreamIsCapturing(hStream: CUstream, captureStatus: *mut CUstreamCaptureStatus) {
        if !captures() {
            connected()?;
            context::need()?;
            handles::valid(Kind::Stream, hStream as u64)?;
            return put(captureStatus, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
        }
        forward("cuStreamIsCapturing", &[hStream as u64, captureStatus as u64])
    }

    fn cuStreamEndCapture(hStream: CUstream, phGraph: *mut CUgraph) {
        let stream = number(hStream)?;
        let ended = paged::end(stream, || {
            // A caller that captures to an existing graph need not be told which one.
            let mut graph = 0u64;
            forward("cuStreamEndCapture", &[hStream as u64, &raw mut graph as u64])?;
            offer(phGraph, graph as CUgraph);
            // There is no graph if nothing has been captured.
            handles::valid(Kind::Graph, graph)
        });
        // An invalid capture ends without a graph. A capture that another stream has begun
        // continues.
        if ended.is_ok() || !asked(stream) {
            over(stream);
        }
        ended
    }

    // Destroying a stream ends the capture that was begun in it.
    fn cuStreamDestroy_v2(hStream: CUstream) {
        let stream = number(hStream)?;
        // A default stream, whatever its number here.
        if hStream as u64 <= handles::PER_THREAD {
            return Err(codes::INVALID_HANDLE);
        }
        forward("cuStreamDestroy_v2", &[hStream as u64])?;
        over(stream);
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) {
        thread_local!(static MODE: std::cell::Cell<CUstreamCaptureMode> =
            const { std::cell::Cell::new(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL) });
        connected()?;
        let new = mode.as_ref().ok_or(codes::INVALID_VALUE)?;
        put(mode, MODE.replace(*new))
    }

    fn cuStreamGetCaptureInfo_v2(
        hStream: CUstream,
        captureStatus_out: *mut CUstreamCaptureStatus,
        id_out: *mut cuuint64_t,
        graph_out: *mut CUgraph,
        dependencies_out: *mut *const CUgraphNode,
        numDependencies_out: *mut usize,
    ) {
        let wanted = Wanted {
            status: captureStatus_out,
            id: id_out,
            graph: graph_out,
            nodes: dependencies_out,
            edges: std::ptr::null_mut(),
            count: numDependencies_out,
        };
        wanted.tell(hStream)
    }

    fn cuStreamGetCaptureInfo_v3(
        hStream: CUstream,
        captureStatus_out: *mut CUstreamCaptureStatus,
        id_out: *mut cuuint64_t,
        graph_out: *mut CUgraph,
        dependencies_out: *mut *const CUgraphNode,
        edgeData_out: *mut *const CUgraphEdgeData,
        numDependencies_out: *mut usize,
    ) {
        let wanted = Wanted {
            status: captureStatus_out,
            id: id_out,
            graph: graph_out,
            nodes: dependencies_out,
            edges: edgeData_out,
            count: numDependencies_out,
        };
        wanted.tell(hStream)
    }
}
