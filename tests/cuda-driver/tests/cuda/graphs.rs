//! Graph nodes that call functions, allocate memory or contain graphs, and nodes that are changed.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
    sync::atomic::{AtomicU32, Ordering},
};

use cuda_definition::driver::types::*;

use crate::driver::{
    begin_capture, context, cuda, current, device, end_capture, graph, instance, ok, stream, values,
};

fn run(executable: CUgraphExec) {
    ok!(cuGraphLaunch(executable, null_mut()));
    ok!(cuCtxSynchronize());
}

/// A fill of this many words.
fn fill(at: CUdeviceptr, value: u32, width: usize) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        dst: at,
        pitch: 0,
        value,
        elementSize: 4,
        width,
        height: 1,
    }
}

fn add_fill(graph: CUgraph, after: &[CUgraphNode], fill: &CUDA_MEMSET_NODE_PARAMS) -> CUgraphNode {
    let mut node = null_mut();
    let (first, count) = (after.as_ptr(), after.len());
    ok!(cuGraphAddMemsetNode(
        &mut node,
        graph,
        first,
        count,
        fill,
        current()
    ));
    node
}

fn copy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> CUDA_MEMCPY3D {
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    (copy.WidthInBytes, copy.Height, copy.Depth) = (bytes, 1, 1);
    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (copy.srcDevice, copy.dstDevice) = (from, to);
    copy
}

fn add_copy(graph: CUgraph, after: &[CUgraphNode], copy: &CUDA_MEMCPY3D) -> CUgraphNode {
    let mut node = null_mut();
    let (first, count) = (after.as_ptr(), after.len());
    ok!(cuGraphAddMemcpyNode(
        &mut node,
        graph,
        first,
        count,
        copy,
        current()
    ));
    node
}

unsafe extern "C" fn increase(data: *mut c_void) {
    // SAFETY: tests pass a number that lives forever.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn double(data: *mut c_void) {
    // SAFETY: as above.
    let number = unsafe { &*data.cast::<AtomicU32>() };
    let doubled = number.load(Ordering::SeqCst).wrapping_mul(2);
    number.store(doubled, Ordering::SeqCst);
}

fn function(call: unsafe extern "C" fn(*mut c_void), on: &AtomicU32) -> CUDA_HOST_NODE_PARAMS {
    CUDA_HOST_NODE_PARAMS {
        r#fn: Some(call),
        userData: std::ptr::from_ref(on).cast_mut().cast(),
    }
}

fn add_function(
    graph: CUgraph,
    after: &[CUgraphNode],
    function: &CUDA_HOST_NODE_PARAMS,
) -> CUgraphNode {
    let mut node = null_mut();
    let (first, count) = (after.as_ptr(), after.len());
    ok!(cuGraphAddHostNode(&mut node, graph, first, count, function));
    node
}

/// A number for functions, which lives forever.
fn number(value: u32) -> &'static AtomicU32 {
    Box::leak(Box::new(AtomicU32::new(value)))
}

