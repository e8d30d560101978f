//! Streams, events, host functions, values in memory, and graphs.

use std::{
    ffi::{c_int, c_uint, c_ulonglong, c_void},
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use cuda_definition::driver::types::*;

use super::{entry_points, offer, put};
use crate::driver::{
    Answer,
    context::{self, Context},
    memory::{memory, trusts},
    objects::{self, Object},
    stream::{Event, Graph, Stream, Task},
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

pub(super) fn capture(stream: &Stream) -> std::sync::MutexGuard<'_, Option<Arc<Graph>>> {
    stream
        .capture
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

fn captured(event: &Event) -> std::sync::MutexGuard<'_, Option<Arc<Graph>>> {
    event
        .captured
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

fn create(flags: c_uint, priority: c_int) -> Answer<CUstream> {
    let context = context::current()?;
    if flags > 1 {
        return Err(INVALID);
    }
    Ok(context.add(flags == 0, priority.clamp(-5, 0))?.handle as CUstream)
}

/// A word to compare or write.
#[derive(Clone, Copy)]
struct Word {
    at: u64,
    value: u64,
    bytes: u64,
    flags: c_uint,
}

impl Word {
    fn checked(self) -> Answer<Self> {
        let fits =
            (trusts() || memory().holds(self.at, self.bytes)) && self.at.is_multiple_of(self.bytes);
        if fits { Ok(self) } else { Err(INVALID) }
    }

    fn load(self) -> u64 {
        // SAFETY: checked when the work was created; memory stays mapped while work is pending.
        unsafe {
            match self.bytes {
                4 => u64::from((*(self.at as *const AtomicU32)).load(Ordering::Acquire)),
                _ => (*(self.at as *const AtomicU64)).load(Ordering::Acquire),
            }
        }
    }

    fn write(self) -> Answer<Task> {
        let word = self.checked()?;
        Ok(Arc::new(move |_: &_| {
            // SAFETY: as in `load`. The value is truncated to the word's size.
            unsafe {
                match word.bytes {
                    4 => {
                        (*(word.at as *const AtomicU32)).store(word.value as u32, Ordering::Release)
                    }
                    _ => (*(word.at as *const AtomicU64)).store(word.value, Ordering::Release),
                }
            }
            Ok(())
        }))
    }

    fn holds(self) -> bool {
        let (now, value) = (self.load(), self.value);
        match self.flags & 3 {
            // Cyclic: the difference is not negative.
            0 if self.bytes == 4 => (now.wrapping_sub(value) as u32).cast_signed() >= 0,
            0 => now.wrapping_sub(value).cast_signed() >= 0,
            1 => now == value,
            2 => now & value != 0,
            _ => {
                !(now | value)
                    & if self.bytes == 4 {
                        0xffff_ffff
                    } else {
                        u64::MAX
                    }
                    != 0
            }
        }
    }

    fn wait(self) -> Answer<Task> {
        let word = self.checked()?;
        Ok(Arc::new(move |context: &Arc<Context>| {
            while !word.holds() {
                context.check()?;
                std::thread::sleep(Duration::from_micros(20));
            }
            Ok(())
        }))
    }
}

pub(super) fn submit(stream: CUstream, task: Task) -> Answer {
    let context = context::current()?;
    let stream = context.stream(stream)?;
    context.submit(&stream, task).map(|_| ())
}

/// A caller's pointer, for use in a stream's thread.
#[derive(Clone, Copy)]
struct Callers(*mut c_void);
// SAFETY: it is only passed back to the caller's own function, as the API specifies.
unsafe impl Send for Callers {}
// SAFETY: as above.
unsafe impl Sync for Callers {}

impl Callers {
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// A callback that is called exactly once: in its turn or, since nothing is executed after a fault, when it is skipped.
struct Told {
    callback: unsafe extern "C" fn(CUstream, CUresult, *mut c_void),
    stream: Callers,
    data: Callers,
    context: Weak<Context>,
    is_over: AtomicBool,
}

impl Told {
    fn tell(&self) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            let status = match self.context.upgrade() {
                Some(context) => super::result(context.check()),
                None => CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            };
            let context = self.context.upgrade();
            let _one = context.as_ref().map(|context| context.functions.lock());
            // SAFETY: the caller's function with the argument it expects.
            unsafe { (self.callback)(self.stream.get().cast(), status, self.data.get()) };
        }
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.tell();
    }
}

pub(super) fn host(function: CUhostFn, data: *mut c_void) -> Answer<Task> {
    let function = function.ok_or(INVALID)?;
    let data = Callers(data);
    Ok(Arc::new(move |context: &Arc<Context>| {
        context.print();
        let _one = context.functions.lock();
        // SAFETY: the caller's function with the argument it expects.
        unsafe { function(data.get()) };
        Ok(())
    }))
}

fn record(event: CUevent, stream: CUstream) -> Answer {
    let context = context::current()?;
    let event = objects::event(event)?;
    let stream = context.stream(stream)?;
    if let Some(graph) = &*capture(&stream) {
        *captured(&event) = Some(Arc::clone(graph));
        return Ok(());
    }
    *captured(&event) = None;
    let time = Arc::new(OnceLock::new());
    let own = Arc::clone(&time);
    let task: Task = Arc::new(move |_: &_| {
        let _ = own.set(Instant::now());
        Ok(())
    });
    if let Some(mark) = context.submit(&stream, task)? {
        event.record(mark, time);
    }
    Ok(())
}

entry_points! {
    fn cuStreamCreate(phStream: *mut CUstream, Flags: c_uint) {
        put(phStream, create(Flags, 0)?)
    }

    fn cuStreamCreateWithPriority(phStream: *mut CUstream, flags: c_uint, priority: c_int) {
        put(phStream, create(flags, priority)?)
    }

    fn cuStreamDestroy_v2(hStream: CUstream) {
        context::initialised()?;
        let stream = objects::stream(hStream)?;
        objects::remove(stream.handle);
        // No graph comes of its capture.
        *capture(&stream) = None;
        // Work already queued is still done.
        stream.close();
        Ok(())
    }

    fn cuStreamSynchronize(hStream: CUstream) {
        let context = context::current()?;
        let stream = context.stream(hStream)?;
        context.wait(&stream)
    }

    fn cuStreamQuery(hStream: CUstream) {
        let context = context::current()?;
        let stream = context.stream(hStream)?;
        if let Some(graph) = &*capture(&stream) {
            return graph.refuse();
        }
        // The legacy stream would have to wait for streams that are being captured.
        if stream.handle == 0 {
            context.disturb_captures()?;
        }
        match stream.mark().done() {
            true => context.check(),
            false => Err(CUresult::CUDA_ERROR_NOT_READY),
        }
    }

    fn cuStreamGetFlags(hStream: CUstream, flags: *mut c_uint) {
        put(flags, u32::from(!context::current()?.stream(hStream)?.blocking))
    }

    fn cuStreamGetPriority(hStream: CUstream, priority: *mut c_int) {
        put(priority, context::current()?.stream(hStream)?.priority)
    }

    fn cuStreamGetId(hStream: CUstream, streamId: *mut c_ulonglong) {
        let context = context::current()?;
        let stream = context.stream(hStream)?;
        put(streamId, if stream.handle == 0 { context.handle } else { stream.handle })
    }

    fn cuStreamGetCtx(hStream: CUstream, pctx: *mut CUcontext) {
        let stream = context::current()?.stream(hStream)?;
        let context = stream.context.upgrade().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        put(pctx, context.handle as CUcontext)
    }

    fn cuStreamWaitEvent(hStream: CUstream, hEvent: CUevent, _Flags: c_uint) {
        let context = context::current()?;
        let stream = context.stream(hStream)?;
        let event = objects::event(hEvent)?;
        if let Some(graph) = captured(&event).clone() {
            // This makes the other stream join the capture.
            capture(&stream).get_or_insert(graph);
            return Ok(());
        }
        if let Some(mark) = event.mark() {
            context.submit_after(&stream, vec![mark], Arc::new(|_: &_| Ok(())))?;
        }
        Ok(())
    }

    fn cuLaunchHostFunc(hStream: CUstream, r#fn: CUhostFn, userData: *mut c_void) {
        submit(hStream, host(r#fn, userData)?)
    }

    fn cuStreamAddCallback(hStream: CUstream, callback: CUstreamCallback, userData: *mut c_void, flags: c_uint) {
        let callback = callback.filter(|_| flags == 0).ok_or(INVALID)?;
        let told = Arc::new(Told {
            callback,
            stream: Callers(hStream.cast()),
            data: Callers(userData),
            context: Arc::downgrade(&context::current()?),
            is_over: AtomicBool::new(false),
        });
        let own = Arc::clone(&told);
        let submitted = submit(hStream, Arc::new(move |_: &Arc<Context>| {
            own.tell();
            Ok(())
        }));
        if submitted.is_err() {
            told.is_over.store(true, Ordering::Release);
        }
        submitted
    }

    fn cuStreamWriteValue32_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint32_t, flags: c_uint) {
        submit(stream, Word { at: addr, value: u64::from(value), bytes: 4, flags }.write()?)
    }

    fn cuStreamWriteValue64_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint64_t, flags: c_uint) {
        submit(stream, Word { at: addr, value, bytes: 8, flags }.write()?)
    }

    fn cuStreamWaitValue32_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint32_t, flags: c_uint) {
        submit(stream, Word { at: addr, value: u64::from(value), bytes: 4, flags }.wait()?)
    }

    fn cuStreamWaitValue64_v2(stream: CUstream, addr: CUdeviceptr, value: cuuint64_t, flags: c_uint) {
        submit(stream, Word { at: addr, value, bytes: 8, flags }.wait()?)
    }

    fn cuStreamBatchMemOp_v2(
        stream: CUstream,
        count: c_uint,
        paramArray: *mut CUstreamBatchMemOpParams,
        _flags: c_uint,
    ) {
        use CUstreamBatchMemOpType as Kind;
        let mut tasks = Vec::new();
        for number in 0..count.min(256) as usize {
            let one = paramArray.add(number).as_ref().ok_or(INVALID)?;
            // Both kinds start with the same fields: an address, a value, flags.
            let word = |bytes: u64| {
                let (at, value, flags) = (one.waitValue.address, one.waitValue.anonymous2.value64, one.waitValue.flags);
                let value = if bytes == 4 { value & 0xffff_ffff } else { value };
                Word { at, value, bytes, flags }
            };
            tasks.push(match one.operation {
                Kind::CU_STREAM_MEM_OP_WAIT_VALUE_32 => word(4).wait()?,
                Kind::CU_STREAM_MEM_OP_WAIT_VALUE_64 => word(8).wait()?,
                Kind::CU_STREAM_MEM_OP_WRITE_VALUE_32 => word(4).write()?,
                Kind::CU_STREAM_MEM_OP_WRITE_VALUE_64 => word(8).write()?,
                Kind::CU_STREAM_MEM_OP_BARRIER => continue,
                _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            });
        }
        tasks.into_iter().try_for_each(|task| submit(stream, task))
    }

    fn cuEventCreate(phEvent: *mut CUevent, Flags: c_uint) {
        context::current()?;
        let handle = objects::number();
        objects::insert(handle, Object::Event(Arc::new(Event::new(Flags & 2 == 0))));
        put(phEvent, handle as CUevent)
    }

    fn cuEventDestroy_v2(hEvent: CUevent) {
        objects::event(hEvent)?;
        objects::remove(hEvent as u64);
        Ok(())
    }

    fn cuEventRecord(hEvent: CUevent, hStream: CUstream) {
        record(hEvent, hStream)
    }

    fn cuEventRecordWithFlags(hEvent: CUevent, hStream: CUstream, _flags: c_uint) {
        record(hEvent, hStream)
    }

    fn cuEventQuery(hEvent: CUevent) {
        let context = context::current()?;
        for stream in objects::streams() {
            if let Some(graph) = capture(&stream).as_ref().filter(|graph| graph.is_global) {
                return graph.refuse();
            }
        }
        match objects::event(hEvent)?.mark() {
            Some(mark) if !mark.done() => Err(CUresult::CUDA_ERROR_NOT_READY),
            _ => context.check(),
        }
    }

    fn cuEventSynchronize(hEvent: CUevent) {
        let context = context::current()?;
        if let Some(mark) = objects::event(hEvent)?.mark() {
            mark.wait();
        }
        context.print();
        context.check()
    }

    fn cuEventElapsedTime_v2(pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent) {
        let (start, end) = (objects::event(hStart)?, objects::event(hEnd)?);
        let (Some(first), Some(last)) = (start.mark(), end.mark()) else {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        };
        if !start.timed || !end.timed {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        if !first.done() || !last.done() {
            return Err(CUresult::CUDA_ERROR_NOT_READY);
        }
        let (Some(from), Some(to)) = (start.time(), end.time()) else {
            return Err(CUresult::CUDA_ERROR_NOT_READY);
        };
        let ahead = to.saturating_duration_since(from).as_secs_f32();
        let behind = from.saturating_duration_since(to).as_secs_f32();
        put(pMilliseconds, (ahead - behind) * 1000.0)
    }

    fn cuStreamBeginCapture_v2(hStream: CUstream, mode: CUstreamCaptureMode) {
        let stream = context::current()?.stream(hStream)?;
        if stream.handle == 0 {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut capture = capture(&stream);
        if capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let is_global = mode == CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        *capture = Some(Arc::new(Graph::captured(objects::number(), is_global)));
        Ok(())
    }

    fn cuStreamEndCapture(hStream: CUstream, phGraph: *mut CUgraph) {
        let stream = context::current()?.stream(hStream)?;
        let graph = capture(&stream).take().ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        for other in objects::streams() {
            let mut capture = capture(&other);
            if capture.as_ref().is_some_and(|own| Arc::ptr_eq(own, &graph)) {
                *capture = None;
            }
        }
        offer(phGraph, std::ptr::null_mut());
        graph.valid()?;
        put(phGraph, graph.handle as CUgraph)?;
        objects::insert(graph.handle, Object::Graph(graph));
        Ok(())
    }

    fn cuStreamIsCapturing(hStream: CUstream, captureStatus: *mut CUstreamCaptureStatus) {
        let stream = context::current()?.stream(hStream)?;
        let graph = capture(&stream).clone();
        put(captureStatus, capture_status(graph.as_deref()))
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) {
        static MODE: Mutex<CUstreamCaptureMode> = Mutex::new(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        let mut old = MODE.lock().unwrap_or_else(PoisonError::into_inner);
        let new = mode.as_mut().ok_or(INVALID)?;
        std::mem::swap(&mut *old, new);
        Ok(())
    }

    fn cuStreamGetCaptureInfo_v3(
        hStream: CUstream,
        captureStatus_out: *mut CUstreamCaptureStatus,
        id_out: *mut cuuint64_t,
        graph_out: *mut CUgraph,
        dependencies_out: *mut *const CUgraphNode,
        edgeData_out: *mut *const CUgraphEdgeData,
        numDependencies_out: *mut usize,
    ) {
        offer(edgeData_out, std::ptr::null());
        capture_info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, numDependencies_out)
    }

    fn cuStreamGetCaptureInfo_v2(
        hStream: CUstream,
        captureStatus_out: *mut CUstreamCaptureStatus,
        id_out: *mut cuuint64_t,
        graph_out: *mut CUgraph,
        dependencies_out: *mut *const CUgraphNode,
        numDependencies_out: *mut usize,
    ) {
        capture_info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, numDependencies_out)
    }

    // Captured work comes after all earlier nodes, and thus after those that a program adds itself.
    fn cuStreamUpdateCaptureDependencies_v2(
        hStream: CUstream,
        dependencies: *mut CUgraphNode,
        _dependencyData: *const CUgraphEdgeData,
        numDependencies: usize,
        _flags: c_uint,
    ) {
        let stream = context::current()?.stream(hStream)?;
        let graph = capture(&stream).clone().ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        let all = graph.handles();
        match (0..numDependencies).all(|index| all.contains(&(dependencies.add(index).read() as u64))) {
            true => Ok(()),
            false => Err(INVALID),
        }
    }

    fn cuStreamGetDevice(hStream: CUstream, device: *mut CUdevice) {
        context::current()?.stream(hStream)?;
        put(device, 0)
    }

    fn cuStreamAttachMemAsync(hStream: CUstream, _dptr: CUdeviceptr, _length: usize, _flags: c_uint) {
        context::current()?.stream(hStream).map(|_| ())
    }
}

fn capture_status(graph: Option<&Graph>) -> CUstreamCaptureStatus {
    match graph.map(Graph::valid) {
        None => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        Some(Ok(())) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
        Some(Err(_)) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    }
}

/// # Safety
/// Pointers to room for the answers, or null.
unsafe fn capture_info(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
    id: *mut cuuint64_t,
    into: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    count: *mut usize,
) -> Answer {
    let stream = context::current()?.stream(stream)?;
    let graph = capture(&stream).clone();
    let now = capture_status(graph.as_deref());
    let valid = graph.filter(|graph| graph.valid().is_ok());
    let handle = valid.as_ref().map_or(0, |graph| graph.handle);
    // Leaked, one for each call, because programs may read it at any time.
    let last = valid.and_then(|graph| graph.handles().pop());
    let (nodes, length) = match last {
        Some(node) => (Box::leak(Box::new(node)) as *const u64, 1),
        None => (std::ptr::null(), 0),
    };
    // SAFETY: the caller's promise.
    unsafe {
        put(status, now)?;
        offer(id, handle);
        offer(into, handle as CUgraph);
        offer(dependencies, nodes.cast());
        offer(count, length);
    }
    Ok(())
}
