//! Nodes of all kinds by one call, as the runtime library adds them.

use std::ptr::{null, null_mut};

use cuda_definition::driver::types::*;

use crate::driver::{
    argument, context, cuda, current, device, function, graph, instance, module, ok, stream, values,
};

const ORDER: &str =
    include_str!("../../../../tests/cuda-driver/tests/kernels/order.compute_75.ptx");

fn empty(kind: CUgraphNodeType) -> CUgraphNodeParams {
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut node: CUgraphNodeParams = unsafe { std::mem::zeroed() };
    node.r#type = kind;
    node
}

fn add(graph: CUgraph, after: &[CUgraphNode], params: &mut CUgraphNodeParams) -> CUgraphNode {
    let mut node = null_mut();
    let first = if after.is_empty() {
        null()
    } else {
        after.as_ptr()
    };
    ok!(cuGraphAddNode_v2(
        &mut node,
        graph,
        first,
        null(),
        after.len(),
        params
    ));
    node
}

/// Memory of the program that is not pinned.
fn from_program(to: CUdeviceptr, from: &[u32]) -> CUDA_MEMCPY3D {
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    (copy.WidthInBytes, copy.Height, copy.Depth) = (size_of_val(from), 1, 1);
    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (copy.srcHost, copy.dstDevice) = (from.as_ptr().cast(), to);
    copy
}

unsafe extern "C" fn nothing(_: *mut std::ffi::c_void) {}

/// A node that runs its graph at each launch, as its handle is one then.
fn conditional(graph: CUgraph) -> CUgraphNodeParams {
    // Drivers take no handle without a context.
    let (mut handle, mut own) = (0, null_mut());
    ok!(cuCtxGetCurrent(&mut own));
    ok!(cuGraphConditionalHandleCreate(
        &mut handle,
        graph,
        own,
        1,
        1
    ));
    let mut conditional = empty(CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL);
    conditional.anonymous2.conditional = CUDA_CONDITIONAL_NODE_PARAMS {
        handle,
        r#type: CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF,
        size: 1,
        phGraph_out: null_mut(),
        ctx: null_mut(),
    };
    conditional
}

#[test]
fn graphs_that_may_not_run_copy_no_memory_that_is_not_pinned() {
    let _context = context();
    let (to, other, from) = (device(&[0u32; 4]), device(&[0u32; 4]), vec![5u32; 4]);
    let graph = graph();
    let own = current();
    let mut conditional = conditional(graph);
    add(graph, &[], &mut conditional);
    // SAFETY: the driver's array of one graph.
    let body = unsafe { conditional.anonymous2.conditional.phGraph_out.read() };
    let unpinned = from_program(to, &from);
    let refused = CUresult::CUDA_ERROR_NOT_SUPPORTED;
    // By a node, and by one that becomes one.
    let mut node = null_mut();
    let copy = |graph, node: &mut CUgraphNode, copy: &CUDA_MEMCPY3D| {
        cuda!(cuGraphAddMemcpyNode(node, graph, null(), 0, copy, own))
    };
    assert_eq!(copy(body, &mut node, &unpinned), refused);
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut on_device: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    (on_device.WidthInBytes, on_device.Height, on_device.Depth) = (16, 1, 1);
    on_device.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    on_device.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (on_device.srcDevice, on_device.dstDevice) = (other, to);
    ok!(cuGraphAddMemcpyNode(
        &mut node,
        body,
        null(),
        0,
        &on_device,
        own
    ));
    let set = cuda!(cuGraphMemcpyNodeSetParams(node, &unpinned));
    assert_eq!(set, refused);
    // By a child.
    let child = crate::driver::graph();
    assert_eq!(copy(child, &mut node, &unpinned), CUresult::CUDA_SUCCESS);
    let included = cuda!(cuGraphAddChildGraphNode(&mut node, body, null(), 0, child));
    assert_eq!(included, refused);
    // The graph itself may, and its handle goes on to mean nothing else.
    assert_eq!(copy(graph, &mut node, &unpinned), CUresult::CUDA_SUCCESS);
    let destroyed = cuda!(cuGraphDestroy(body));
    assert_eq!(destroyed, CUresult::CUDA_ERROR_INVALID_VALUE);
    ok!(cuGraphDestroy(child));
    // A function that such a graph calls would look at what is copied to the program only behind the launch.
    let (mut back, mut executable) = (from_program(other, &from), null_mut());
    (back.srcMemoryType, back.dstMemoryType) = (back.dstMemoryType, back.srcMemoryType);
    (back.srcDevice, back.dstHost) = (other, from.as_ptr().cast_mut().cast());
    ok!(cuGraphAddMemcpyNode(
        &mut node,
        graph,
        null(),
        0,
        &back,
        own
    ));
    let host = CUDA_HOST_NODE_PARAMS {
        r#fn: Some(nothing),
        userData: null_mut(),
    };
    ok!(cuGraphAddHostNode(&mut node, body, null(), 0, &host));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    let launched = cuda!(cuGraphLaunch(executable, null_mut()));
    assert_eq!(launched, refused);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
}

