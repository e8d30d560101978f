//! Graph nodes that call functions of the program, allocate memory, or contain graphs; and nodes of any kind that are
//! added by the generic call.

use std::{collections::HashMap, sync::Mutex};

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{
    Kind,
    calls::{AddAllocNode, AddConditionalNode, AddFreeNode, AddHostNode, SetHostNode},
    codes,
};

use crate::{
    context,
    entry::{Outcome, connected, entry_points, put},
    graphs::{self, nodes},
    handles,
    link::Link,
    memory::{self, What},
    paged::{self, Call},
    streams::lasting_function,
};

/// What was set for a node when it was added, which programs can query.
#[derive(Clone, Copy)]
enum Told {
    /// The function and its data, as numbers.
    Host(CUhostFn, u64),
    /// The size and the address.
    Allocation(usize, CUdeviceptr),
    Freed(CUdeviceptr),
}

/// Graph nodes, by number.
static NODES: Mutex<Option<HashMap<u32, Told>>> = Mutex::new(None);
/// The graphs of conditional nodes, in arrays that the program was given, by the nodes' numbers.
static BODIES: Mutex<Option<HashMap<u32, Box<[u64]>>>> = Mutex::new(None);

fn tell(node: u32, told: Told) {
    let mut nodes = NODES.lock_unpoisoned();
    nodes.get_or_insert_default().insert(node, told);
}

/// What was set for a node when it was added. Unknown for the nodes of a clone.
fn told(node: CUgraphNode) -> Outcome<Told> {
    connected()?;
    let node = handles::valid(Kind::Node, node as u64)?;
    let nodes = NODES.lock_unpoisoned();
    let told = nodes.as_ref().and_then(|nodes| nodes.get(&node).copied());
    told.ok_or(codes::INVALID_VALUE)
}

