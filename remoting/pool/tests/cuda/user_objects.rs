//! User objects: what graphs keep, and when the program is told that nobody has it any more.

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{Condvar, Mutex},
    thread::{self, ThreadId},
    time::Duration,
};

use cuda_definition::driver::types::*;

use crate::driver::{context, cuda, graph, instance, ok};

const REFUSED: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
/// How long an end is waited for.
const LONG: Duration = Duration::from_secs(60);

/// What has been called, and by whom.
#[derive(Default)]
struct Ends {
    all: Mutex<Vec<ThreadId>>,
    more: Condvar,
}

unsafe extern "C" fn end(ends: *mut c_void) {
    // SAFETY: tests give this.
    let ends = unsafe { &*ends.cast::<Ends>() };
    ends.all.lock().unwrap().push(thread::current().id());
    ends.more.notify_all();
}

impl Ends {
    fn new() -> &'static Self {
        Box::leak(Box::default())
    }

    fn object(&'static self, count: u32) -> CUuserObject {
        let mut object = null_mut();
        let data = std::ptr::from_ref(self).cast_mut().cast();
        ok!(cuUserObjectCreate(&mut object, data, Some(end), count, 1));
        object
    }

    fn count(&self) -> usize {
        // What has come of calls before is there when a call that waits for the worker has returned.
        ok!(cuCtxSynchronize());
        self.all.lock().unwrap().len()
    }

    /// Waits until so many have been called: not by this thread.
    fn wait_for(&self, count: usize) {
        let all = self.all.lock().unwrap();
        let fewer = |all: &mut Vec<ThreadId>| all.len() < count;
        let (all, _) = self.more.wait_timeout_while(all, LONG, fewer).unwrap();
        assert_eq!(all.len(), count);
        assert!(!all.contains(&thread::current().id()));
    }
}

#[test]
fn an_object_ends_with_the_program_s_last_reference() {
    let _context = context();
    let ends = Ends::new();
    let object = ends.object(2);
    ok!(cuUserObjectRetain(object, 3));
    ok!(cuUserObjectRelease(object, 4));
    // More than there are is no end.
    assert_eq!(cuda!(cuUserObjectRelease(object, 2)), REFUSED);
    assert_eq!(ends.count(), 0);
    ok!(cuUserObjectRelease(object, 1));
    ends.wait_for(1);
    assert_eq!(cuda!(cuUserObjectRetain(object, 1)), REFUSED);
    assert_eq!(cuda!(cuUserObjectRelease(object, 1)), REFUSED);
}

#[test]
fn an_object_ends_with_the_last_graph_that_has_it_be_it_a_clone_or_executable() {
    let _context = context();
    let (ends, first) = (Ends::new(), graph());
    let object = ends.object(1);
    ok!(cuGraphRetainUserObject(first, object, 1, 1));
    // The reference is the graph's now.
    assert_eq!(cuda!(cuUserObjectRelease(object, 1)), REFUSED);
    let mut clone = null_mut();
    ok!(cuGraphClone(&mut clone, first));
    let executable = instance(clone);
    ok!(cuGraphDestroy(first));
    ok!(cuGraphDestroy(clone));
    assert_eq!(ends.count(), 0);
    ok!(cuGraphExecDestroy(executable));
    ends.wait_for(1);
    assert_eq!(cuda!(cuUserObjectRetain(object, 1)), REFUSED);
}

#[test]
fn an_executable_graph_has_the_objects_of_the_one_that_it_has_become() {
    let _context = context();
    let (before, after) = (Ends::new(), Ends::new());
    let graphs = [before, after].map(|ends| {
        let graph = graph();
        ok!(cuGraphRetainUserObject(graph, ends.object(1), 1, 1));
        graph
    });
    let executable = instance(graphs[0]);
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut told: CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
    ok!(cuGraphExecUpdate_v2(executable, graphs[1], &mut told));
    for graph in graphs {
        ok!(cuGraphDestroy(graph));
    }
    before.wait_for(1);
    assert_eq!(after.count(), 0);
    ok!(cuGraphExecDestroy(executable));
    after.wait_for(1);
}

