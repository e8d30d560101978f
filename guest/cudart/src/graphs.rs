//! Graphs: functions that take only handles. Nodes with parameters are in [`crate::nodes`].

use std::ffi::{c_char, c_uint, c_ulonglong, c_void};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{entry_points, some_text, streamed},
    context::{primary, ready},
    driver::driver,
};

entry_points! {
    fn cudaGraphCreate(pGraph: *mut cudaGraph_t, flags: c_uint) {
        ready()?;
        driver!(cuGraphCreate(pGraph.cast(), flags))
    }

    fn cudaGraphDestroy(graph: cudaGraph_t) {
        ready()?;
        driver!(cuGraphDestroy(graph.cast()))
    }

    fn cudaGraphClone(pGraphClone: *mut cudaGraph_t, originalGraph: cudaGraph_t) {
        ready()?;
        driver!(cuGraphClone(pGraphClone.cast(), originalGraph.cast()))
    }

    fn cudaGraphNodeFindInClone(
        pNode: *mut cudaGraphNode_t,
        originalNode: cudaGraphNode_t,
        clonedGraph: cudaGraph_t,
    ) {
        ready()?;
        driver!(cuGraphNodeFindInClone(pNode.cast(), originalNode.cast(), clonedGraph.cast()))
    }

    fn cudaGraphNodeGetType(node: cudaGraphNode_t, pType: *mut cudaGraphNodeType) {
        ready()?;
        driver!(cuGraphNodeGetType(node.cast(), pType.cast()))
    }

    fn cudaGraphGetNodes(graph: cudaGraph_t, nodes: *mut cudaGraphNode_t, numNodes: *mut usize) {
        ready()?;
        driver!(cuGraphGetNodes(graph.cast(), nodes.cast(), numNodes))
    }

    fn cudaGraphGetRootNodes(graph: cudaGraph_t, pRootNodes: *mut cudaGraphNode_t, pNumRootNodes: *mut usize) {
        ready()?;
        driver!(cuGraphGetRootNodes(graph.cast(), pRootNodes.cast(), pNumRootNodes))
    }

    fn cudaGraphGetEdges(
        graph: cudaGraph_t,
        from: *mut cudaGraphNode_t,
        to: *mut cudaGraphNode_t,
        edgeData: *mut cudaGraphEdgeData,
        numEdges: *mut usize,
    ) {
        ready()?;
        driver!(cuGraphGetEdges_v2(graph.cast(), from.cast(), to.cast(), edgeData.cast(), numEdges))
    }

    fn cudaGraphNodeGetDependencies(
        node: cudaGraphNode_t,
        pDependencies: *mut cudaGraphNode_t,
        edgeData: *mut cudaGraphEdgeData,
        pNumDependencies: *mut usize,
    ) {
        ready()?;
        driver!(cuGraphNodeGetDependencies_v2(
            node.cast(), pDependencies.cast(), edgeData.cast(), pNumDependencies
        ))
    }

    fn cudaGraphNodeGetDependentNodes(
        node: cudaGraphNode_t,
        pDependentNodes: *mut cudaGraphNode_t,
        edgeData: *mut cudaGraphEdgeData,
        pNumDependentNodes: *mut usize,
    ) {
        ready()?;
        driver!(cuGraphNodeGetDependentNodes_v2(
            node.cast(), pDependentNodes.cast(), edgeData.cast(), pNumDependentNodes
        ))
    }

    fn cudaGraphAddDependencies(
        graph: cudaGraph_t,
        from: *const cudaGraphNode_t,
        to: *const cudaGraphNode_t,
        edgeData: *const cudaGraphEdgeData,
        numDependencies: usize,
    ) {
        ready()?;
        driver!(cuGraphAddDependencies_v2(graph.cast(), from.cast(), to.cast(), edgeData.cast(), numDependencies))
    }

    fn cudaGraphRemoveDependencies(
        graph: cudaGraph_t,
        from: *const cudaGraphNode_t,
        to: *const cudaGraphNode_t,
        edgeData: *const cudaGraphEdgeData,
        numDependencies: usize,
    ) {
        ready()?;
        driver!(cuGraphRemoveDependencies_v2(
            graph.cast(), from.cast(), to.cast(), edgeData.cast(), numDependencies
        ))
    }

    fn cudaGraphDestroyNode(node: cudaGraphNode_t) {
        ready()?;
        driver!(cuGraphDestroyNode(node.cast()))
    }

    fn cudaGraphInstantiate(pGraphExec: *mut cudaGraphExec_t, graph: cudaGraph_t, flags: c_ulonglong) {
        ready()?;
        driver!(cuGraphInstantiateWithFlags(pGraphExec.cast(), graph.cast(), flags))
    }

    fn cudaGraphInstantiateWithFlags(pGraphExec: *mut cudaGraphExec_t, graph: cudaGraph_t, flags: c_ulonglong) {
        ready()?;
        driver!(cuGraphInstantiateWithFlags(pGraphExec.cast(), graph.cast(), flags))
    }

    fn cudaGraphExecGetFlags(graphExec: cudaGraphExec_t, flags: *mut c_ulonglong) {
        ready()?;
        driver!(cuGraphExecGetFlags(graphExec.cast(), flags.cast()))
    }

    fn cudaGraphExecDestroy(graphExec: cudaGraphExec_t) {
        ready()?;
        driver!(cuGraphExecDestroy(graphExec.cast()))
    }

    fn cudaGraphExecUpdate(
        hGraphExec: cudaGraphExec_t,
        hGraph: cudaGraph_t,
        resultInfo: *mut cudaGraphExecUpdateResultInfo,
    ) {
        ready()?;
        driver!(cuGraphExecUpdate_v2(hGraphExec.cast(), hGraph.cast(), resultInfo.cast()))
    }

    fn cudaGraphExecChildGraphNodeSetParams(
        hGraphExec: cudaGraphExec_t,
        node: cudaGraphNode_t,
        childGraph: cudaGraph_t,
    ) {
        ready()?;
        driver!(cuGraphExecChildGraphNodeSetParams(hGraphExec.cast(), node.cast(), childGraph.cast()))
    }

    fn cudaGraphExecEventRecordNodeSetEvent(
        hGraphExec: cudaGraphExec_t,
        hNode: cudaGraphNode_t,
        event: cudaEvent_t,
    ) {
        ready()?;
        driver!(cuGraphExecEventRecordNodeSetEvent(hGraphExec.cast(), hNode.cast(), event.cast()))
    }

    fn cudaGraphExecEventWaitNodeSetEvent(
        hGraphExec: cudaGraphExec_t,
        hNode: cudaGraphNode_t,
        event: cudaEvent_t,
    ) {
        ready()?;
        driver!(cuGraphExecEventWaitNodeSetEvent(hGraphExec.cast(), hNode.cast(), event.cast()))
    }

    fn cudaGraphNodeSetEnabled(hGraphExec: cudaGraphExec_t, hNode: cudaGraphNode_t, isEnabled: c_uint) {
        ready()?;
        driver!(cuGraphNodeSetEnabled(hGraphExec.cast(), hNode.cast(), isEnabled))
    }

    fn cudaGraphNodeGetEnabled(hGraphExec: cudaGraphExec_t, hNode: cudaGraphNode_t, isEnabled: *mut c_uint) {
        ready()?;
        driver!(cuGraphNodeGetEnabled(hGraphExec.cast(), hNode.cast(), isEnabled))
    }

    fn cudaGraphDebugDotPrint(graph: cudaGraph_t, path: *const c_char, flags: c_uint) {
        ready()?;
        driver!(cuGraphDebugDotPrint(graph.cast(), some_text(path)?, flags))
    }

    fn cudaGraphAddEmptyNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
    ) {
        ready()?;
        driver!(cuGraphAddEmptyNode(pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies))
    }

    fn cudaGraphAddChildGraphNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        childGraph: cudaGraph_t,
    ) {
        ready()?;
        driver!(cuGraphAddChildGraphNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, childGraph.cast()
        ))
    }

    fn cudaGraphChildGraphNodeGetGraph(node: cudaGraphNode_t, pGraph: *mut cudaGraph_t) {
        ready()?;
        driver!(cuGraphChildGraphNodeGetGraph(node.cast(), pGraph.cast()))
    }

    fn cudaGraphAddEventRecordNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        event: cudaEvent_t,
    ) {
        ready()?;
        driver!(cuGraphAddEventRecordNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, event.cast()
        ))
    }

    fn cudaGraphEventRecordNodeGetEvent(node: cudaGraphNode_t, event_out: *mut cudaEvent_t) {
        ready()?;
        driver!(cuGraphEventRecordNodeGetEvent(node.cast(), event_out.cast()))
    }

    fn cudaGraphEventRecordNodeSetEvent(node: cudaGraphNode_t, event: cudaEvent_t) {
        ready()?;
        driver!(cuGraphEventRecordNodeSetEvent(node.cast(), event.cast()))
    }

    fn cudaGraphAddEventWaitNode(
        pGraphNode: *mut cudaGraphNode_t,
        graph: cudaGraph_t,
        pDependencies: *const cudaGraphNode_t,
        numDependencies: usize,
        event: cudaEvent_t,
    ) {
        ready()?;
        driver!(cuGraphAddEventWaitNode(
            pGraphNode.cast(), graph.cast(), pDependencies.cast(), numDependencies, event.cast()
        ))
    }

    fn cudaGraphEventWaitNodeGetEvent(node: cudaGraphNode_t, event_out: *mut cudaEvent_t) {
        ready()?;
        driver!(cuGraphEventWaitNodeGetEvent(node.cast(), event_out.cast()))
    }

    fn cudaGraphEventWaitNodeSetEvent(node: cudaGraphNode_t, event: cudaEvent_t) {
        ready()?;
        driver!(cuGraphEventWaitNodeSetEvent(node.cast(), event.cast()))
    }

    fn cudaGraphConditionalHandleCreate(
        pHandle_out: *mut cudaGraphConditionalHandle,
        graph: cudaGraph_t,
        defaultLaunchValue: c_uint,
        flags: c_uint,
    ) {
        ready()?;
        let context = primary(crate::context::chosen()?)?;
        driver!(cuGraphConditionalHandleCreate(pHandle_out.cast(), graph.cast(), context, defaultLaunchValue, flags))
    }

    fn cudaUserObjectCreate(
        object_out: *mut cudaUserObject_t,
        ptr: *mut c_void,
        destroy: cudaHostFn_t,
        initialRefcount: c_uint,
        flags: c_uint,
    ) {
        ready()?;
        driver!(cuUserObjectCreate(object_out.cast(), ptr, destroy, initialRefcount, flags))
    }

    fn cudaUserObjectRetain(object: cudaUserObject_t, count: c_uint) {
        ready()?;
        driver!(cuUserObjectRetain(object.cast(), count))
    }

    fn cudaUserObjectRelease(object: cudaUserObject_t, count: c_uint) {
        ready()?;
        driver!(cuUserObjectRelease(object.cast(), count))
    }

    fn cudaGraphRetainUserObject(graph: cudaGraph_t, object: cudaUserObject_t, count: c_uint, flags: c_uint) {
        ready()?;
        driver!(cuGraphRetainUserObject(graph.cast(), object.cast(), count, flags))
    }

    fn cudaGraphReleaseUserObject(graph: cudaGraph_t, object: cudaUserObject_t, count: c_uint) {
        ready()?;
        driver!(cuGraphReleaseUserObject(graph.cast(), object.cast(), count))
    }

    fn cudaGraphKernelNodeCopyAttributes(hDst: cudaGraphNode_t, hSrc: cudaGraphNode_t) {
        ready()?;
        driver!(cuGraphKernelNodeCopyAttributes(hDst.cast(), hSrc.cast()))
    }

    fn cudaGraphKernelNodeGetAttribute(
        hNode: cudaGraphNode_t,
        attr: cudaLaunchAttributeID,
        value_out: *mut cudaLaunchAttributeValue,
    ) {
        ready()?;
        driver!(cuGraphKernelNodeGetAttribute(hNode.cast(), CUlaunchAttributeID_enum(attr.0), value_out.cast()))
    }

    fn cudaGraphKernelNodeSetAttribute(
        hNode: cudaGraphNode_t,
        attr: cudaLaunchAttributeID,
        value: *const cudaLaunchAttributeValue,
    ) {
        ready()?;
        driver!(cuGraphKernelNodeSetAttribute(hNode.cast(), CUlaunchAttributeID_enum(attr.0), value.cast()))
    }
}