/// Registers a function of the program for a node. Returns its number, the offset of its word, and what programs can
/// query.
fn function(link: &Link, params: &CUDA_HOST_NODE_PARAMS) -> Outcome<(u64, u64, Told)> {
    let function = params.r#fn.ok_or(codes::INVALID_VALUE)?;
    let data = params.userData as u64;
    let (number, done) = lasting_function(link, move || {
        // SAFETY: the program's function is called with the argument that it expects.
        unsafe { function(data as *mut _) };
    })?;
    Ok((number, done, Told::Host(params.r#fn, data)))
}

unsafe fn set_host(
    executable: u64,
    changed: CUgraphNode,
    params: *const CUDA_HOST_NODE_PARAMS,
) -> Outcome {
    let link = connected()?;
    let executable = handles::valid(Kind::Executable, executable)?;
    let node = handles::valid(Kind::Node, changed as u64)?;
    let context = context::need()?;
    // SAFETY: the caller's promise.
    let params = unsafe { params.as_ref() }.ok_or(codes::INVALID_VALUE)?;
    let (number, done, told) = function(link, params)?;
    let set = link.ask(&SetHostNode {
        context,
        executable,
        node,
        number,
        done,
    });
    set.inspect_err(|_| link.cancel_callback(number))?;
    let function = number;
    paged::calls_instead(executable, Call { function, node });
    if executable == 0 {
        tell(node, told);
    }
    Ok(())
}

/// Refuses an allocation that is shared with other processes, or that involves a location other than the device.
///
/// # Safety
/// There are as many descriptions as the parameters say.
unsafe fn check_pool(params: &CUDA_MEM_ALLOC_NODE_PARAMS) -> Outcome {
    let own = context::device()?;
    let is_own = |location: &CUmemLocation| {
        location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE && location.id == own
    };
    if !is_own(&params.poolProps.location) || params.poolProps.handleTypes.0 != 0 {
        return Err(codes::NOT_SUPPORTED);
    }
    for index in 0..params.accessDescCount {
        if params.accessDescs.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        let access = unsafe { params.accessDescs.add(index).read() };
        if !is_own(&access.location) {
            return Err(codes::NOT_SUPPORTED);
        }
    }
    Ok(())
}

/// Adds a conditional node with its graphs.
unsafe fn add_conditional(
    graph: CUgraph,
    after: Vec<u32>,
    params: &mut CUDA_CONDITIONAL_NODE_PARAMS,
) -> Outcome<u32> {
    let graph = handles::valid(Kind::Graph, graph as u64)?;
    let (node, graphs) = connected()?.ask(&AddConditionalNode {
        context: context::need()?,
        graph,
        after,
        handle: params.handle,
        kind: params.r#type.0,
        size: params.size,
    })?;
    // The program reads as many.
    if graphs.len() != params.size as usize {
        return Err(codes::UNKNOWN);
    }
    paged::has_bodies(graph, node, &graphs);
    let graphs = graphs.into_iter();
    let mut graphs: Box<[u64]> = graphs
        .map(|one| handles::handle(Kind::Graph, one))
        .collect();
    params.phGraph_out = graphs.as_mut_ptr().cast();
    let mut bodies = BODIES.lock_unpoisoned();
    bodies.get_or_insert_default().insert(node, graphs);
    Ok(node)
}

entry_points! {
    fn cuGraphAddHostNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        nodeParams: *const CUDA_HOST_NODE_PARAMS,
    ) {
        let link = connected()?;
        let context = context::need()?;
        let graph = handles::valid(Kind::Graph, hGraph as u64)?;
        let after = nodes(dependencies, numDependencies)?;
        let params = nodeParams.as_ref().ok_or(codes::INVALID_VALUE)?;
        let (number, done, told) = function(link, params)?;
        let added = link.ask(&AddHostNode { context, graph, after, number, done });
        let added = added.inspect_err(|_| link.cancel_callback(number))?;
        paged::calls_function(graph, Call { function: number, node: added });
        tell(added, told);
        put(phGraphNode, handles::handle(Kind::Node, added) as CUgraphNode)
    }

    fn cuGraphHostNodeGetParams(hNode: CUgraphNode, nodeParams: *mut CUDA_HOST_NODE_PARAMS) {
        match told(hNode)? {
            Told::Host(function, data) => put(nodeParams, CUDA_HOST_NODE_PARAMS {
                r#fn: function,
                userData: data as *mut _,
            }),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    fn cuGraphHostNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_HOST_NODE_PARAMS) {
        set_host(0, hNode, nodeParams)
    }

    fn cuGraphExecHostNodeSetParams(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        nodeParams: *const CUDA_HOST_NODE_PARAMS,
    ) {
        set_host(hGraphExec as u64, hNode, nodeParams)
    }

    fn cuGraphAddMemAllocNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        nodeParams: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) {
        let link = connected()?;
        let params = nodeParams.as_mut().ok_or(codes::INVALID_VALUE)?;
        check_pool(params)?;
        let (added, at) = link.ask(&AddAllocNode {
            context: context::need()?,
            graph: handles::valid(Kind::Graph, hGraph as u64)?,
            after: nodes(dependencies, numDependencies)?,
            size: params.bytesize as u64,
        })?;
        params.dptr = at;
        let mut memory = link.state.memory.lock_unpoisoned();
        memory.insert(at, params.bytesize as u64, What::OfGraph, 0, at);
        drop(memory);
        tell(added, Told::Allocation(params.bytesize, at));
        put(phGraphNode, handles::handle(Kind::Node, added) as CUgraphNode)
    }

    fn cuGraphMemAllocNodeGetParams(hNode: CUgraphNode, params_out: *mut CUDA_MEM_ALLOC_NODE_PARAMS) {
        let Told::Allocation(size, at) = told(hNode)? else {
            return Err(codes::INVALID_VALUE);
        };
        // SAFETY: numbers and pointers, for which zero is a valid value.
        let mut params: CUDA_MEM_ALLOC_NODE_PARAMS = std::mem::zeroed();
        params.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        params.poolProps.location.r#type = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        params.poolProps.location.id = memory::device_of(connected()?, at)?;
        (params.bytesize, params.dptr) = (size, at);
        put(params_out, params)
    }

    fn cuGraphAddMemFreeNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        dptr: CUdeviceptr,
    ) {
        let added = connected()?.ask(&AddFreeNode {
            context: context::need()?,
            graph: handles::valid(Kind::Graph, hGraph as u64)?,
            after: nodes(dependencies, numDependencies)?,
            address: dptr,
        })?;
        tell(added, Told::Freed(dptr));
        put(phGraphNode, handles::handle(Kind::Node, added) as CUgraphNode)
    }

    fn cuGraphMemFreeNodeGetParams(hNode: CUgraphNode, dptr_out: *mut CUdeviceptr) {
        match told(hNode)? {
            Told::Freed(at) => put(dptr_out, at),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    fn cuGraphAddNode_v2(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        dependencyData: *const CUgraphEdgeData,
        numDependencies: usize,
        nodeParams: *mut CUgraphNodeParams,
    ) {
        use CUgraphNodeType as T;
        let node = nodeParams.as_mut().ok_or(codes::INVALID_VALUE)?;
        // Only edges without data: a node waits for all of what precedes it.
        let is_plain = |index| {
            let edge = dependencyData.add(index).read();
            edge.from_port == 0 && edge.to_port == 0 && edge.r#type == 0
        };
        if !dependencyData.is_null() && !(0..numDependencies).all(is_plain) {
            return Err(codes::NOT_SUPPORTED);
        }
        let (to, graph, after, count) = (phGraphNode, hGraph, dependencies, numDependencies);
        let of = &mut node.anonymous2;
        let added = match node.r#type {
            T::CU_GRAPH_NODE_TYPE_KERNEL => {
                let own = of.kernel;
                let kernel = CUDA_KERNEL_NODE_PARAMS {
                    func: own.func,
                    gridDimX: own.gridDimX,
                    gridDimY: own.gridDimY,
                    gridDimZ: own.gridDimZ,
                    blockDimX: own.blockDimX,
                    blockDimY: own.blockDimY,
                    blockDimZ: own.blockDimZ,
                    sharedMemBytes: own.sharedMemBytes,
                    kernelParams: own.kernelParams,
                    extra: own.extra,
                    kern: own.kern,
                    ctx: own.ctx,
                };
                graphs::cuGraphAddKernelNode_v2(to, graph, after, count, &raw const kernel)
            }
            T::CU_GRAPH_NODE_TYPE_MEMCPY => {
                let copy = &raw const of.memcpy.copyParams;
                graphs::cuGraphAddMemcpyNode(to, graph, after, count, copy, of.memcpy.copyCtx)
            }
            T::CU_GRAPH_NODE_TYPE_MEMSET => {
                let own = of.memset;
                let fill = CUDA_MEMSET_NODE_PARAMS {
                    dst: own.dst,
                    pitch: own.pitch,
                    value: own.value,
                    elementSize: own.elementSize,
                    width: own.width,
                    height: own.height,
                };
                // Without a context, the current one is used.
                let current = context::top().unwrap_or(0) as CUcontext;
                let ctx = if own.ctx.is_null() { current } else { own.ctx };
                crate::generated::cuGraphAddMemsetNode(to, graph, after, count, &raw const fill, ctx)
            }
            T::CU_GRAPH_NODE_TYPE_HOST => {
                let host = CUDA_HOST_NODE_PARAMS { r#fn: of.host.r#fn, userData: of.host.userData };
                cuGraphAddHostNode(to, graph, after, count, &raw const host)
            }
            T::CU_GRAPH_NODE_TYPE_GRAPH => {
                graphs::cuGraphAddChildGraphNode(to, graph, after, count, of.graph.graph)
            }
            T::CU_GRAPH_NODE_TYPE_EMPTY => {
                crate::generated::cuGraphAddEmptyNode(to, graph, after, count)
            }
            T::CU_GRAPH_NODE_TYPE_WAIT_EVENT => {
                crate::generated::cuGraphAddEventWaitNode(to, graph, after, count, of.eventWait.event)
            }
            T::CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
                crate::generated::cuGraphAddEventRecordNode(to, graph, after, count, of.eventRecord.event)
            }
            T::CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                // The same structure under another name.
                let params = (&raw mut of.alloc).cast();
                cuGraphAddMemAllocNode(to, graph, after, count, params)
            }
            T::CU_GRAPH_NODE_TYPE_MEM_FREE => {
                cuGraphAddMemFreeNode(to, graph, after, count, of.free.dptr)
            }
            T::CU_GRAPH_NODE_TYPE_CONDITIONAL => {
                let added = add_conditional(graph, nodes(after, count)?, &mut of.conditional)?;
                return put(to, handles::handle(Kind::Node, added) as CUgraphNode);
            }
            _ => return Err(codes::NOT_SUPPORTED),
        };
        match added {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(error.0.cast_signed()),
        }
    }
}
const _: () =
    assert!(size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>() == size_of::<CUDA_MEM_ALLOC_NODE_PARAMS_v2>());
