//! Graphs that copy to memory of the program that is not pinned and call functions which look at it, with several
//! launches under way.

use std::{
    cell::UnsafeCell,
    ffi::c_void,
    ptr::{null, null_mut},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use cuda_definition::driver::types::*;

use crate::driver::{
    argument, begin_capture, context, cuda, current, device, end_capture, function, graph,
    instance, module, ok, stream, values,
};

const ORDER: &str =
    include_str!("../../../../tests/cuda-driver/tests/kernels/order.compute_75.ptx");

/// What a function looks at, and what it has seen there.
#[derive(Default)]
struct Seen {
    places: [UnsafeCell<u32>; 2],
    all: Mutex<Vec<[u32; 2]>>,
}

impl Seen {
    fn new() -> &'static Self {
        Box::leak(Box::default())
    }

    fn now(&self) -> [u32; 2] {
        // SAFETY: a test's thread looks when no launch is under way, and functions are called one at a time.
        [0, 1].map(|index| unsafe { self.places[index].get().read_volatile() })
    }
}

/// Notes what is there, and changes the first.
unsafe extern "C" fn look(data: *mut c_void) {
    // SAFETY: tests give this.
    let seen = unsafe { &*data.cast::<Seen>() };
    seen.all.lock().unwrap().push(seen.now());
    // SAFETY: as in `now`.
    unsafe { *seen.places[0].get() += 100 };
}

/// Memory that kernels and the host see alike.
fn pinned() -> *mut u32 {
    let mut at: *mut c_void = null_mut();
    ok!(cuMemHostAlloc(&mut at, 4, 2));
    // SAFETY: of that size.
    unsafe { at.cast::<u32>().write(0) };
    at.cast()
}

/// Copies to the device in a stream.
fn write(to: CUdeviceptr, from: &[u8], stream: CUstream) {
    ok!(cuMemcpyHtoDAsync_v2(
        to,
        from.as_ptr().cast(),
        from.len(),
        stream
    ));
}

fn copy_back(to: *mut u32, from: CUdeviceptr) -> CUDA_MEMCPY3D {
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    (copy.WidthInBytes, copy.Height, copy.Depth) = (4, 1, 1);
    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    (copy.srcDevice, copy.dstHost) = (from, to.cast());
    copy
}

/// A graph that waits for a word, doubles a number, copies it to the program, and calls `look`.
struct Rig {
    gate: *mut u32,
    from: CUdeviceptr,
    seen: &'static Seen,
    graph: CUgraph,
    copied: CUgraphNode,
    called: CUgraphNode,
}

impl Rig {
    fn new() -> Self {
        let module = module(ORDER);
        let (gate, from, seen) = (pinned(), device(&[1u32]), Seen::new());
        let (one, at) = (1u32, gate as CUdeviceptr);
        let graph = graph();
        let mut spin = [argument(&at), argument(&one)];
        let waited = Self::kernel(graph, &[], function(module, "spin"), &mut spin);
        let mut twice = [argument(&from), argument(&one)];
        let doubled = Self::kernel(graph, &[waited], function(module, "twice"), &mut twice);
        let (mut copied, mut called) = (null_mut(), null_mut());
        let copy = copy_back(seen.places[0].get(), from);
        let own = current();
        ok!(cuGraphAddMemcpyNode(
            &mut copied,
            graph,
            &doubled,
            1,
            &copy,
            own
        ));
        let look = Self::look(seen);
        ok!(cuGraphAddHostNode(&mut called, graph, &copied, 1, &look));
        Self {
            gate,
            from,
            seen,
            graph,
            copied,
            called,
        }
    }

    fn look(seen: &'static Seen) -> CUDA_HOST_NODE_PARAMS {
        CUDA_HOST_NODE_PARAMS {
            r#fn: Some(look),
            userData: std::ptr::from_ref(seen).cast_mut().cast(),
        }
    }

    fn kernel(
        graph: CUgraph,
        after: &[CUgraphNode],
        function: CUfunction,
        arguments: &mut [*mut c_void],
    ) -> CUgraphNode {
        // SAFETY: numbers and pointers: zero is a value of each.
        let mut kernel: CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
        kernel.func = function;
        (kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ) = (1, 1, 1);
        (kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ) = (1, 1, 1);
        kernel.kernelParams = arguments.as_mut_ptr();
        let (mut node, first) = (
            null_mut(),
            if after.is_empty() {
                null()
            } else {
                after.as_ptr()
            },
        );
        ok!(cuGraphAddKernelNode_v2(
            &mut node,
            graph,
            first,
            after.len(),
            &kernel
        ));
        node
    }

