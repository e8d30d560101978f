//! Graph nodes with parameters. They are the same for the driver except for kernels, which the runtime names by a host
//! function, and copies, which the driver describes in bytes.

use std::{ffi::c_void, ptr::null_mut};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{entry_points, get},
    context::{chosen, primary, ready},
    copies::part,
    driver::driver,
    error::{Answer, Error},
    launch,
    volumes::{self, Place, Side, volume},
};

/// The context that a node's work belongs to.
fn context() -> Answer<CUcontext> {
    let mut current = null_mut();
    ready()?;
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuCtxGetCurrent(&raw mut current))? };
    if current.is_null() {
        primary(chosen()?)
    } else {
        Ok(current)
    }
}

fn kernel(node: &cudaKernelNodeParams) -> Answer<CUDA_KERNEL_NODE_PARAMS> {
    Ok(CUDA_KERNEL_NODE_PARAMS {
        func: null_mut(),
        gridDimX: node.gridDim.x,
        gridDimY: node.gridDim.y,
        gridDimZ: node.gridDim.z,
        blockDimX: node.blockDim.x,
        blockDimY: node.blockDim.y,
        blockDimZ: node.blockDim.z,
        sharedMemBytes: node.sharedMemBytes,
        kernelParams: node.kernelParams,
        extra: node.extra,
        kern: launch::kernel(node.func)?,
        ctx: context()?,
    })
}

fn fill(node: &cudaMemsetParams) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        dst: node.dst as CUdeviceptr,
        pitch: node.pitch,
        value: node.value,
        elementSize: node.elementSize,
        width: node.width,
        height: node.height,
    }
}

fn host(node: &cudaHostNodeParams) -> CUDA_HOST_NODE_PARAMS {
    CUDA_HOST_NODE_PARAMS {
        r#fn: node.r#fn,
        userData: node.userData,
    }
}

/// A copy of linear memory, as one row.
fn row(
    to: *mut c_void,
    from: *const c_void,
    count: usize,
    kind: cudaMemcpyKind,
) -> Answer<CUDA_MEMCPY3D> {
    let side = |at: *mut c_void| {
        (
            Side::Linear {
                at,
                pitch: count,
                rows: 1,
            },
            Place::default(),
        )
    };
    let extent = cudaExtent {
        width: count,
        height: 1,
        depth: 1,
    };
    volume(side(from.cast_mut()), side(to), extent, kind)
}

/// Converts a node of any kind for the driver.
///
/// # Safety
/// The kind determines which part of the union was written.
unsafe fn node(from: &cudaGraphNodeParams) -> Answer<CUgraphNodeParams> {
    use cudaGraphNodeType as T;
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut to: CUgraphNodeParams = unsafe { std::mem::zeroed() };
    to.r#type = CUgraphNodeType_enum(from.r#type.0);
    // SAFETY: the caller's promise.
    unsafe {
        match from.r#type {
            T::cudaGraphNodeTypeKernel => {
                let own = from.anonymous2.kernel;
                to.anonymous2.kernel = CUDA_KERNEL_NODE_PARAMS_v3 {
                    func: null_mut(),
                    gridDimX: own.gridDim.x,
                    gridDimY: own.gridDim.y,
                    gridDimZ: own.gridDim.z,
                    blockDimX: own.blockDim.x,
                    blockDimY: own.blockDim.y,
                    blockDimZ: own.blockDim.z,
                    sharedMemBytes: own.sharedMemBytes,
                    kernelParams: own.kernelParams,
                    extra: own.extra,
                    kern: launch::kernel(own.func)?,
                    ctx: context()?,
                };
            }
            T::cudaGraphNodeTypeMemcpy => {
                let own = from.anonymous2.memcpy;
                to.anonymous2.memcpy.flags = own.flags;
                to.anonymous2.memcpy.copyCtx = context()?;
                to.anonymous2.memcpy.copyParams = volumes::of_parameters(&own.copyParams)?;
            }
            T::cudaGraphNodeTypeMemset => {
                let own = from.anonymous2.memset;
                to.anonymous2.memset = CUDA_MEMSET_NODE_PARAMS_v2 {
                    dst: own.dst as CUdeviceptr,
                    pitch: own.pitch,
                    value: own.value,
                    elementSize: own.elementSize,
                    width: own.width,
                    height: own.height,
                    ctx: context()?,
                };
            }
            T::cudaGraphNodeTypeConditional => {
                to.anonymous2.reserved1 = from.anonymous2.reserved1;
                to.anonymous2.conditional.ctx = context()?;
            }
            // The same structures under other names.
            _ => to.anonymous2.reserved1 = from.anonymous2.reserved1,
        }
    }
    Ok(to)
}

