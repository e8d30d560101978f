//! Graphs: launches, and nodes that hold addresses of the program.

use cuda_definition::driver::types::*;
use gantry_remoting::{
    apis::cuda::{
        Kind,
        calls::{AddKernelNode, LaunchGraph, SetKernelNode, Shape},
        codes,
    },
    wire::Blob,
};

use crate::{
    context,
    entry::{Outcome, connected, entry_points, put},
    forward::forward,
    handles, launch,
};

/// Function, shape and parameters of a kernel's node.
///
/// # Safety
/// It is as the API wants it.
unsafe fn node(params: *const CUDA_KERNEL_NODE_PARAMS) -> Outcome<(u32, Shape, Blob)> {
    let link = connected()?;
    // SAFETY: the caller's promise.
    let node = unsafe { params.as_ref() }.ok_or(codes::INVALID_VALUE)?;
    let function = if node.func.is_null() {
        node.kern as u64
    } else {
        node.func as u64
    };
    let kernel = launch::kernel(link, function)?;
    // SAFETY: as above.
    let parameters = unsafe { launch::gather(&kernel, node.kernelParams, node.extra)? };
    let shape = Shape {
        grid: [node.gridDimX, node.gridDimY, node.gridDimZ],
        block: [node.blockDimX, node.blockDimY, node.blockDimZ],
        shared: node.sharedMemBytes,
    };
    let number = handles::valid(Kind::Function, function)?;
    Ok((number, shape, Blob(parameters)))
}

unsafe fn set(
    executable: u64,
    changed: CUgraphNode,
    params: *const CUDA_KERNEL_NODE_PARAMS,
) -> Outcome {
    let link = connected()?;
    // SAFETY: the caller's promise.
    let (function, shape, parameters) = unsafe { node(params)? };
    link.ask(&SetKernelNode {
        context: context::need()?,
        executable: handles::valid(Kind::Executable, executable)?,
        node: handles::valid(Kind::Node, changed as u64)?,
        function,
        shape,
        parameters,
    })
}

entry_points! {
    fn cuGraphLaunch(hGraph: CUgraphExec, hStream: CUstream) {
        let link = connected()?;
        let graph = handles::valid(Kind::Executable, hGraph as u64)?;
        if graph == 0 {
            return Err(codes::INVALID_VALUE);
        }
        link.post(&LaunchGraph {
            context: context::need()?,
            stream: handles::valid(Kind::Stream, hStream as u64)?,
            graph,
        })
    }

    fn cuGraphAddKernelNode_v2(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
    ) {
        let link = connected()?;
        let (function, shape, parameters) = node(nodeParams)?;
        if numDependencies > 0 && dependencies.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let after = (0..numDependencies)
            .map(|index| handles::valid(Kind::Node, dependencies.add(index).read() as u64));
        let added = link.ask(&AddKernelNode {
            context: context::need()?,
            graph: handles::valid(Kind::Graph, hGraph as u64)?,
            after: after.collect::<Outcome<_>>()?,
            function,
            shape,
            parameters,
        })?;
        put(phGraphNode, handles::handle(Kind::Node, added) as CUgraphNode)
    }

    fn cuGraphKernelNodeSetParams_v2(hNode: CUgraphNode, nodeParams: *const CUDA_KERNEL_NODE_PARAMS) {
        set(0, hNode, nodeParams)
    }

    fn cuGraphExecKernelNodeSetParams_v2(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
    ) {
        set(hGraphExec as u64, hNode, nodeParams)
    }

    fn cuGraphInstantiate_v2(
        phGraphExec: *mut CUgraphExec,
        hGraph: CUgraph,
        _phErrorNode: *mut CUgraphNode,
        _logBuffer: *mut std::ffi::c_char,
        _bufferSize: usize,
    ) {
        forward("cuGraphInstantiateWithFlags", &[phGraphExec as u64, hGraph as u64, 0])
    }
}