    /// Launches both, each in a stream of its own, and opens the gate. What the functions have seen.
    fn run(&self, launches: [CUgraphExec; 2]) -> Vec<[u32; 2]> {
        let streams = launches.map(|_| stream(1));
        for (executable, stream) in launches.into_iter().zip(streams) {
            ok!(cuGraphLaunch(executable, stream));
        }
        // SAFETY: a word that kernels look at, too.
        unsafe { AtomicU32::from_ptr(self.gate) }.store(1, Ordering::SeqCst);
        for stream in streams {
            ok!(cuStreamSynchronize(stream));
            ok!(cuStreamDestroy_v2(stream));
        }
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.gate) }.store(0, Ordering::SeqCst);
        std::mem::take(&mut self.seen.all.lock().unwrap())
    }

    /// Has an executable graph copy to somewhere else.
    fn copies_to(&self, executable: CUgraphExec, to: *mut u32) {
        let copy = copy_back(to, self.from);
        let own = current();
        ok!(cuGraphExecMemcpyNodeSetParams(
            executable,
            self.copied,
            &copy,
            own
        ));
    }

    fn end(self, executables: &[CUgraphExec]) {
        for executable in executables {
            ok!(cuGraphExecDestroy(*executable));
        }
        ok!(cuGraphDestroy(self.graph));
    }
}

#[test]
fn functions_of_one_executable_graph_see_their_own_launch_s_data_in_whatever_streams_they_run() {
    let _context = context();
    let rig = Rig::new();
    let executable = instance(rig.graph);
    assert_eq!(rig.run([executable; 2]), [[2, 0], [4, 0]]);
    // What the function has changed last stays.
    assert_eq!(rig.seen.now(), [104, 0]);
    assert_eq!(rig.run([executable; 2]), [[8, 0], [16, 0]]);
    rig.end(&[executable]);
}

#[test]
fn copies_of_ordinary_memory_to_the_device_need_no_order() {
    let _context = context();
    let rig = Rig::new();
    let (from, to) = (7u32, device(&[0u32]));
    let mut copy = copy_back(null_mut(), 0);
    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (copy.srcHost, copy.dstDevice) = ((&raw const from).cast(), to);
    let (mut child, mut node) = (null_mut(), null_mut());
    ok!(cuGraphCreate(&mut child, 0));
    ok!(cuGraphAddMemcpyNode(
        &mut node,
        child,
        null(),
        0,
        &copy,
        current()
    ));
    ok!(cuGraphAddChildGraphNode(
        &mut node,
        rig.graph,
        null(),
        0,
        child
    ));
    let executable = instance(rig.graph);
    assert_eq!(rig.run([executable; 2]), [[2, 0], [4, 0]]);
    assert_eq!(values::<u32>(to, 1), [7]);
    ok!(cuGraphDestroy(child));
    rig.end(&[executable]);
}

#[test]
fn functions_that_two_executable_graphs_have_in_common_see_what_their_own_graph_has_copied() {
    let _context = context();
    let rig = Rig::new();
    let (first, second) = (instance(rig.graph), instance(rig.graph));
    rig.copies_to(second, rig.seen.places[1].get());
    assert_eq!(rig.run([first, second]), [[2, 0], [102, 4]]);
    assert_eq!(rig.run([second, first]), [[202, 8], [16, 8]]);
    // One that copies to pinned memory lands nothing of the other one's.
    rig.copies_to(second, pinned());
    assert_eq!(rig.run([second, first]), [[116, 8], [64, 8]]);
    assert_eq!(rig.seen.now(), [164, 8]);
    rig.end(&[first, second]);
}