#[test]
fn nodes_of_all_kinds_are_added_by_one_call() {
    let _context = context();
    let twice = function(module(ORDER), "twice");
    let (at, count) = (device(&[1u32, 2, 3, 4]), 4u32);
    let mut arguments = [argument(&at), argument(&count)];
    let graph = graph();
    let mut fill = empty(CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET);
    fill.anonymous2.memset = CUDA_MEMSET_NODE_PARAMS_v2 {
        dst: at,
        pitch: 0,
        value: 3,
        elementSize: 4,
        width: 2,
        height: 1,
        ctx: null_mut(),
    };
    let mut kernel = empty(CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL);
    // SAFETY: numbers and pointers: zero is a value of each.
    kernel.anonymous2.kernel = unsafe { std::mem::zeroed() };
    // SAFETY: the part that was written.
    let launched = unsafe { &mut kernel.anonymous2.kernel };
    launched.func = twice;
    (launched.gridDimX, launched.gridDimY, launched.gridDimZ) = (1, 1, 1);
    (launched.blockDimX, launched.blockDimY, launched.blockDimZ) = (4, 1, 1);
    launched.kernelParams = arguments.as_mut_ptr();
    let mut conditional = conditional(graph);
    let filled = add(graph, &[], &mut fill);
    let doubled = add(graph, &[filled], &mut kernel);
    let nothing = add(
        graph,
        &[doubled],
        &mut empty(CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY),
    );
    add(graph, &[nothing], &mut conditional);
    // SAFETY: the driver's array of one graph.
    let body = unsafe { conditional.anonymous2.conditional.phGraph_out.read() };
    add(body, &[], &mut kernel);
    let executable = instance(graph);
    ok!(cuGraphLaunch(executable, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(values::<u32>(at, 4), [12, 12, 12, 16]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
}

#[test]
fn graphs_are_made_executable_with_a_result_and_written_as_text() {
    let _context = context();
    let at = device(&[0u32; 2]);
    let (mut graph, mut own, mut nodes) = (null_mut(), null_mut(), Vec::new());
    ok!(cuGraphCreate(&mut graph, 0));
    ok!(cuCtxGetCurrent(&mut own));
    for value in [3, 4] {
        let fill = CUDA_MEMSET_NODE_PARAMS {
            dst: at,
            pitch: 0,
            value,
            elementSize: 4,
            width: value as usize - 2,
            height: 1,
        };
        let mut node = null_mut();
        let (after, count) = (nodes.as_ptr(), nodes.len());
        ok!(cuGraphAddMemsetNode(
            &mut node, graph, after, count, &fill, own
        ));
        nodes = vec![node];
    }
    let stream = stream(1);
    for flags in [0, 2] {
        // SAFETY: numbers and pointers: zero is a value of each.
        let mut params: CUDA_GRAPH_INSTANTIATE_PARAMS = unsafe { std::mem::zeroed() };
        let error = CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_ERROR;
        (params.flags, params.hUploadStream, params.result_out) = (flags, stream, error);
        let mut executable = null_mut();
        ok!(cuGraphInstantiateWithParams(
            &mut executable,
            graph,
            &mut params
        ));
        let success = CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS;
        assert_eq!(params.result_out, success);
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(values::<u32>(at, 2), [4; 2]);
        ok!(cuGraphExecDestroy(executable));
        let forged = cuda!(cuGraphInstantiateWithParams(
            &mut executable,
            null_mut(),
            &mut params
        ));
        assert_ne!(forged, CUresult::CUDA_SUCCESS);
        assert_eq!(params.result_out, error);
    }
    let file = std::env::temp_dir().join(format!("gantry-graph-{}.dot", std::process::id()));
    let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
    ok!(cuGraphDebugDotPrint(graph, path.as_ptr(), 0));
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(text.starts_with("digraph dot {"), "{text}");
    let edge = "\"graph_1_node_0\" -> \"graph_1_node_1\";";
    assert_eq!(text.matches(edge).count(), 1, "{text}");
    assert_eq!(text.matches("label=").count(), 3, "{text}");
    let nowhere = cuda!(cuGraphDebugDotPrint(graph, c"/nowhere/graph".as_ptr(), 0));
    assert_eq!(nowhere, CUresult::CUDA_ERROR_OPERATING_SYSTEM);
    ok!(cuGraphDestroy(graph));
    ok!(cuStreamDestroy_v2(stream));
}