#[test]
fn nodes_change_in_the_graph_or_in_what_was_made_of_it() {
    let _context = context();
    let (a, b) = (device(&[1u32, 2]), device(&[0u32; 2]));
    let graph = graph();
    let filled = add_fill(graph, &[], &fill(a, 5, 2));
    let copied = add_copy(graph, &[filled], &copy(b, a, 8));
    let first = instance(graph);
    run(first);
    assert_eq!(values::<u32>(b, 2), [5, 5]);
    // What was instantiated before is not changed.
    ok!(cuGraphMemsetNodeSetParams(filled, &fill(a, 6, 1)));
    ok!(cuGraphMemcpyNodeSetParams(copied, &copy(b + 4, a, 4)));
    let second = instance(graph);
    run(second);
    assert_eq!(
        (values::<u32>(a, 2), values::<u32>(b, 2)),
        (vec![6, 5], vec![5, 6])
    );
    run(first);
    assert_eq!(values::<u32>(b, 2), [5, 5]);
    ok!(cuGraphExecMemsetNodeSetParams(
        first,
        filled,
        &fill(a, 7, 2),
        current()
    ));
    ok!(cuGraphExecMemcpyNodeSetParams(
        first,
        copied,
        &copy(b, a, 4),
        current()
    ));
    run(first);
    assert_eq!(values::<u32>(b, 2), [7, 5]);
    run(second);
    assert_eq!(values::<u32>(b, 2), [7, 6]);
    // Unallocated memory.
    let word = [0u32; 2];
    let wild = word.as_ptr() as CUdeviceptr;
    let set = cuda!(cuGraphExecMemcpyNodeSetParams(
        first,
        copied,
        &copy(b, wild, 8),
        current()
    ));
    assert_ne!(set, CUresult::CUDA_SUCCESS);
    for executable in [first, second] {
        ok!(cuGraphExecDestroy(executable));
    }
    ok!(cuGraphDestroy(graph));
}

#[test]
fn an_executable_graph_becomes_what_another_graph_of_its_shape_is() {
    let _context = context();
    let at = device(&[0u32; 4]);
    let (first, second, longer) = (graph(), graph(), graph());
    let node = add_fill(first, &[], &fill(at, 1, 4));
    add_fill(second, &[], &fill(at, 2, 4));
    let before = add_fill(longer, &[], &fill(at, 3, 4));
    add_fill(longer, &[before], &fill(at, 4, 4));
    let executable = instance(first);
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut told: CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
    ok!(cuGraphExecUpdate_v2(executable, second, &mut told));
    let success = CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS;
    assert_eq!(told.result, success);
    // The graph used for the update may be destroyed.
    ok!(cuGraphDestroy(second));
    run(executable);
    assert_eq!(values::<u32>(at, 4), [2; 4]);
    // Nodes are still those of the graph that the executable was made from.
    let (other, own) = (fill(at, 5, 2), current());
    ok!(cuGraphExecMemsetNodeSetParams(
        executable, node, &other, own
    ));
    run(executable);
    assert_eq!(values::<u32>(at, 4), [5, 5, 2, 2]);
    let updated = cuda!(cuGraphExecUpdate_v2(executable, longer, &mut told));
    assert_eq!(updated, CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    assert_ne!(told.result, success);
    run(executable);
    assert_eq!(values::<u32>(at, 4), [5, 5, 2, 2]);
    ok!(cuGraphExecDestroy(executable));
    for graph in [first, longer] {
        ok!(cuGraphDestroy(graph));
    }
}

#[test]
fn a_graph_calls_functions_in_its_order_with_each_launch() {
    let _context = context();
    let count = number(1);
    let graph = graph();
    let one = add_function(graph, &[], &function(increase, count));
    let two = add_function(graph, &[one], &function(double, count));
    let executable = instance(graph);
    for wanted in [4, 10, 22] {
        run(executable);
        assert_eq!(count.load(Ordering::SeqCst), wanted);
    }
    // A clone calls the same functions, even after it was destroyed itself.
    let mut clone = null_mut();
    ok!(cuGraphClone(&mut clone, graph));
    let cloned = instance(clone);
    ok!(cuGraphDestroy(clone));
    run(cloned);
    assert_eq!(count.load(Ordering::SeqCst), 46);
    // Another function in the executable of the first graph.
    let other = number(2);
    ok!(cuGraphExecHostNodeSetParams(
        executable,
        two,
        &function(double, other)
    ));
    run(executable);
    assert_eq!(
        (count.load(Ordering::SeqCst), other.load(Ordering::SeqCst)),
        (47, 4)
    );
    ok!(cuGraphDestroy(graph));
    // Several functions at a time, followed by calls that wait for all of them.
    count.store(0, Ordering::SeqCst);
    for _ in 0..20 {
        ok!(cuGraphLaunch(executable, null_mut()));
        ok!(cuGraphLaunch(executable, null_mut()));
    }
    let memory = device(&[1u32]);
    ok!(cuMemFree_v2(memory));
    ok!(cuCtxSynchronize());
    assert_eq!(count.load(Ordering::SeqCst), 40);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphExecDestroy(cloned));
}

