//! Captures of streams that are under way.
//!
//! The graph that a capture makes can be seen before its end, and memory may have been allocated in it. If no
//! graph comes of the capture, or its stream goes first, the driver ends that graph by itself.

use std::{collections::HashMap, ptr::null_mut};

use cuda_definition::driver::types::{CUstream, CUstreamCaptureStatus as Status};

use super::{
    Server,
    driver::{cu, outcome},
};
use crate::apis::cuda::Kind;

/// Captures by the driver's handles of the streams in which they have begun.
#[derive(Debug, Default)]
pub(super) struct Captures(HashMap<usize, Target>);

/// The graph that a capture makes.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// One that was there before, and stays.
    Existing,
    /// A new one: the driver's handle; 0 if that is not known.
    New(usize),
}

impl Captures {
    /// Whether there is any.
    pub(super) fn is_any(&self) -> bool {
        !self.0.is_empty()
    }
}

impl Server {
    /// Whether a stream is being captured, so that nothing may be added to it.
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

    /// The graph that a stream is captured to: the driver's handle; 0 if it is not, or for nothing.
    ///
    /// # Errors
    /// The driver's.
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

    /// A capture has begun, to a graph that was there before or to a new one.
    pub(super) fn capture_begun(&mut self, stream: usize, is_existing: bool) {
        let target = match is_existing {
            true => Target::Existing,
            false => Target::New(self.captured_to(stream).unwrap_or(0)),
        };
        self.backend.captures.0.insert(stream, target);
    }

    /// A capture's graph has been made: the client's from here on.
    pub(super) fn capture_ended(&mut self, stream: usize) {
        self.backend.captures.0.remove(&stream);
    }

    /// The end of a capture has failed, or its stream has gone: no graph comes of it.
    pub(super) fn capture_failed(&mut self, stream: usize) {
        let Some(Target::New(graph)) = self.backend.captures.0.remove(&stream) else {
            return;
        };
        if let Some(graph) = self.backend.objects.known(Kind::Graph, graph) {
            self.forget_graph(graph);
        }
    }

    /// Streams may have gone with their context: so have their captures.
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
