//! Stream captures in progress.
//!
//! The graph that a capture builds is visible before the capture ends, and memory may have been allocated in it. If the
//! capture yields no graph, or its stream is destroyed first, the driver destroys that graph by itself.

use std::{collections::HashMap, ptr::null_mut};

use cuda_definition::driver::types::{CUgraphEdgeData, CUstream, CUstreamCaptureStatus as Status};
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{CaptureInfo, Captured},
        codes,
    },
    wire::Blob,
};

use super::{
    Server,
    driver::{cu, outcome},
};

/// Maximum number of nodes that the next captured node depends on.
const MOST: usize = 64 << 10;

/// Captures, keyed by the driver's handles of the streams in which they began.
#[derive(Debug, Default)]
pub(super) struct Captures(HashMap<usize, Target>);

/// The graph that a capture builds, by the driver's handle.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// A graph that existed before the capture, and outlives it.
    Existing(usize),
    /// A new graph.
    New(usize),
    /// Unknown.
    Unknown,
    /// The capture has been invalidated: it yields no graph.
    None,
}

impl Target {
    /// Whether the target may be this graph.
    fn may_be(self, graph: usize) -> bool {
        match self {
            Self::Existing(own) | Self::New(own) => own == graph,
            Self::Unknown => true,
            Self::None => false,
        }
    }
}

impl Captures {
    /// Whether any capture is in progress.
    pub(super) fn is_any(&self) -> bool {
        !self.0.is_empty()
    }
}

impl Server {
    /// Whether a stream is being captured, so that no fence may be added to it.
    pub(super) fn is_captured(&self, stream: usize) -> bool {
        if !self.backend.captures.is_any() {
            return false;
        }
        let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
        cu!(
            self.backend.api,
            cuStreamIsCapturing(stream as CUstream, &raw mut status)
        );
        status != Status::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// The graph into which a stream is being captured, by the driver's handle; 0 if it is not being captured, or its
    /// capture has no graph.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn captured_to(&self, stream: usize) -> Result<usize, i32> {
        let (mut status, mut graph) = (Status::CU_STREAM_CAPTURE_STATUS_NONE, null_mut());
        outcome(cu!(
            self.backend.api,
            cuStreamGetCaptureInfo_v2(
                stream as CUstream,
                &raw mut status,
                null_mut(),
                &raw mut graph,
                null_mut(),
                null_mut(),
            )
        ))?;
        Ok(graph as usize)
    }