#[test]
fn functions_that_are_captured_are_called_with_each_launch() {
    let _context = context();
    let (count, mut stream, mut graph) = (number(0), null_mut(), null_mut());
    ok!(cuStreamCreate(&mut stream, 1));
    for round in 1..100u32 {
        begin_capture(stream);
        let call = function(increase, count);
        ok!(cuLaunchHostFunc(stream, call.r#fn, call.userData));
        ok!(cuStreamEndCapture(stream, &mut graph));
        assert_eq!(count.load(Ordering::SeqCst), 2 * (round - 1));
        let executable = instance(graph);
        ok!(cuGraphDestroy(graph));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuGraphLaunch(executable, stream));
        // A running graph keeps its function until it has ended.
        ok!(cuGraphExecDestroy(executable));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(count.load(Ordering::SeqCst), 2 * round);
    }
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn a_stream_that_has_joined_a_capture_goes_before_the_capture_ends() {
    let _context = context();
    let to = device(&[0u32; 2]);
    let (mut stream, mut other, mut graph) = (null_mut(), null_mut(), null_mut());
    let [mut forked, mut joined] = [null_mut(); 2];
    ok!(cuStreamCreate(&mut stream, 1));
    ok!(cuStreamCreate(&mut other, 1));
    ok!(cuEventCreate(&mut forked, 2));
    ok!(cuEventCreate(&mut joined, 2));
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    ok!(cuStreamBeginCapture_v2(stream, mode));
    ok!(cuEventRecord(forked, stream));
    ok!(cuStreamWaitEvent(other, forked, 0));
    ok!(cuMemsetD32Async(to, 3, 1, other));
    ok!(cuEventRecord(joined, other));
    ok!(cuStreamWaitEvent(stream, joined, 0));
    ok!(cuStreamDestroy_v2(other));
    ok!(cuMemsetD32Async(to + 4, 4, 1, stream));
    ok!(cuStreamEndCapture(stream, &mut graph));
    let executable = instance(graph);
    run(executable);
    assert_eq!(values::<u32>(to, 2), [3, 4]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    ok!(cuEventDestroy_v2(forked));
    ok!(cuEventDestroy_v2(joined));
    ok!(cuStreamDestroy_v2(stream));
}

/// A copy to unpinned memory of the program.
fn copy_back(to: &AtomicU32, from: CUdeviceptr) -> CUDA_MEMCPY3D {
    let mut copy = copy(0, from, 4);
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    copy.dstHost = std::ptr::from_ref(to).cast_mut().cast();
    copy
}

#[test]
fn a_function_of_a_graph_sees_what_the_graph_has_copied_to_the_program_and_may_change_it() {
    let _context = context();
    let (from, result) = (device(&[0u32]), number(0));
    let graph = graph();
    let filled = add_fill(graph, &[], &fill(from, 21, 1));
    let copied = add_copy(graph, &[filled], &copy_back(result, from));
    let doubled = add_function(graph, &[copied], &function(double, result));
    let executable = instance(graph);
    for _ in 0..3 {
        run(executable);
        assert_eq!(result.load(Ordering::SeqCst), 42);
    }
    // So does the executable of a clone, also with another function.
    let mut clone = null_mut();
    ok!(cuGraphClone(&mut clone, graph));
    let cloned = instance(clone);
    result.store(0, Ordering::SeqCst);
    ok!(cuGraphLaunch(executable, null_mut()));
    ok!(cuGraphLaunch(cloned, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(result.load(Ordering::SeqCst), 42);
    ok!(cuGraphExecHostNodeSetParams(
        executable,
        doubled,
        &function(increase, result)
    ));
    run(executable);
    assert_eq!(result.load(Ordering::SeqCst), 22);
    for executable in [executable, cloned] {
        ok!(cuGraphExecDestroy(executable));
    }
    for graph in [graph, clone] {
        ok!(cuGraphDestroy(graph));
    }
}

#[test]
fn nodes_copy_pinned_memory_of_any_size() {
    let _context = context();
    // A wait, which has the device know a part of what is pinned later or not.
    ok!(cuCtxSynchronize());
    let mut kept = Vec::new();
    for megabytes in [1usize, 20, 33, 5] {
        let words = (megabytes << 20) / 4;
        let (mut host, to) = (null_mut(), device(&vec![0u32; words]));
        ok!(cuMemHostAlloc(&mut host, 4 * words, 0));
        let numbers = host.cast::<u32>();
        for index in 0..words {
            // SAFETY: within the allocation.
            unsafe { numbers.add(index).write(index as u32 ^ megabytes as u32) };
        }
        let graph = graph();
        let mut there = copy(to, 0, 4 * words);
        there.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
        there.srcHost = host;
        add_copy(graph, &[], &there);
        let executable = instance(graph);
        run(executable);
        let back: Vec<u32> = values(to, words);
        let is_right = |(index, word): (usize, &u32)| *word == index as u32 ^ megabytes as u32;
        assert!(back.iter().enumerate().all(is_right), "{megabytes} MiB");
        ok!(cuGraphExecDestroy(executable));
        ok!(cuGraphDestroy(graph));
        ok!(cuMemFree_v2(to));
        kept.push(host);
        // Some memory is freed in between and reused with other bounds.
        if megabytes == 20 {
            ok!(cuMemFreeHost(kept.remove(0)));
        }
    }
    for host in kept {
        ok!(cuMemFreeHost(host));
    }
}

#[test]
fn a_captured_function_sees_what_was_captured_before_it() {
    let _context = context();
    let (from, result) = (device(&[0u32]), number(0));
    let (mut stream, mut graph) = (null_mut(), null_mut());
    ok!(cuStreamCreate(&mut stream, 1));
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    ok!(cuStreamBeginCapture_v2(stream, mode));
    ok!(cuMemsetD32Async(from, 4, 1, stream));
    let to = std::ptr::from_ref(result).cast_mut().cast();
    ok!(cuMemcpyDtoHAsync_v2(to, from, 4, stream));
    let call = function(double, result);
    ok!(cuLaunchHostFunc(stream, call.r#fn, call.userData));
    ok!(cuStreamEndCapture(stream, &mut graph));
    let executable = instance(graph);
    for _ in 0..3 {
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(result.load(Ordering::SeqCst), 8);
    }
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn a_program_adds_nodes_of_its_own_to_what_it_captures() {
    let _context = context();
    let to = device(&[0u32; 3]);
    let (mut stream, mut graph, mut within) = (null_mut(), null_mut(), null_mut());
    ok!(cuStreamCreate(&mut stream, 1));
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    let (mut nodes, mut edges, mut count) = (null(), null(), 0);
    let none = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    ok!(cuStreamGetCaptureInfo_v3(
        stream,
        &mut status,
        null_mut(),
        null_mut(),
        null_mut(),
        null_mut(),
        null_mut()
    ));
    assert_eq!(status, none);
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    ok!(cuStreamBeginCapture_v2(stream, mode));
    let mut look = || {
        let mut id = 0;
        ok!(cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            &mut id,
            &mut within,
            &mut nodes,
            &mut edges,
            &mut count
        ));
        assert_eq!(
            status,
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        );
        assert!(edges.is_null() && id != 0);
        // SAFETY: this many exist until the stream is queried again.
        let all: Vec<_> = (0..count)
            .map(|index| unsafe { nodes.add(index).read() })
            .collect();
        (within, all)
    };
    let (made, first) = look();
    assert!(!made.is_null() && first.is_empty());
    ok!(cuMemsetD32Async(to, 1, 1, stream));
    let (same, after) = look();
    assert_eq!((same, after.len()), (made, 1));
    // A node added by the program after the captured ones. What is captured next comes after it.
    let mut own = add_fill(made, &after, &fill(to + 4, 2, 1));
    ok!(cuStreamUpdateCaptureDependencies_v2(
        stream,
        &mut own,
        null(),
        1,
        1
    ));
    assert_eq!(look(), (made, vec![own]));
    ok!(cuMemcpyDtoDAsync_v2(to + 8, to + 4, 4, stream));
    ok!(cuStreamEndCapture(stream, &mut graph));
    assert_eq!(graph, made);
    let mut edges = 0;
    ok!(cuGraphGetEdges_v2(
        graph,
        null_mut(),
        null_mut(),
        null_mut(),
        &mut edges
    ));
    assert_eq!(edges, 2);
    let [mut from, mut into] = [[null_mut(); 2]; 2];
    ok!(cuGraphGetEdges_v2(
        graph,
        from.as_mut_ptr(),
        into.as_mut_ptr(),
        null_mut(),
        &mut edges
    ));
    assert_eq!((from[0], into[0], from[1]), (after[0], own, own));
    let executable = instance(graph);
    run(executable);
    assert_eq!(values::<u32>(to, 3), [1, 2, 2]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn a_graph_allocates_memory_and_gives_it_back() {
    let _context = context();
    let to = device(&[0u32; 4]);
    let graph = graph();
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut wanted: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
    wanted.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.poolProps.location.r#type = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.bytesize = 16;
    let (mut made, mut freed) = (null_mut(), null_mut());
    ok!(cuGraphAddMemAllocNode(
        &mut made,
        graph,
        null(),
        0,
        &mut wanted
    ));
    let at = wanted.dptr;
    assert_ne!(at, 0);
    let filled = add_fill(graph, &[made], &fill(at, 9, 4));
    let copied = add_copy(graph, &[filled], &copy(to, at, 16));
    ok!(cuGraphAddMemFreeNode(&mut freed, graph, &copied, 1, at));
    let executable = instance(graph);
    for _ in 0..3 {
        run(executable);
        assert_eq!(values::<u32>(to, 4), [9; 4]);
        ok!(cuMemsetD32_v2(to, 0, 4));
    }
    // Memory that no graph has allocated.
    let wild = cuda!(cuGraphAddMemFreeNode(
        &mut freed,
        graph,
        null(),
        0,
        0x1234_5000
    ));
    assert_ne!(wild, CUresult::CUDA_SUCCESS);
    ok!(cuGraphDestroy(graph));
    run(executable);
    assert_eq!(values::<u32>(to, 4), [9; 4]);
    ok!(cuGraphExecDestroy(executable));
    // The memory is no longer allocated.
    let mut back = [0u32; 4];
    let gone = cuda!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), at, 16));
    assert_ne!(gone, CUresult::CUDA_SUCCESS);
}

#[test]
fn what_a_captured_stream_allocates_and_frees_its_graph_does_with_each_launch() {
    let _context = context();
    let to = device(&[0u32; 4]);
    let (mut stream, mut graph, mut at) = (null_mut(), null_mut(), 0);
    ok!(cuStreamCreate(&mut stream, 1));
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    ok!(cuStreamBeginCapture_v2(stream, mode));
    ok!(cuMemAllocAsync(&mut at, 16, stream));
    ok!(cuMemsetD32Async(at, 9, 4, stream));
    ok!(cuMemcpyDtoDAsync_v2(to, at, 16, stream));
    ok!(cuMemFreeAsync(at, stream));
    ok!(cuStreamEndCapture(stream, &mut graph));
    let executable = instance(graph);
    for _ in 0..3 {
        run(executable);
        assert_eq!(values::<u32>(to, 4), [9; 4]);
        ok!(cuMemsetD32_v2(to, 0, 4));
    }
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn what_a_launch_leaves_allocated_outlives_its_graph() {
    let _context = context();
    let graph = graph();
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut wanted: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
    wanted.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.poolProps.location.r#type = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.bytesize = 16;
    let mut made = null_mut();
    ok!(cuGraphAddMemAllocNode(
        &mut made,
        graph,
        null(),
        0,
        &mut wanted
    ));
    let at = wanted.dptr;
    add_fill(graph, &[made], &fill(at, 6, 4));
    let executable = instance(graph);
    run(executable);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    assert_eq!(values::<u32>(at, 4), [6; 4]);
    ok!(cuMemFree_v2(at));
    let mut back = [0u32; 4];
    let gone = cuda!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), at, 16));
    assert_ne!(gone, CUresult::CUDA_SUCCESS);
}

#[test]
fn a_node_runs_one_of_its_graphs() {
    let _context = context();
    let to = device(&[0u32; 2]);
    for (kind, value, size, wanted) in [
        (CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF, 1, 1, 10),
        (CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF, 0, 1, 0),
        (
            CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_SWITCH,
            2,
            3,
            12,
        ),
        (
            CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_SWITCH,
            3,
            3,
            0,
        ),
    ] {
        ok!(cuMemsetD32_v2(to, 0, 2));
        let graph = graph();
        let (mut handle, mut node) = (0, null_mut());
        ok!(cuGraphConditionalHandleCreate(
            &mut handle,
            graph,
            current(),
            value,
            1
        ));
        // SAFETY: numbers and pointers, for which zero is a valid value.
        let mut wanted_node: CUgraphNodeParams = unsafe { std::mem::zeroed() };
        wanted_node.r#type = CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
        wanted_node.anonymous2.conditional = CUDA_CONDITIONAL_NODE_PARAMS {
            handle,
            r#type: kind,
            size,
            phGraph_out: null_mut(),
            ctx: current(),
        };
        let before = add_fill(graph, &[], &fill(to + 4, 1, 1));
        ok!(cuGraphAddNode_v2(
            &mut node,
            graph,
            &before,
            null(),
            1,
            &mut wanted_node
        ));
        for index in 0..size {
            // SAFETY: this field was written, and there are as many graphs as requested.
            let body = unsafe {
                let bodies = wanted_node.anonymous2.conditional.phGraph_out;
                bodies.add(index as usize).read()
            };
            add_fill(body, &[], &fill(to, 10 + index, 1));
        }
        let executable = instance(graph);
        run(executable);
        assert_eq!(values::<u32>(to, 2), [wanted, 1]);
        ok!(cuGraphExecDestroy(executable));
        // An invalid conditional handle.
        // SAFETY: as above.
        unsafe { wanted_node.anonymous2.conditional.handle ^= 0x55 };
        let forged = cuda!(cuGraphAddNode_v2(
            &mut node,
            graph,
            null(),
            null(),
            0,
            &mut wanted_node
        ));
        assert_eq!(forged, CUresult::CUDA_ERROR_INVALID_VALUE);
        ok!(cuGraphDestroy(graph));
    }
}

#[test]
fn a_query_of_a_default_stream_leaves_captures_in_other_contexts_alone() {
    let own = context();
    let stream = stream(0);
    begin_capture(stream);
    let mut other = null_mut();
    ok!(cuCtxCreate_v4(&mut other, null_mut(), 0, 0));
    ok!(cuStreamQuery(null_mut()));
    ok!(cuCtxDestroy_v2(other));
    ok!(cuCtxSetCurrent(own.handle()));
    let graph = end_capture(stream);
    ok!(cuGraphDestroy(graph));
}
