//! Graphs: launches, and nodes that contain addresses of the program.

use std::{
    ffi::{c_uint, c_ulonglong},
    ptr::null_mut,
};

use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{AddCopyNode, AddKernelNode, LaunchGraph, SetCopyNode, SetKernelNode, Shape, Side},
        codes,
    },
    wire::Blob,
};

use crate::{
    arrays::Volume,
    capture::submit,
    context,
    entry::{Outcome, connected, entry_points, offer, put},
    forward::forward,
    handles, launch,
    paged::{self, PLACES, Paged},
    signals,
};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
const UPLOAD: u64 = 2;

/// The function, shape and parameters of a kernel node.
///
/// # Safety
/// The description is valid as the API requires.
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
    let mut parameters = Vec::new();
    // SAFETY: as above.
    unsafe { launch::gather(&kernel, node.kernelParams, node.extra, &mut parameters)? };
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

/// Converts the nodes that a new node depends on.
///
/// # Safety
/// There are this many.
pub unsafe fn nodes(first: *const CUgraphNode, count: usize) -> Outcome<Vec<u32>> {
    if count > 0 && first.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let node = |index| unsafe { first.add(index).read() } as u64;
    (0..count)
        .map(|index| handles::valid(Kind::Node, node(index)))
        .collect()
}

/// A node's copy.
struct Copied {
    to: Side,
    from: Side,
    size: [u64; 3],
    paged: Option<Paged>,
}

/// Converts a program's description of a node's copy.
///
/// # Safety
/// It is valid as the API requires.
unsafe fn copied(copy: *const CUDA_MEMCPY3D) -> Outcome<Copied> {
    let link = connected()?;
    // SAFETY: the caller's promise.
    let copy = unsafe { copy.as_ref() }.ok_or(codes::INVALID_VALUE)?;
    let volume = Volume::new(link, copy)?;
    let (to, paged) = volume.node_side(link, true)?;
    let (from, other) = volume.node_side(link, false)?;
    if paged.is_some() && other.is_some() {
        return Err(codes::NOT_SUPPORTED);
    }
    Ok(Copied {
        to,
        from,
        size: [volume.width, volume.rows, volume.planes],
        paged: paged.or(other),
    })
}

/// Asks the worker about a node's copy, which `may` be, trying several places in the window.
///
/// # Safety
/// As for [`copied`].
unsafe fn placed<T>(
    copy: *const CUDA_MEMCPY3D,
    may: impl Fn(&Copied) -> Outcome,
    ask: impl Fn(&Copied) -> Outcome<T>,
) -> Outcome<(T, Copied)> {
    // Places that were tried are kept until the end, so that they are not tried again.
    let mut tried = Vec::new();
    loop {
        // SAFETY: the caller's promise.
        let copied = unsafe { copied(copy)? };
        may(&copied)?;
        match ask(&copied) {
            Ok(answer) => return Ok((answer, copied)),
            Err(codes::NOT_SUPPORTED) if copied.paged.is_some() && tried.len() < PLACES => {
                tried.push(copied);
            }
            Err(code) => return Err(code),
        }
    }
}

unsafe fn set_copy(executable: u64, changed: CUgraphNode, copy: *const CUDA_MEMCPY3D) -> Outcome {
    let link = connected()?;
    let executable = handles::valid(Kind::Executable, executable)?;
    let node = handles::valid(Kind::Node, changed as u64)?;
    let context = context::need()?;
    let may = |copied: &Copied| paged::may_replace(executable, node, copied.paged.as_ref());
    let set = |copied: &Copied| {
        link.ask(&SetCopyNode {
            context,
            executable,
            node,
            to: copied.to.clone(),
            from: copied.from.clone(),
            size: copied.size,
        })
    };
    // SAFETY: the caller's promise.
    let ((), copied) = unsafe { placed(copy, may, set)? };
    paged::replace(executable, node, copied.paged);
    Ok(())
}