streamed! {
    fn cudaGraphInstantiateWithParams / cudaGraphInstantiateWithParams_ptsz [base] (
        pGraphExec: *mut cudaGraphExec_t,
        graph: cudaGraph_t,
        instantiateParams: *mut cudaGraphInstantiateParams,
    ) {
        ready()?;
        // The stream for the upload is the only one that null may stand for.
        if let Some(parameters) = instantiateParams.as_mut() {
            parameters.uploadStream = base.stream(parameters.uploadStream).cast();
        }
        driver!(cuGraphInstantiateWithParams(pGraphExec.cast(), graph.cast(), instantiateParams.cast()))
    }

    fn cudaGraphUpload / cudaGraphUpload_ptsz [base] (graphExec: cudaGraphExec_t, stream: cudaStream_t) {
        ready()?;
        driver!(cuGraphUpload(graphExec.cast(), base.stream(stream)))
    }

    fn cudaGraphLaunch / cudaGraphLaunch_ptsz [base] (graphExec: cudaGraphExec_t, stream: cudaStream_t) {
        ready()?;
        driver!(cuGraphLaunch(graphExec.cast(), base.stream(stream)))
    }
}
const _: () = {
    assert!(size_of::<cudaGraphInstantiateParams>() == size_of::<CUDA_GRAPH_INSTANTIATE_PARAMS>());
    assert!(size_of::<cudaGraphExecUpdateResultInfo>() == size_of::<CUgraphExecUpdateResultInfo>());
    assert!(size_of::<cudaGraphEdgeData>() == size_of::<CUgraphEdgeData>());
    assert!(size_of::<cudaLaunchAttributeValue>() == size_of::<CUlaunchAttributeValue>());
};
