//! Graphs that a program makes node by node, and their launch.

use std::{
    ffi::{c_uint, c_ulonglong},
    sync::Arc,
};

use cuda_definition::driver::types::*;

use super::{
    entry_points, modules, put,
    streams::{host, submit},
    volumes,
};
use crate::driver::{
    Answer,
    context::{self, Context},
    module::Shape,
    objects::{self, Object},
    stream::{Graph, Task},
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn add_node(graph: CUgraph, node: *mut CUgraphNode, task: Task) -> Answer {
    let graph = objects::graph(graph)?;
    graph.push(task);
    // Nodes are numbers within all graphs: nothing is asked of them later.
    // SAFETY: the caller has room for it.
    unsafe { put(node, objects::number() as CUgraphNode) }
}

entry_points! {
    fn cuGraphCreate(phGraph: *mut CUgraph, _flags: c_uint) {
        context::initialised()?;
        let handle = objects::number();
        objects::insert(handle, Object::Graph(Arc::new(Graph::new(handle))));
        put(phGraph, handle as CUgraph)
    }

    fn cuGraphDestroy(hGraph: CUgraph) {
        objects::remove(objects::graph(hGraph)?.handle);
        Ok(())
    }

    // Dependencies are nodes that exist already: the order in which nodes are added obeys them all.
    fn cuGraphAddKernelNode_v2(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
    ) {
        let node = nodeParams.as_ref().ok_or(INVALID)?;
        let shape = Shape {
            grid: [node.gridDimX, node.gridDimY, node.gridDimZ],
            block: [node.blockDimX, node.blockDimY, node.blockDimZ],
            dynamic: u64::from(node.sharedMemBytes),
            cooperative: false,
        };
        let function = if node.func.is_null() { node.kern.cast() } else { node.func };
        add_node(hGraph, phGraphNode, modules::work(function, shape, node.kernelParams, node.extra)?)
    }

    fn cuGraphAddHostNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        nodeParams: *const CUDA_HOST_NODE_PARAMS,
    ) {
        let node = nodeParams.as_ref().ok_or(INVALID)?;
        add_node(hGraph, phGraphNode, host(node.r#fn, node.userData)?)
    }

    fn cuGraphAddMemcpyNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        copyParams: *const CUDA_MEMCPY3D,
        _ctx: CUcontext,
    ) {
        add_node(hGraph, phGraphNode, volumes::node(copyParams.as_ref().ok_or(INVALID)?)?)
    }

    fn cuGraphAddMemsetNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        memsetParams: *const CUDA_MEMSET_NODE_PARAMS,
        ctx: CUcontext,
    ) {
        let node = memsetParams.as_ref().ok_or(INVALID)?;
        let size = (node.width, node.height);
        let context = objects::context(ctx)?;
        let task = volumes::fill(node.dst, node.pitch, node.value, node.elementSize as usize, size, &context)?;
        add_node(hGraph, phGraphNode, task)
    }

    fn cuGraphAddChildGraphNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        childGraph: CUgraph,
    ) {
        // A copy, as the API says.
        let nodes = objects::graph(childGraph)?.nodes();
        add_node(hGraph, phGraphNode, Arc::new(move |context: &Arc<Context>| {
            nodes.iter().try_for_each(|node| node(context))
        }))
    }

    fn cuGraphClone(phGraphClone: *mut CUgraph, originalGraph: CUgraph) {
        let original = objects::graph(originalGraph)?;
        let handle = objects::number();
        let copy = Graph::new(handle);
        original.nodes().into_iter().for_each(|node| copy.push(node));
        objects::insert(handle, Object::Graph(Arc::new(copy)));
        put(phGraphClone, handle as CUgraph)
    }

    fn cuGraphAddEmptyNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
    ) {
        add_node(hGraph, phGraphNode, Arc::new(|_: &_| Ok(())))
    }

    fn cuGraphGetNodes(hGraph: CUgraph, nodes: *mut CUgraphNode, numNodes: *mut usize) {
        if !nodes.is_null() {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        put(numNodes, objects::graph(hGraph)?.nodes().len())
    }

    fn cuGraphInstantiateWithFlags(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, _flags: c_ulonglong) {
        let graph = objects::graph(hGraph)?;
        // What is added to the graph later is not part of this.
        let handle = objects::number();
        let copy = Graph::new(handle);
        graph.nodes().into_iter().for_each(|node| copy.push(node));
        objects::insert(handle, Object::Executable(Arc::new(copy)));
        put(phGraphExec, handle as CUgraphExec)
    }

    fn cuGraphExecDestroy(hGraphExec: CUgraphExec) {
        objects::remove(objects::executable(hGraphExec)?.handle);
        Ok(())
    }

    fn cuGraphLaunch(hGraphExec: CUgraphExec, hStream: CUstream) {
        let nodes = objects::executable(hGraphExec)?.nodes();
        submit(hStream, Arc::new(move |context: &Arc<Context>| {
            nodes.iter().try_for_each(|node| node(context))
        }))
    }

    fn cuGraphUpload(hGraphExec: CUgraphExec, hStream: CUstream) {
        objects::executable(hGraphExec)?;
        context::current()?.stream(hStream).map(|_| ())
    }
}