#[test]
fn functions_of_an_updated_graph_see_what_it_copies_or_are_refused() {
    let _context = context();
    let (first, second) = (Rig::new(), Rig::new());
    let (executable, own) = (instance(first.graph), current());
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut told: CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
    let mut update = |to: &Rig| ok!(cuGraphExecUpdate_v2(executable, to.graph, &mut told));
    update(&second);
    assert_eq!(second.run([executable; 2]), [[2, 0], [4, 0]]);
    assert!(first.seen.all.lock().unwrap().is_empty());
    // Which copy the first graph's node stands for now, nobody knows.
    let moved = copy_back(first.seen.places[1].get(), first.from);
    let changed = cuda!(cuGraphExecMemcpyNodeSetParams(
        executable,
        first.copied,
        &moved,
        own
    ));
    assert_eq!(changed, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    let changed = cuda!(cuGraphNodeSetEnabled(executable, first.copied, 0));
    assert_eq!(changed, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    // Neither what a function comes behind that is that node's.
    let look = Rig::look(first.seen);
    ok!(cuGraphExecHostNodeSetParams(
        executable,
        first.called,
        &look
    ));
    let stream = stream(1);
    let launched = cuda!(cuGraphLaunch(executable, stream));
    assert_eq!(launched, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    // With the graph that it was made of, all of that is known again.
    update(&first);
    first.copies_to(executable, first.seen.places[1].get());
    assert_eq!(first.run([executable; 2]), [[0, 2], [100, 4]]);
    ok!(cuStreamDestroy_v2(stream));
    first.end(&[executable]);
    second.end(&[]);
}

#[test]
fn a_capture_that_has_become_invalid_gives_the_places_of_its_copies_back() {
    let _context = context();
    let bytes = 64 << 20;
    let (mut to, from) = (0, vec![7u8; bytes]);
    ok!(cuMemAlloc_v2(&mut to, bytes));
    let (first, second) = (stream(1), stream(1));
    // More in all than there is room for in the window of 2 GiB.
    for round in 0..40 {
        let mut graph = null_mut();
        begin_capture(first);
        write(to, &from, first);
        let asked = cuda!(cuStreamQuery(first));
        assert_eq!(asked, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        if round % 4 == 3 {
            // It ends with its stream, too.
            let gone = stream(1);
            begin_capture(gone);
            write(to, &from, gone);
            ok!(cuStreamDestroy_v2(gone));
        }
        let ended = cuda!(cuStreamEndCapture(first, &mut graph));
        assert_eq!(ended, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        assert!(graph.is_null());
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        ok!(cuStreamIsCapturing(first, &mut status));
        let none = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        assert_eq!(status, none, "round {round}");
    }
    // Another capture is as valid as any.
    begin_capture(first);
    write(to, &from, first);
    let graph = end_capture(first);
    let executable = instance(graph);
    ok!(cuGraphLaunch(executable, second));
    ok!(cuStreamSynchronize(second));
    assert!(values::<u8>(to, bytes) == from);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    for stream in [first, second] {
        ok!(cuStreamDestroy_v2(stream));
    }
    ok!(cuMemFree_v2(to));
}

#[test]
fn memory_that_is_freed_beside_a_capture_stays_reserved_and_the_capture_valid() {
    let _context = context();
    // More than half of the window of 2 GiB: two have no room.
    let large = 1200 << 20;
    let allocate = || {
        let mut at = null_mut();
        (cuda!(cuMemHostAlloc(&mut at, large, 0)), at)
    };
    let first = stream(1);
    let (_, at) = allocate();
    let mut registered = vec![0u8; 1 << 20];
    let registered = registered.as_mut_ptr().cast();
    ok!(cuMemHostRegister_v2(registered, 1 << 20, 0));
    begin_capture(first);
    ok!(cuMemFreeHost(at));
    ok!(cuMemHostUnregister(registered));
    assert_eq!(
        cuda!(cuMemFreeHost(at)),
        CUresult::CUDA_ERROR_INVALID_VALUE,
        "it is not the program's any more"
    );
    assert_eq!(allocate().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let graph = end_capture(first);
    assert!(!graph.is_null());
    ok!(cuGraphDestroy(graph));
    // Free again, as soon as it is needed.
    let (allocated, at) = allocate();
    assert_eq!(allocated, CUresult::CUDA_SUCCESS);
    ok!(cuMemFreeHost(at));
    ok!(cuStreamDestroy_v2(first));
}

#[test]
fn a_captured_copy_of_memory_that_is_not_pinned_is_one_node_of_any_size() {
    let _context = context();
    // What copies go through is known to the driver in parts from here on.
    let small = device(&[0u8; 1]);
    let mut kept = Vec::new();
    for megabytes in [12usize, 20, 33] {
        let bytes = megabytes << 20;
        let (mut to, mut other) = (0, 0);
        ok!(cuMemAlloc_v2(&mut to, bytes));
        ok!(cuMemAlloc_v2(&mut other, bytes));
        ok!(cuMemsetD8_v2(to, 0, bytes));
        let (from, stream) = (vec![megabytes as u8; bytes], stream(1));
        begin_capture(stream);
        write(to, &from, stream);
        let graph = end_capture(stream);
        let (mut node, mut count) = (null_mut(), 0);
        ok!(cuGraphGetNodes(graph, null_mut(), &mut count));
        assert_eq!(count, 1, "{megabytes} MiB");
        ok!(cuGraphGetNodes(graph, &mut node, &mut count));
        // Another one in its place: nothing is left of the one before.
        let executable = instance(graph);
        // SAFETY: numbers and pointers: zero is a value of each.
        let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
        (copy.WidthInBytes, copy.Height, copy.Depth) = (bytes, 1, 1);
        copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
        copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
        (copy.srcHost, copy.dstDevice) = (from.as_ptr().cast(), other);
        let own = current();
        ok!(cuGraphExecMemcpyNodeSetParams(executable, node, &copy, own));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert!(values::<u8>(to, bytes).iter().all(|byte| *byte == 0));
        assert!(values::<u8>(other, bytes) == from);
        for at in [to, other] {
            ok!(cuMemFree_v2(at));
        }
        kept.push((graph, executable, stream));
    }
    for (graph, executable, stream) in kept {
        ok!(cuGraphExecDestroy(executable));
        ok!(cuGraphDestroy(graph));
        ok!(cuStreamDestroy_v2(stream));
    }
    ok!(cuMemFree_v2(small));
}

#[test]
fn captured_copies_find_places_beside_small_pinned_memory() {
    let _context = context();
    let small = 2 << 20;
    let allocated: Vec<*mut c_void> = std::iter::repeat_with(|| {
        let mut at = null_mut();
        ok!(cuMemHostAlloc(&mut at, small, 0));
        at
    })
    .take(48)
    .collect();
    // The driver goes on to know them, one by one.
    for at in allocated {
        ok!(cuMemFreeHost(at));
    }
    // What follows is not aligned.
    let tiny = pinned();
    let bytes = 12 << 20;
    let (mut to, stream, from) = (0, stream(1), vec![7u8; bytes]);
    ok!(cuMemAlloc_v2(&mut to, bytes));
    let executables = [(); 3].map(|()| {
        begin_capture(stream);
        write(to, &from, stream);
        let graph = end_capture(stream);
        let executable = instance(graph);
        ok!(cuGraphDestroy(graph));
        executable
    });
    for executable in executables {
        ok!(cuMemsetD8_v2(to, 0, bytes));
        ok!(cuCtxSynchronize());
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert!(values::<u8>(to, bytes) == from);
        ok!(cuGraphExecDestroy(executable));
    }
    ok!(cuMemFreeHost(tiny.cast()));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuMemFree_v2(to));
}

#[test]
fn a_capture_ends_with_its_context_and_gives_the_places_of_its_copies_back() {
    let (bytes, from) = (64 << 20, vec![7u8; 64 << 20]);
    // More in all than there is room for in the window of 2 GiB.
    for _ in 0..40 {
        let _context = context();
        let (mut to, stream) = (0, stream(1));
        ok!(cuMemAlloc_v2(&mut to, bytes));
        begin_capture(stream);
        write(to, &from, stream);
    }
}

#[test]
fn copies_of_graphs_leave_room_for_ordinary_ones_and_are_refused_beyond_that() {
    let _context = context();
    let bytes = 64 << 20;
    let (mut to, mut from) = (0, vec![7u8; bytes]);
    ok!(cuMemAlloc_v2(&mut to, bytes));
    let (captured, ordinary) = (stream(1), stream(1));
    begin_capture(captured);
    let mut capture = |bytes| {
        cuda!(cuMemcpyHtoDAsync_v2(
            to,
            from.as_mut_ptr().cast(),
            bytes,
            captured
        ))
    };
    let no_room = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    let mut at: *mut c_void = null_mut();
    // Until there is no room for a page. What copies of earlier tests have used is given back meanwhile.
    loop {
        for length in [bytes, 1 << 20, 4096] {
            let refused = std::iter::repeat_with(|| capture(length)).find(|copied| copied.0 != 0);
            assert_eq!(refused, Some(no_room), "{length}");
        }
        let pinned = cuda!(cuMemHostAlloc(&mut at, 4096, 0));
        if pinned == no_room {
            break;
        }
        assert_eq!(pinned, CUresult::CUDA_SUCCESS);
        ok!(cuMemFreeHost(at));
    }
    for (round, length) in [4096, 1 << 20, bytes].into_iter().enumerate() {
        let (there, mut back) = (vec![round as u8 + 1; length], vec![0u8; length]);
        write(to, &there, ordinary);
        ok!(cuMemcpyDtoHAsync_v2(
            back.as_mut_ptr().cast(),
            to,
            length,
            ordinary
        ));
        ok!(cuStreamSynchronize(ordinary));
        assert!(back == there, "{length}");
    }
    // What was refused is no part of the graph, and what was not is.
    let graph = end_capture(captured);
    let executable = instance(graph);
    ok!(cuGraphLaunch(executable, ordinary));
    ok!(cuStreamSynchronize(ordinary));
    assert!(values::<u8>(to, bytes) == from);
    // With the graph goes what it had of the window.
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    ok!(cuMemHostAlloc(&mut at, bytes, 0));
    ok!(cuMemFreeHost(at));
    for stream in [captured, ordinary] {
        ok!(cuStreamDestroy_v2(stream));
    }
    ok!(cuMemFree_v2(to));
}
