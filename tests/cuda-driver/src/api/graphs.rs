//! Graphs that a program builds node by node, and their launch.

use std::{
    ffi::{c_uint, c_ulonglong, c_void},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use cuda_definition::driver::types::*;

use super::{
    entry_points,
    graph_memory::{allocating, freeing},
    modules, put,
    streams::{host, submit},
    volumes,
};
use crate::driver::{
    Answer, Owner,
    context::{self, Context},
    memory::{Kind, memory},
    module::Shape,
    objects::{self, Object},
    stream::{Condition, Graph, Task},
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn add_node(graph: CUgraph, node: *mut CUgraphNode, task: Task) -> Answer {
    let added = objects::any_graph(graph)?.push(task);
    // SAFETY: the caller has room for it.
    unsafe { put(node, added as CUgraphNode) }
}

/// Replaces the work of a node of an executable graph or, if there is none, of the graph with the node.
fn set_node(executable: Option<CUgraphExec>, node: CUgraphNode, task: Task) -> Answer {
    let node = node as u64;
    let set = match executable {
        Some(executable) => objects::executable(executable)?.replace(node, task),
        None => {
            let graphs = objects::graphs();
            graphs
                .iter()
                .any(|graph| graph.replace(node, Arc::clone(&task)))
        }
    };
    set.then_some(()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// # Safety
/// The parameters meet the API's requirements.
unsafe fn kernel(node: *const CUDA_KERNEL_NODE_PARAMS) -> Answer<Task> {
    // SAFETY: the caller's promise.
    let node = unsafe { node.as_ref() }.ok_or(INVALID)?;
    let shape = Shape {
        grid: [node.gridDimX, node.gridDimY, node.gridDimZ],
        block: [node.blockDimX, node.blockDimY, node.blockDimZ],
        dynamic: u64::from(node.sharedMemBytes),
        cooperative: false,
    };
    let function = if node.func.is_null() {
        node.kern.cast()
    } else {
        node.func
    };
    // SAFETY: as above.
    unsafe { modules::work(function, shape, node.kernelParams, node.extra) }
}

/// # Safety
/// As above.
unsafe fn fill(node: *const CUDA_MEMSET_NODE_PARAMS, context: &Arc<Context>) -> Answer<Task> {
    // SAFETY: the caller's promise.
    let node = unsafe { node.as_ref() }.ok_or(INVALID)?;
    let size = (node.width, node.height);
    let element = node.elementSize as usize;
    volumes::fill(node.dst, node.pitch, node.value, element, size, context)
}

/// # Safety
/// As above.
unsafe fn function(node: *const CUDA_HOST_NODE_PARAMS) -> Answer<Task> {
    // SAFETY: the caller's promise.
    let node = unsafe { node.as_ref() }.ok_or(INVALID)?;
    host(node.r#fn, node.userData)
}

/// An object that is destroyed with the last graph that keeps it.
struct UserObject {
    end: unsafe extern "C" fn(*mut c_void),
    data: usize,
}

impl Drop for UserObject {
    fn drop(&mut self) {
        // SAFETY: the caller's function with the argument it expects, called once.
        unsafe { (self.end)(self.data as *mut c_void) };
    }
}

/// Writes as many handles as there is room for, and fills the remaining room with null.
///
/// # Safety
/// There is room for `room` handles.
unsafe fn list(to: *mut CUgraphNode, room: usize, all: &[u64]) {
    for index in 0..room {
        let node = all.get(index).copied().unwrap_or(0);
        // SAFETY: the caller's promise.
        unsafe { to.add(index).write(node as CUgraphNode) };
    }
}

fn run(nodes: &[Task], context: &Arc<Context>) -> Answer {
    nodes.iter().try_for_each(|node| node(context))
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

    // Dependencies are existing nodes, so the order in which nodes are added satisfies all of them.
    fn cuGraphAddKernelNode_v2(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
    ) {
        add_node(hGraph, phGraphNode, kernel(nodeParams)?)
    }

    fn cuGraphAddHostNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        nodeParams: *const CUDA_HOST_NODE_PARAMS,
    ) {
        add_node(hGraph, phGraphNode, function(nodeParams)?)
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
        add_node(hGraph, phGraphNode, fill(memsetParams, &objects::context(ctx)?)?)
    }

    fn cuGraphAddChildGraphNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        childGraph: CUgraph,
    ) {
        // A copy, as the API specifies.
        let child = objects::graph(childGraph)?;
        let child = Graph::copy(0, &child);
        add_node(hGraph, phGraphNode, Arc::new(move |context: &Arc<Context>| {
            run(&child.nodes(), context)
        }))
    }

    fn cuGraphClone(phGraphClone: *mut CUgraph, originalGraph: CUgraph) {
        let original = objects::graph(originalGraph)?;
        let handle = objects::number();
        objects::insert(handle, Object::Graph(Arc::new(Graph::clone_of(handle, &original))));
        put(phGraphClone, handle as CUgraph)
    }

    fn cuGraphNodeFindInClone(phNode: *mut CUgraphNode, hOriginalNode: CUgraphNode, hClonedGraph: CUgraph) {
        let found = objects::graph(hClonedGraph)?.in_clone(hOriginalNode as u64).ok_or(INVALID)?;
        put(phNode, found as CUgraphNode)
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
        let all = objects::graph(hGraph)?.handles();
        if nodes.is_null() {
            return put(numNodes, all.len());
        }
        let room = numNodes.as_mut().ok_or(INVALID)?;
        list(nodes, *room, &all);
        *room = all.len().min(*room);
        Ok(())
    }

    fn cuGraphGetEdges_v2(
        hGraph: CUgraph,
        from: *mut CUgraphNode,
        to: *mut CUgraphNode,
        edgeData: *mut CUgraphEdgeData,
        numEdges: *mut usize,
    ) {
        let all = objects::graph(hGraph)?.handles();
        let count = all.len().saturating_sub(1);
        if from.is_null() || to.is_null() {
            return put(numEdges, count);
        }
        let room = numEdges.as_mut().ok_or(INVALID)?;
        list(from, *room, &all[..count]);
        list(to, *room, &all[all.len() - count..]);
        if !edgeData.is_null() {
            edgeData.write_bytes(0, *room);
        }
        *room = count.min(*room);
        Ok(())
    }

    fn cuGraphInstantiateWithFlags(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, _flags: c_ulonglong) {
        let graph = objects::graph(hGraph)?;
        // What is added to the graph later is not part of the executable.
        let handle = objects::number();
        objects::insert(handle, Object::Executable(Arc::new(Graph::copy(handle, &graph))));
        put(phGraphExec, handle as CUgraphExec)
    }

    // Nodes are matched in the order in which they were added.
    fn cuGraphExecUpdate_v2(
        hGraphExec: CUgraphExec,
        hGraph: CUgraph,
        resultInfo: *mut CUgraphExecUpdateResultInfo,
    ) {
        let graph = objects::graph(hGraph)?;
        let updated = objects::executable(hGraphExec)?.update(&graph);
        put(resultInfo, CUgraphExecUpdateResultInfo {
            result: match updated {
                true => CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS,
                false => CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED,
            },
            errorNode: std::ptr::null_mut(),
            errorFromNode: std::ptr::null_mut(),
        })?;
        updated.then_some(()).ok_or(CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
    }

    fn cuGraphExecDestroy(hGraphExec: CUgraphExec) {
        objects::remove(objects::executable(hGraphExec)?.handle);
        Ok(())
    }

    fn cuGraphLaunch(hGraphExec: CUgraphExec, hStream: CUstream) {
        // The graph as it is now: changes apply to later launches.
        let executable = objects::executable(hGraphExec)?;
        let launched = Graph::copy(0, &executable);
        submit(hStream, Arc::new(move |context: &Arc<Context>| run(&launched.nodes(), context)))
    }

    fn cuGraphKernelNodeSetParams_v2(hNode: CUgraphNode, nodeParams: *const CUDA_KERNEL_NODE_PARAMS) {
        set_node(None, hNode, kernel(nodeParams)?)
    }

    fn cuGraphExecKernelNodeSetParams_v2(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
    ) {
        set_node(Some(hGraphExec), hNode, kernel(nodeParams)?)
    }

    fn cuGraphMemcpyNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_MEMCPY3D) {
        set_node(None, hNode, volumes::node(nodeParams.as_ref().ok_or(INVALID)?)?)
    }

    fn cuGraphExecMemcpyNodeSetParams(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        copyParams: *const CUDA_MEMCPY3D,
        _ctx: CUcontext,
    ) {
        set_node(Some(hGraphExec), hNode, volumes::node(copyParams.as_ref().ok_or(INVALID)?)?)
    }

    fn cuGraphMemsetNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_MEMSET_NODE_PARAMS) {
        set_node(None, hNode, fill(nodeParams, &context::current()?)?)
    }

    fn cuGraphExecMemsetNodeSetParams(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        memsetParams: *const CUDA_MEMSET_NODE_PARAMS,
        ctx: CUcontext,
    ) {
        set_node(Some(hGraphExec), hNode, fill(memsetParams, &objects::context(ctx)?)?)
    }

    fn cuGraphHostNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_HOST_NODE_PARAMS) {
        set_node(None, hNode, function(nodeParams)?)
    }

    fn cuGraphExecHostNodeSetParams(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        nodeParams: *const CUDA_HOST_NODE_PARAMS,
    ) {
        set_node(Some(hGraphExec), hNode, function(nodeParams)?)
    }

    fn cuGraphAddMemAllocNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        nodeParams: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) {
        let params = nodeParams.as_mut().ok_or(INVALID)?;
        let graph = objects::graph(hGraph)?;
        let owner = Owner { context: 0, ..context::current()?.owner() };
        params.dptr = memory().allocate(params.bytesize as u64, Kind::Device, 0, owner)?;
        let at = params.dptr;
        add_node(hGraph, phGraphNode, allocating(&graph, at))
    }

    fn cuGraphAddMemFreeNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _numDependencies: usize,
        dptr: CUdeviceptr,
    ) {
        let known = memory().find(dptr).filter(|known| known.start == dptr);
        known.ok_or(INVALID)?;
        add_node(hGraph, phGraphNode, freeing(dptr))
    }

    fn cuUserObjectCreate(
        object_out: *mut CUuserObject,
        ptr: *mut c_void,
        destroy: CUhostFn,
        initialRefcount: c_uint,
        flags: c_uint,
    ) {
        if initialRefcount != 1 || flags != 1 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let end = destroy.ok_or(INVALID)?;
        let handle = objects::number();
        let object = UserObject { end, data: ptr as usize };
        objects::insert(handle, Object::Kept(Arc::new(object)));
        put(object_out, handle as CUuserObject)
    }

    fn cuUserObjectRelease(object: CUuserObject, count: c_uint) {
        match objects::remove(object as u64) {
            Some(Object::Kept(_)) if count == 1 => Ok(()),
            _ => Err(INVALID),
        }
    }

    fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint) {
        // Only one reference, moved to the graph.
        if count != 1 || flags != 1 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let graph = objects::any_graph(graph)?;
        match objects::remove(object as u64) {
            Some(Object::Kept(kept)) => graph.keep(object as u64, kept),
            _ => return Err(INVALID),
        }
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, _count: c_uint) {
        objects::any_graph(graph)?.release(object as u64).then_some(()).ok_or(INVALID)
    }

    fn cuGraphConditionalHandleCreate(
        pHandle_out: *mut CUgraphConditionalHandle,
        hGraph: CUgraph,
        _ctx: CUcontext,
        defaultLaunchValue: c_uint,
        flags: c_uint,
    ) {
        objects::any_graph(hGraph)?;
        let handle = objects::number();
        objects::insert(handle, Object::Condition(Arc::new(Condition {
            value: AtomicU32::new(defaultLaunchValue),
            default: (flags & 1 != 0).then_some(defaultLaunchValue),
        })));
        put(pHandle_out, handle)
    }

    // Nodes of other kinds have their own entry points.
    fn cuGraphAddNode_v2(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        _dependencies: *const CUgraphNode,
        _dependencyData: *const CUgraphEdgeData,
        _numDependencies: usize,
        nodeParams: *mut CUgraphNodeParams,
    ) {
        let node = nodeParams.as_mut().ok_or(INVALID)?;
        if node.r#type != CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let own = &mut node.anonymous2.conditional;
        let condition = objects::condition(own.handle as *mut c_void)?;
        let bodies: Vec<Arc<Graph>> = (0..own.size)
            .map(|_| Arc::new(Graph::new(objects::number())))
            .collect();
        for body in &bodies {
            objects::insert(body.handle, Object::Graph(Arc::clone(body)));
        }
        // Leaked, because programs may read it at any time.
        let handles: Vec<u64> = bodies.iter().map(|body| body.handle).collect();
        own.phGraph_out = handles.leak().as_mut_ptr().cast();
        let kind = own.r#type;
        add_node(hGraph, phGraphNode, Arc::new(move |context: &Arc<Context>| {
            if let Some(default) = condition.default {
                condition.value.store(default, Ordering::SeqCst);
            }
            let value = || condition.value.load(Ordering::SeqCst);
            let body = |index: usize| bodies.get(index).map_or(Ok(()), |body| run(&body.nodes(), context));
            match kind {
                CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF if value() != 0 => body(0),
                CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF => body(1),
                CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_SWITCH => body(value() as usize),
                // No kernel here can change the value.
                _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            }
        }))
    }

    fn cuGraphUpload(hGraphExec: CUgraphExec, hStream: CUstream) {
        objects::executable(hGraphExec)?;
        context::current()?.stream(hStream).map(|_| ())
    }
}
