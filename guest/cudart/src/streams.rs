//! Streams, capture and events.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{entry_points, put, streamed},
    context::{chosen, ready},
    driver::driver,
    error::{Answer, Error},
};

/// The driver's callback type. Both are passed the stream, an error's number and the caller's data.
type Callback = unsafe extern "C" fn(CUstream, CUresult, *mut c_void);

/// # Safety
/// Pointers are valid for writing the answers, or null where the API allows it.
unsafe fn capture(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
    id: *mut c_ulonglong,
    graph: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    edges: *mut *const CUgraphEdgeData,
    count: *mut usize,
) -> Answer {
    // SAFETY: the caller's promise.
    unsafe {
        driver!(cuStreamGetCaptureInfo_v3(
            stream,
            status,
            id.cast(),
            graph,
            dependencies,
            edges,
            count
        ))
    }
}

entry_points! {
    fn cudaStreamCreate(pStream: *mut cudaStream_t) {
        ready()?;
        driver!(cuStreamCreate(pStream.cast(), 0))
    }

    fn cudaStreamCreateWithFlags(pStream: *mut cudaStream_t, flags: c_uint) {
        ready()?;
        driver!(cuStreamCreate(pStream.cast(), flags))
    }

    fn cudaStreamCreateWithPriority(pStream: *mut cudaStream_t, flags: c_uint, priority: c_int) {
        ready()?;
        driver!(cuStreamCreateWithPriority(pStream.cast(), flags, priority))
    }

    fn cudaStreamDestroy(stream: cudaStream_t) {
        ready()?;
        // The default streams cannot be destroyed.
        if (stream as usize) <= 2 {
            return Err(Error::cudaErrorInvalidResourceHandle);
        }
        driver!(cuStreamDestroy_v2(stream.cast()))
    }

    fn cudaThreadExchangeStreamCaptureMode(mode: *mut cudaStreamCaptureMode) {
        ready()?;
        driver!(cuThreadExchangeStreamCaptureMode(mode.cast()))
    }

    fn cudaEventCreate(event: *mut cudaEvent_t) {
        ready()?;
        driver!(cuEventCreate(event.cast(), 0))
    }

    fn cudaEventCreateWithFlags(event: *mut cudaEvent_t, flags: c_uint) {
        ready()?;
        driver!(cuEventCreate(event.cast(), flags))
    }

    fn cudaEventDestroy(event: cudaEvent_t) {
        ready()?;
        driver!(cuEventDestroy_v2(event.cast()))
    }

    fn cudaEventQuery(event: cudaEvent_t) {
        ready()?;
        driver!(cuEventQuery(event.cast()))
    }

    fn cudaEventSynchronize(event: cudaEvent_t) {
        ready()?;
        driver!(cuEventSynchronize(event.cast()))
    }

    fn cudaEventElapsedTime(ms: *mut f32, start: cudaEvent_t, end: cudaEvent_t) {
        ready()?;
        driver!(cuEventElapsedTime_v2(ms, start.cast(), end.cast()))
    }
}