    /// Returns the state of a capture to the client.
    pub(super) fn capture_info(&mut self, call: &CaptureInfo) -> Result<Captured, i32> {
        self.enter(call.context)?;
        let stream = self.backend.objects.raw(Kind::Stream, call.stream)? as CUstream;
        let (mut status, mut id) = (Status::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        let (mut graph, mut count) = (null_mut(), 0);
        let (mut nodes, mut edges) = (std::ptr::null(), std::ptr::null::<CUgraphEdgeData>());
        let api = &self.backend.api;
        let mut code = cu!(
            api,
            cuStreamGetCaptureInfo_v3(
                stream,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut nodes,
                &raw mut edges,
                &raw mut count,
            )
        );
        if code == codes::NOT_SUPPORTED {
            // A driver that only knows edges without data.
            code = cu!(
                api,
                cuStreamGetCaptureInfo_v2(
                    stream,
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    &raw mut nodes,
                    &raw mut count,
                )
            );
        }
        outcome(code)?;
        let mut captured = Captured {
            status: status.0,
            id: 0,
            graph: 0,
            after: Vec::new(),
            edges: Blob(Vec::new()),
        };
        if status != Status::CU_STREAM_CAPTURE_STATUS_ACTIVE {
            return Ok(captured);
        }
        if count > MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        let objects = &mut self.backend.objects;
        objects.check_room()?;
        (captured.id, captured.graph) = (id, objects.number(Kind::Graph, graph as usize, 0, 0));
        for index in 0..count {
            objects.check_room()?;
            // SAFETY: the driver's arrays have `count` elements and stay valid until its next call on the stream.
            let (node, edge) = unsafe {
                let edge = (!edges.is_null()).then(|| edges.add(index).cast::<[u8; 8]>().read());
                (nodes.add(index).read(), edge.unwrap_or_default())
            };
            let number = objects.number(Kind::Node, node as usize, 0, captured.graph);
            captured.after.push(number);
            captured.edges.0.extend_from_slice(&edge);
        }
        Ok(captured)
    }

    /// Records the start of a capture, to an existing graph or to a new one.
    pub(super) fn capture_begun(&mut self, stream: usize, is_existing: bool) {
        let target = match self.captured_to(stream) {
            Ok(0) | Err(_) => Target::Unknown,
            Ok(graph) if is_existing => Target::Existing(graph),
            Ok(graph) => Target::New(graph),
        };
        self.backend.captures.0.insert(stream, target);
    }

    /// Records the end of a capture. Its graph is the client's from now on.
    pub(super) fn capture_ended(&mut self, stream: usize) {
        self.backend.captures.0.remove(&stream);
    }

    /// Records that ending a capture failed, or that its stream is gone: it yields no graph.
    pub(super) fn capture_failed(&mut self, stream: usize) {
        let target = self.backend.captures.0.remove(&stream);
        self.forget_target(target);
    }

    /// Forgets the new graph of a capture that yields none; the driver destroys it.
    fn forget_target(&mut self, target: Option<Target>) {
        if let Some(Target::New(graph)) = target
            && let Some(graph) = self.backend.objects.known(Kind::Graph, graph)
        {
            self.forget_graph(graph);
        }
    }

    /// Forgets the graphs of captures that have been invalidated: when the driver destroys them is unknown.
    pub(super) fn forget_invalid_captures(&mut self) {
        let api = &self.backend.api;
        let is_invalid = |stream: usize| {
            let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
            cu!(
                api,
                cuStreamIsCapturing(stream as CUstream, &raw mut status)
            );
            status == Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED
        };
        let all = self.backend.captures.0.iter();
        let active = all.filter(|(_, target)| !matches!(target, Target::None));
        let streams = active.map(|(stream, _)| *stream);
        let invalid: Vec<usize> = streams.filter(|stream| is_invalid(*stream)).collect();
        for stream in invalid {
            let target = self.backend.captures.0.insert(stream, Target::None);
            self.forget_target(target);
        }
    }

    /// Checks that a graph, or one of its nodes, can be destroyed: not while it is the target of a capture, since the
    /// driver would go on using it.
    ///
    /// # Errors
    /// It is the target of a capture, or there is no such object.
    pub(super) fn may_destroy(&self, kind: Kind, id: u32) -> Result<(), i32> {
        let (objects, captures) = (&self.backend.objects, &self.backend.captures);
        let object = objects.get(kind, id)?;
        let graph = match kind {
            Kind::Node => objects.get(Kind::Graph, object.owner),
            _ => Ok(object),
        };
        let is_captured_to = match graph {
            Ok(graph) => captures.0.values().any(|target| target.may_be(graph.raw)),
            // A node whose graph is unknown may belong to any of them.
            Err(_) => captures.is_any(),
        };
        match is_captured_to {
            true => Err(codes::STREAM_CAPTURE_UNSUPPORTED),
            false => Ok(()),
        }
    }

    /// Ends the captures of streams that may have been destroyed with their context.
    pub(super) fn end_captures_without_stream(&mut self) {
        let objects = &self.backend.objects;
        let streams = self.backend.captures.0.keys().copied();
        let gone: Vec<usize> = streams
            .filter(|stream| objects.known(Kind::Stream, *stream).is_none())
            .collect();
        for stream in gone {
            self.capture_failed(stream);
        }
    }
}