#[test]
fn a_graph_gives_up_what_it_has_retained_and_no_more() {
    let _context = context();
    let (ends, graph, other) = (Ends::new(), graph(), graph());
    let object = ends.object(1);
    ok!(cuGraphRetainUserObject(graph, object, 2, 0));
    ok!(cuGraphRetainUserObject(graph, object, 1, 0));
    ok!(cuUserObjectRelease(object, 1));
    // Of a graph's references another graph can have more.
    ok!(cuGraphRetainUserObject(other, object, 1, 0));
    assert_eq!(cuda!(cuGraphReleaseUserObject(graph, object, 4)), REFUSED);
    ok!(cuGraphReleaseUserObject(graph, object, 3));
    assert_eq!(cuda!(cuGraphReleaseUserObject(graph, object, 1)), REFUSED);
    assert_eq!(ends.count(), 0);
    ok!(cuGraphReleaseUserObject(other, object, 1));
    ends.wait_for(1);
    for graph in [graph, other] {
        ok!(cuGraphDestroy(graph));
    }
}

#[test]
fn the_graph_of_a_capture_has_objects_from_then_on() {
    let _context = context();
    let ends = Ends::new();
    let (mut stream, mut made, mut known) = (null_mut(), null_mut(), null_mut());
    ok!(cuStreamCreate(&mut stream, 1));
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let retain = |known: &mut CUgraph| {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut nodes, mut count) = (0, std::ptr::null(), 0);
        ok!(cuStreamGetCaptureInfo_v2(
            stream,
            &mut status,
            &mut id,
            known,
            &mut nodes,
            &mut count
        ));
        ok!(cuGraphRetainUserObject(*known, ends.object(1), 1, 1));
    };
    ok!(cuStreamBeginCapture_v2(stream, mode));
    retain(&mut known);
    ok!(cuStreamEndCapture(stream, &mut made));
    assert_eq!(made, known);
    assert_eq!(ends.count(), 0);
    ok!(cuGraphDestroy(made));
    ends.wait_for(1);
    // A capture of which no graph comes lets go of them, too.
    ok!(cuStreamBeginCapture_v2(stream, mode));
    retain(&mut known);
    let asked = cuda!(cuStreamQuery(stream));
    assert_eq!(asked, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    cuda!(cuStreamEndCapture(stream, &mut made));
    ends.wait_for(2);
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn what_is_no_object_no_graph_and_no_count_is_refused() {
    let _context = context();
    let (ends, graph) = (Ends::new(), graph());
    let (mut none, data) = (null_mut(), null_mut());
    let create = |to: *mut CUuserObject, end: CUhostFn, count: u32, flags: u32| {
        cuda!(cuUserObjectCreate(to, data, end, count, flags))
    };
    assert_eq!(create(null_mut(), Some(end), 1, 1), REFUSED);
    assert_eq!(create(&mut none, None, 1, 1), REFUSED);
    for (count, flags) in [(0, 1), (1 << 31, 1), (1, 0), (1, 3)] {
        assert_eq!(create(&mut none, Some(end), count, flags), REFUSED);
    }
    let object = ends.object(1);
    for count in [0, 1 << 31, u32::MAX] {
        assert_eq!(cuda!(cuUserObjectRetain(object, count)), REFUSED);
        assert_eq!(cuda!(cuUserObjectRelease(object, count)), REFUSED);
        for flags in [0, 1] {
            let kept = cuda!(cuGraphRetainUserObject(graph, object, count, flags));
            assert_eq!(kept, REFUSED);
        }
    }
    // As many as the API counts.
    ok!(cuUserObjectRetain(object, (1 << 31) - 2));
    assert_eq!(cuda!(cuUserObjectRetain(object, 1)), REFUSED);
    assert_eq!(cuda!(cuGraphRetainUserObject(graph, object, 1, 2)), REFUSED);
    for forged in [0, 1, graph as u64, object as u64 + 1, u64::MAX] {
        let forged = forged as CUuserObject;
        assert_eq!(cuda!(cuUserObjectRelease(forged, 1)), REFUSED);
        assert_eq!(cuda!(cuGraphRetainUserObject(graph, forged, 1, 0)), REFUSED);
    }
    let no_graph = object as CUgraph;
    let kept = cuda!(cuGraphRetainUserObject(no_graph, object, 1, 1));
    assert_ne!(kept, CUresult::CUDA_SUCCESS);
    assert_eq!(ends.count(), 0);
    ok!(cuUserObjectRelease(object, (1 << 31) - 1));
    ends.wait_for(1);
    ok!(cuGraphDestroy(graph));
}