streamed! {
    fn cudaStreamGetPriority / cudaStreamGetPriority_ptsz [base] (hStream: cudaStream_t, priority: *mut c_int) {
        ready()?;
        driver!(cuStreamGetPriority(base.stream(hStream), priority))
    }

    fn cudaStreamGetFlags / cudaStreamGetFlags_ptsz [base] (hStream: cudaStream_t, flags: *mut c_uint) {
        ready()?;
        driver!(cuStreamGetFlags(base.stream(hStream), flags))
    }

    fn cudaStreamGetId / cudaStreamGetId_ptsz [base] (hStream: cudaStream_t, streamId: *mut c_ulonglong) {
        ready()?;
        driver!(cuStreamGetId(base.stream(hStream), streamId))
    }

    fn cudaStreamGetDevice / cudaStreamGetDevice_ptsz [base] (hStream: cudaStream_t, device: *mut c_int) {
        ready()?;
        match driver!(cuStreamGetDevice(base.stream(hStream), device)) {
            // Before 12.8 a context had one device, and streams are used in their own context.
            Err(Error::cudaErrorCallRequiresNewerDriver) => put(device, chosen()?),
            answer => answer,
        }
    }

    fn cudaStreamCopyAttributes / cudaStreamCopyAttributes_ptsz [base] (dst: cudaStream_t, src: cudaStream_t) {
        ready()?;
        driver!(cuStreamCopyAttributes(base.stream(dst), base.stream(src)))
    }

    fn cudaStreamGetAttribute / cudaStreamGetAttribute_ptsz [base] (
        hStream: cudaStream_t,
        attr: cudaLaunchAttributeID,
        value_out: *mut cudaLaunchAttributeValue,
    ) {
        ready()?;
        let attribute = CUlaunchAttributeID_enum(attr.0);
        driver!(cuStreamGetAttribute(base.stream(hStream), attribute, value_out.cast()))
    }

    fn cudaStreamSetAttribute / cudaStreamSetAttribute_ptsz [base] (
        hStream: cudaStream_t,
        attr: cudaLaunchAttributeID,
        value: *const cudaLaunchAttributeValue,
    ) {
        ready()?;
        let attribute = CUlaunchAttributeID_enum(attr.0);
        driver!(cuStreamSetAttribute(base.stream(hStream), attribute, value.cast()))
    }

    fn cudaStreamWaitEvent / cudaStreamWaitEvent_ptsz [base] (
        stream: cudaStream_t,
        event: cudaEvent_t,
        flags: c_uint,
    ) {
        ready()?;
        driver!(cuStreamWaitEvent(base.stream(stream), event.cast(), flags))
    }

    fn cudaStreamAddCallback / cudaStreamAddCallback_ptsz [base] (
        stream: cudaStream_t,
        callback: cudaStreamCallback_t,
        userData: *mut c_void,
        flags: c_uint,
    ) {
        ready()?;
        let callback = callback.ok_or(Error::cudaErrorInvalidValue)?;
        // Errors have the same numbers on both sides.
        let callback = std::mem::transmute::<*const (), Callback>(callback as *const ());
        driver!(cuStreamAddCallback(base.stream(stream), Some(callback), userData, flags))
    }

    fn cudaStreamSynchronize / cudaStreamSynchronize_ptsz [base] (stream: cudaStream_t) {
        ready()?;
        driver!(cuStreamSynchronize(base.stream(stream)))
    }

    fn cudaStreamQuery / cudaStreamQuery_ptsz [base] (stream: cudaStream_t) {
        ready()?;
        driver!(cuStreamQuery(base.stream(stream)))
    }

    fn cudaStreamBeginCapture / cudaStreamBeginCapture_ptsz [base] (
        stream: cudaStream_t,
        mode: cudaStreamCaptureMode,
    ) {
        ready()?;
        driver!(cuStreamBeginCapture_v2(base.stream(stream), CUstreamCaptureMode_enum(mode.0)))
    }

    fn cudaStreamBeginCaptureToGraph / cudaStreamBeginCaptureToGraph_ptsz [base] (
        stream: cudaStream_t,
        graph: cudaGraph_t,
        dependencies: *const cudaGraphNode_t,
        dependencyData: *const cudaGraphEdgeData,
        numDependencies: usize,
        mode: cudaStreamCaptureMode,
    ) {
        ready()?;
        driver!(cuStreamBeginCaptureToGraph(
            base.stream(stream),
            graph.cast(),
            dependencies.cast(),
            dependencyData.cast(),
            numDependencies,
            CUstreamCaptureMode_enum(mode.0)
        ))
    }

    fn cudaStreamEndCapture / cudaStreamEndCapture_ptsz [base] (stream: cudaStream_t, pGraph: *mut cudaGraph_t) {
        ready()?;
        driver!(cuStreamEndCapture(base.stream(stream), pGraph.cast()))
    }

    fn cudaStreamIsCapturing / cudaStreamIsCapturing_ptsz [base] (
        stream: cudaStream_t,
        pCaptureStatus: *mut cudaStreamCaptureStatus,
    ) {
        ready()?;
        driver!(cuStreamIsCapturing(base.stream(stream), pCaptureStatus.cast()))
    }

    fn cudaStreamGetCaptureInfo / cudaStreamGetCaptureInfo_ptsz [base] (
        stream: cudaStream_t,
        captureStatus_out: *mut cudaStreamCaptureStatus,
        id_out: *mut c_ulonglong,
        graph_out: *mut cudaGraph_t,
        dependencies_out: *mut *const cudaGraphNode_t,
        edgeData_out: *mut *const cudaGraphEdgeData,
        numDependencies_out: *mut usize,
    ) {
        ready()?;
        capture(
            base.stream(stream),
            captureStatus_out.cast(),
            id_out,
            graph_out.cast(),
            dependencies_out.cast(),
            edgeData_out.cast(),
            numDependencies_out,
        )
    }

    fn cudaStreamUpdateCaptureDependencies / cudaStreamUpdateCaptureDependencies_ptsz [base] (
        stream: cudaStream_t,
        dependencies: *mut cudaGraphNode_t,
        dependencyData: *const cudaGraphEdgeData,
        numDependencies: usize,
        flags: c_uint,
    ) {
        ready()?;
        driver!(cuStreamUpdateCaptureDependencies_v2(
            base.stream(stream),
            dependencies.cast(),
            dependencyData.cast(),
            numDependencies,
            flags
        ))
    }

    fn cudaEventRecord / cudaEventRecord_ptsz [base] (event: cudaEvent_t, stream: cudaStream_t) {
        ready()?;
        driver!(cuEventRecord(event.cast(), base.stream(stream)))
    }

    fn cudaEventRecordWithFlags / cudaEventRecordWithFlags_ptsz [base] (
        event: cudaEvent_t,
        stream: cudaStream_t,
        flags: c_uint,
    ) {
        ready()?;
        driver!(cuEventRecordWithFlags(event.cast(), base.stream(stream), flags))
    }
}