/// Copies what the driver wrote into a node: an allocation's address, a conditional node's graphs.
///
/// # Safety
/// As for [`node`].
unsafe fn give_back(from: &CUgraphNodeParams, to: &mut cudaGraphNodeParams) {
    use cudaGraphNodeType as T;
    // SAFETY: the caller's promise.
    unsafe {
        match to.r#type {
            T::cudaGraphNodeTypeMemAlloc => {
                to.anonymous2.alloc.dptr = from.anonymous2.alloc.dptr as *mut c_void
            }
            T::cudaGraphNodeTypeConditional => {
                to.anonymous2.conditional.phGraph_out =
                    from.anonymous2.conditional.phGraph_out.cast();
            }
            _ => {}
        }
    }
}

entry_points! {
    fn cudaGraphAddKernelNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        pNodeParams: *const cudaKernelNodeParams,
    ) {
        let node = kernel(&get(pNodeParams)?)?;
        driver!(cuGraphAddKernelNode_v2(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, &raw const node
        ))
    }

    fn cudaGraphKernelNodeSetParams(node: cudaGraphNode_t, pNodeParams: *const cudaKernelNodeParams) {
        let new = kernel(&get(pNodeParams)?)?;
        driver!(cuGraphKernelNodeSetParams_v2(node.cast(), &raw const new))
    }

    fn cudaGraphExecKernelNodeSetParams(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        pNodeParams: *const cudaKernelNodeParams,
    ) {
        let new = kernel(&get(pNodeParams)?)?;
        driver!(cuGraphExecKernelNodeSetParams_v2(hGraphExec.cast(), node.cast(), &raw const new))
    }

    fn cudaGraphAddMemcpyNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        pCopyParams: *const cudaMemcpy3DParms,
    ) {
        ready()?;
        let copy = volumes::of_parameters(&get(pCopyParams)?)?;
        driver!(cuGraphAddMemcpyNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, &raw const copy, context()?
        ))
    }

    fn cudaGraphAddMemcpyNode1D(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        dst: *mut c_void,
        src: *const c_void,
        count: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(dst, src, count, kind)?;
        driver!(cuGraphAddMemcpyNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, &raw const copy, context()?
        ))
    }

    fn cudaGraphAddMemcpyNodeToSymbol(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        symbol: *const c_void,
        src: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(part(symbol, count, offset)? as *mut c_void, src, count, kind)?;
        driver!(cuGraphAddMemcpyNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, &raw const copy, context()?
        ))
    }

    fn cudaGraphAddMemcpyNodeFromSymbol(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        dst: *mut c_void,
        symbol: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(dst, part(symbol, count, offset)? as *const c_void, count, kind)?;
        driver!(cuGraphAddMemcpyNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, &raw const copy, context()?
        ))
    }

    fn cudaGraphMemcpyNodeSetParams(node: cudaGraphNode_t, pNodeParams: *const cudaMemcpy3DParms) {
        ready()?;
        let copy = volumes::of_parameters(&get(pNodeParams)?)?;
        driver!(cuGraphMemcpyNodeSetParams(node.cast(), &raw const copy))
    }

    fn cudaGraphMemcpyNodeSetParams1D(
        node: cudaGraphNode_t,
        dst: *mut c_void,
        src: *const c_void,
        count: usize,
        kind: cudaMemcpyKind,
    ) {
        ready()?;
        let copy = row(dst, src, count, kind)?;
        driver!(cuGraphMemcpyNodeSetParams(node.cast(), &raw const copy))
    }

    fn cudaGraphExecMemcpyNodeSetParams(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        pNodeParams: *const cudaMemcpy3DParms,
    ) {
        ready()?;
        let copy = volumes::of_parameters(&get(pNodeParams)?)?;
        driver!(cuGraphExecMemcpyNodeSetParams(hGraphExec.cast(), node.cast(), &raw const copy, context()?))
    }

    fn cudaGraphExecMemcpyNodeSetParams1D(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        dst: *mut c_void,
        src: *const c_void,
        count: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(dst, src, count, kind)?;
        driver!(cuGraphExecMemcpyNodeSetParams(hGraphExec.cast(), node.cast(), &raw const copy, context()?))
    }

    fn cudaGraphMemcpyNodeSetParamsToSymbol(
        node: cudaGraphNode_t,
        symbol: *const c_void,
        src: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(part(symbol, count, offset)? as *mut c_void, src, count, kind)?;
        driver!(cuGraphMemcpyNodeSetParams(node.cast(), &raw const copy))
    }

    fn cudaGraphMemcpyNodeSetParamsFromSymbol(
        node: cudaGraphNode_t,
        dst: *mut c_void,
        symbol: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(dst, part(symbol, count, offset)? as *const c_void, count, kind)?;
        driver!(cuGraphMemcpyNodeSetParams(node.cast(), &raw const copy))
    }

    fn cudaGraphExecMemcpyNodeSetParamsToSymbol(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        symbol: *const c_void,
        src: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(part(symbol, count, offset)? as *mut c_void, src, count, kind)?;
        driver!(cuGraphExecMemcpyNodeSetParams(hGraphExec.cast(), node.cast(), &raw const copy, context()?))
    }

    fn cudaGraphExecMemcpyNodeSetParamsFromSymbol(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        dst: *mut c_void,
        symbol: *const c_void,
        count: usize,
        offset: usize,
        kind: cudaMemcpyKind,
    ) {
        let copy = row(dst, part(symbol, count, offset)? as *const c_void, count, kind)?;
        driver!(cuGraphExecMemcpyNodeSetParams(hGraphExec.cast(), node.cast(), &raw const copy, context()?))
    }

    fn cudaGraphAddMemsetNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        pMemsetParams: *const cudaMemsetParams,
    ) {
        let fill = fill(&get(pMemsetParams)?);
        driver!(cuGraphAddMemsetNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, &raw const fill, context()?
        ))
    }

    fn cudaGraphMemsetNodeGetParams(node: cudaGraphNode_t, pNodeParams: *mut cudaMemsetParams) {
        ready()?;
        if pNodeParams.is_null() {
            return Err(Error::cudaErrorInvalidValue);
        }
        driver!(cuGraphMemsetNodeGetParams(node.cast(), pNodeParams.cast()))
    }

    fn cudaGraphMemsetNodeSetParams(node: cudaGraphNode_t, pNodeParams: *const cudaMemsetParams) {
        ready()?;
        let fill = fill(&get(pNodeParams)?);
        driver!(cuGraphMemsetNodeSetParams(node.cast(), &raw const fill))
    }

    fn cudaGraphExecMemsetNodeSetParams(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        pNodeParams: *const cudaMemsetParams,
    ) {
        let fill = fill(&get(pNodeParams)?);
        driver!(cuGraphExecMemsetNodeSetParams(hGraphExec.cast(), node.cast(), &raw const fill, context()?))
    }

    fn cudaGraphAddHostNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        pNodeParams: *const cudaHostNodeParams,
    ) {
        ready()?;
        let host = host(&get(pNodeParams)?);
        driver!(cuGraphAddHostNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, &raw const host
        ))
    }

    fn cudaGraphHostNodeGetParams(node: cudaGraphNode_t, pNodeParams: *mut cudaHostNodeParams) {
        ready()?;
        if pNodeParams.is_null() {
            return Err(Error::cudaErrorInvalidValue);
        }
        driver!(cuGraphHostNodeGetParams(node.cast(), pNodeParams.cast()))
    }

    fn cudaGraphHostNodeSetParams(node: cudaGraphNode_t, pNodeParams: *const cudaHostNodeParams) {
        ready()?;
        let host = host(&get(pNodeParams)?);
        driver!(cuGraphHostNodeSetParams(node.cast(), &raw const host))
    }

    fn cudaGraphExecHostNodeSetParams(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        pNodeParams: *const cudaHostNodeParams,
    ) {
        ready()?;
        let host = host(&get(pNodeParams)?);
        driver!(cuGraphExecHostNodeSetParams(hGraphExec.cast(), node.cast(), &raw const host))
    }

    fn cudaGraphAddMemAllocNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        nodeParams: *mut cudaMemAllocNodeParams,
    ) {
        ready()?;
        if nodeParams.is_null() {
            return Err(Error::cudaErrorInvalidValue);
        }
        driver!(cuGraphAddMemAllocNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, nodeParams.cast()
        ))
    }

    fn cudaGraphMemAllocNodeGetParams(node: cudaGraphNode_t, params_out: *mut cudaMemAllocNodeParams) {
        ready()?;
        driver!(cuGraphMemAllocNodeGetParams(node.cast(), params_out.cast()))
    }

    fn cudaGraphAddMemFreeNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        dptr: *mut c_void,
    ) {
        ready()?;
        driver!(cuGraphAddMemFreeNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, dptr as CUdeviceptr
        ))
    }

    fn cudaGraphMemFreeNodeGetParams(node: cudaGraphNode_t, dptr_out: *mut c_void) {
        ready()?;
        driver!(cuGraphMemFreeNodeGetParams(node.cast(), dptr_out.cast()))
    }

    fn cudaGraphAddNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        dependencyData: *const cudaGraphEdgeData,
        numDependencies: usize,
        nodeParams: *mut cudaGraphNodeParams,
    ) {
        ready()?;
        let own = nodeParams.as_mut().ok_or(Error::cudaErrorInvalidValue)?;
        let mut node = node(own)?;
        driver!(cuGraphAddNode_v2(
            pGraphNode.cast(),
            graph.cast(),
            pDependencies.cast(),
            dependencyData.cast(),
            numDependencies,
            &raw mut node
        ))?;
        give_back(&node, own);
        Ok(())
    }

    fn cudaGraphNodeSetParams(node: cudaGraphNode_t, nodeParams: *mut cudaGraphNodeParams) {
        ready()?;
        let mut new = self::node(nodeParams.as_ref().ok_or(Error::cudaErrorInvalidValue)?)?;
        driver!(cuGraphNodeSetParams(node.cast(), &raw mut new))
    }

    fn cudaGraphExecNodeSetParams(
        graphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        nodeParams: *mut cudaGraphNodeParams,
    ) {
        ready()?;
        let mut new = self::node(nodeParams.as_ref().ok_or(Error::cudaErrorInvalidValue)?)?;
        driver!(cuGraphExecNodeSetParams(graphExec.cast(), node.cast(), &raw mut new))
    }
}
const _: () = {
    assert!(size_of::<cudaMemsetParams>() == size_of::<CUDA_MEMSET_NODE_PARAMS>());
    assert!(size_of::<cudaHostNodeParams>() == size_of::<CUDA_HOST_NODE_PARAMS>());
    assert!(size_of::<cudaMemAllocNodeParams>() == size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>());
    assert!(size_of::<cudaGraphNodeParams>() == size_of::<CUgraphNodeParams>());
};
