//! Nodes of all kinds by one call, as the runtime library adds them.

use std::ptr::{null, null_mut};

use cuda_definition::driver::types::*;

use crate::driver::{argument, context, device, function, module, ok, values};

const ORDER: &str = include_str!("../../../tests/cuda-driver/tests/kernels/order.compute_75.ptx");

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

#[test]
fn nodes_of_all_kinds_are_added_by_one_call() {
    let _context = context();
    let twice = function(module(ORDER), "twice");
    let (at, count) = (device(&[1u32, 2, 3, 4]), 4u32);
    let mut arguments = [argument(&at), argument(&count)];
    let mut graph = null_mut();
    ok!(cuGraphCreate(&mut graph, 0));
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
    let mut handle = 0;
    // Drivers take none without one.
    let mut own = null_mut();
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
    let mut executable = null_mut();
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    ok!(cuGraphLaunch(executable, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(values::<u32>(at, 4), [12, 12, 12, 16]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
}