entry_points! {
    fn cuGraphAddMemcpyNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        copyParams: *const CUDA_MEMCPY3D,
        _ctx: CUcontext,
    ) {
        let link = connected()?;
        let graph = handles::valid(Kind::Graph, hGraph as u64)?;
        let (context, after) = (context::need()?, nodes(dependencies, numDependencies)?);
        let may = |copied: &Copied| paged::may_add(graph, copied.paged.as_ref());
        let (added, copied) = placed(copyParams, may, |copied| {
            link.ask(&AddCopyNode {
                context,
                graph,
                after: after.clone(),
                to: copied.to.clone(),
                from: copied.from.clone(),
                size: copied.size,
            })
        })?;
        paged::add(graph, added, copied.paged);
        put(phGraphNode, handles::handle(Kind::Node, added) as CUgraphNode)
    }

    fn cuGraphMemcpyNodeSetParams(hNode: CUgraphNode, nodeParams: *const CUDA_MEMCPY3D) {
        set_copy(0, hNode, nodeParams)
    }

    fn cuGraphExecMemcpyNodeSetParams(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        copyParams: *const CUDA_MEMCPY3D,
        _ctx: CUcontext,
    ) {
        set_copy(hGraphExec as u64, hNode, copyParams)
    }

    fn cuGraphLaunch(hGraph: CUgraphExec, hStream: CUstream) {
        let link = connected()?;
        let graph = handles::valid(Kind::Executable, hGraph as u64)?;
        if graph == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let (context, stream) = (context::need()?, handles::valid(Kind::Stream, hStream as u64)?);
        signals::skip_next();
        let call = LaunchGraph { context, stream, graph };
        paged::launch(graph, hStream, || submit(link, context, stream, &call))
    }

    fn cuGraphInstantiateWithFlags(phGraphExec: *mut CUgraphExec, hGraph: CUgraph, flags: c_ulonglong) {
        forward("cuGraphInstantiateWithFlags", &[phGraphExec as u64, hGraph as u64, flags])?;
        let executable = handles::valid(Kind::Executable, phGraphExec.read() as u64)?;
        paged::instantiate(handles::valid(Kind::Graph, hGraph as u64)?, executable);
        Ok(())
    }

    fn cuGraphInstantiateWithParams(
        phGraphExec: *mut CUgraphExec,
        hGraph: CUgraph,
        instantiateParams: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    ) {
        let params = instantiateParams.as_mut().ok_or(codes::INVALID_VALUE)?;
        let made = || -> Outcome {
            match cuGraphInstantiateWithFlags(phGraphExec, hGraph, params.flags & !UPLOAD) {
                CUresult::CUDA_SUCCESS if params.flags & UPLOAD == 0 => return Ok(()),
                CUresult::CUDA_SUCCESS => {}
                error => return Err(error.0.cast_signed()),
            }
            // The other form of the call does not upload as well.
            let executable = phGraphExec.read();
            let uploaded = forward("cuGraphUpload", &[executable as u64, params.hUploadStream as u64]);
            if uploaded.is_err() {
                cuGraphExecDestroy(executable);
            }
            uploaded
        };
        let made = made();
        params.hErrNode_out = null_mut();
        params.result_out = match made {
            Ok(()) => CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS,
            Err(_) => CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_ERROR,
        };
        made
    }

    fn cuGraphExecUpdate_v2(
        hGraphExec: CUgraphExec,
        hGraph: CUgraph,
        resultInfo: *mut CUgraphExecUpdateResultInfo,
    ) {
        let words = [hGraphExec as u64, hGraph as u64, resultInfo as u64];
        if let Err(code) = forward("cuGraphExecUpdate_v2", &words) {
            // An error reply does not contain the other results, which programs look at first.
            if code == codes::GRAPH_EXEC_UPDATE_FAILURE {
                offer(resultInfo, CUgraphExecUpdateResultInfo {
                    result: CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR,
                    errorNode: null_mut(),
                    errorFromNode: null_mut(),
                });
            }
            return Err(code);
        }
        let executable = handles::valid(Kind::Executable, hGraphExec as u64)?;
        paged::instantiate(handles::valid(Kind::Graph, hGraph as u64)?, executable);
        Ok(())
    }

    fn cuGraphClone(phGraphClone: *mut CUgraph, originalGraph: CUgraph) {
        forward("cuGraphClone", &[phGraphClone as u64, originalGraph as u64])?;
        let clone = handles::valid(Kind::Graph, phGraphClone.read() as u64)?;
        paged::cloned(handles::valid(Kind::Graph, originalGraph as u64)?, clone);
        Ok(())
    }

    fn cuGraphAddChildGraphNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        childGraph: CUgraph,
    ) {
        let graph = handles::valid(Kind::Graph, hGraph as u64)?;
        let child = handles::valid(Kind::Graph, childGraph as u64)?;
        paged::may_include(child, graph)?;
        let words = [
            phGraphNode as u64,
            hGraph as u64,
            dependencies as u64,
            numDependencies as u64,
            childGraph as u64,
        ];
        forward("cuGraphAddChildGraphNode", &words)?;
        paged::include(child, graph);
        Ok(())
    }

    fn cuGraphDestroy(hGraph: CUgraph) {
        let graph = handles::valid(Kind::Graph, hGraph as u64)?;
        forward("cuGraphDestroy", &[hGraph as u64])?;
        paged::forget(graph);
        Ok(())
    }

    fn cuGraphExecDestroy(hGraphExec: CUgraphExec) {
        let executable = handles::valid(Kind::Executable, hGraphExec as u64)?;
        forward("cuGraphExecDestroy", &[hGraphExec as u64])?;
        paged::ended(executable);
        Ok(())
    }

    fn cuGraphDestroyNode(hNode: CUgraphNode) {
        let node = handles::valid(Kind::Node, hNode as u64)?;
        paged::may_go(node)?;
        forward("cuGraphDestroyNode", &[hNode as u64])?;
        paged::gone(node);
        Ok(())
    }

    fn cuGraphNodeSetEnabled(hGraphExec: CUgraphExec, hNode: CUgraphNode, isEnabled: c_uint) {
        let executable = handles::valid(Kind::Executable, hGraphExec as u64)?;
        paged::may_disable(executable, handles::valid(Kind::Node, hNode as u64)?)?;
        forward("cuGraphNodeSetEnabled", &[hGraphExec as u64, hNode as u64, isEnabled.into()])
    }

    fn cuGraphExecChildGraphNodeSetParams(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        childGraph: CUgraph,
    ) {
        let executable = handles::valid(Kind::Executable, hGraphExec as u64)?;
        let child = handles::valid(Kind::Graph, childGraph as u64)?;
        paged::may_exchange(executable, child)?;
        let words = [hGraphExec as u64, hNode as u64, childGraph as u64];
        forward("cuGraphExecChildGraphNodeSetParams", &words)?;
        paged::exchanged(executable, child);
        Ok(())
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
        let added = link.ask(&AddKernelNode {
            context: context::need()?,
            graph: handles::valid(Kind::Graph, hGraph as u64)?,
            after: nodes(dependencies, numDependencies)?,
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
        match cuGraphInstantiateWithFlags(phGraphExec, hGraph, 0) {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(error.0.cast_signed()),
        }
    }
}
