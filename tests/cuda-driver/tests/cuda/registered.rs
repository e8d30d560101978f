//! Copies of registered memory: they read and write it in stream order, and nobody waits for them.

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use cuda_definition::driver::types::*;

use crate::driver::{Own, begin_capture, context, cuda, device, ok, stream, values};

/// How long to wait for what only a hang prevents.
const LONG: Duration = Duration::from_secs(100);
const NON_BLOCKING: u32 = 1;

/// Words that are registered until the end, and pages of their own.
struct Registered(Vec<u32>, usize);

impl Registered {
    fn new(words: usize) -> Self {
        let mut pages = vec![0u32; words + 2048];
        let start = pages.as_mut_ptr().align_offset(4096);
        let at: *mut c_void = pages[start..].as_mut_ptr().cast();
        ok!(cuMemHostRegister_v2(at, 4 * words, 0));
        Self(pages, start)
    }

    fn at(&self) -> *mut u32 {
        self.0[self.1..].as_ptr().cast_mut()
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: a word that lives as long as this; everything else that accesses it does so atomically, or when
        // nothing else does.
        unsafe { AtomicU32::from_ptr(self.at()) }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        ok!(cuMemHostUnregister(self.at().cast()));
    }
}

/// A stream, and a word of pinned memory without which its work does not begin.
pub struct Gated {
    pub stream: CUstream,
    gate: &'static AtomicU32,
}

impl Gated {
    pub fn new() -> Self {
        let (mut stream, mut at) = (null_mut(), null_mut::<c_void>());
        ok!(cuStreamCreate(&mut stream, NON_BLOCKING));
        ok!(cuMemHostAlloc(&mut at, 8, 2));
        // SAFETY: of that size, and never freed.
        let gate = unsafe {
            at.cast::<u64>().write(0);
            AtomicU32::from_ptr(at.cast())
        };
        let one = Self { stream, gate };
        one.wait_for(1);
        one
    }

    fn at(&self) -> CUdeviceptr {
        std::ptr::from_ref(self.gate) as CUdeviceptr
    }

    /// What the stream has so far stays until the gate has this value.
    fn wait_for(&self, value: u32) {
        ok!(cuStreamWaitValue32_v2(self.stream, self.at(), value, 0));
    }

    pub fn open(&self) {
        self.gate.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        self.open();
        ok!(cuStreamSynchronize(self.stream));
    }
}

impl Drop for Gated {
    fn drop(&mut self) {
        ok!(cuStreamDestroy_v2(self.stream));
    }
}

unsafe extern "C" fn increase(data: *mut c_void) {
    // SAFETY: tests pass a word that lives long enough.
    unsafe { AtomicU32::from_ptr(data.cast()) }.fetch_add(1, Ordering::SeqCst);
}

/// Calls what must return although its stream is held up. `open` ends that in any case.
pub fn returns(own: &Own, open: impl FnOnce(), call: impl FnOnce() + Send) {
    let context = own.handle() as u64;
    let (done, is_done) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            ok!(cuCtxSetCurrent(context as CUcontext));
            call();
            let _ = done.send(());
        });
        let returned = is_done.recv_timeout(LONG);
        open();
        assert!(returned.is_ok(), "it waits for what comes before the copy");
    });
}

#[test]
fn a_copy_from_registered_memory_reads_after_a_function() {
    let _context = context();
    let (own, to, gated) = (Registered::new(1), device(&[0u32]), Gated::new());
    let data = own.at().cast();
    ok!(cuLaunchHostFunc(gated.stream, Some(increase), data));
    ok!(cuMemcpyHtoDAsync_v2(to, data, 4, gated.stream));
    own.word().store(6, Ordering::SeqCst);
    gated.end();
    assert_eq!(values::<u32>(to, 1), [7]);
    // The same where the function is another stream's, and where the caller waits.
    let (mut other, mut event) = (null_mut(), null_mut());
    ok!(cuStreamCreate(&mut other, NON_BLOCKING));
    ok!(cuEventCreate(&mut event, 2));
    gated.wait_for(2);
    ok!(cuLaunchHostFunc(gated.stream, Some(increase), data));
    ok!(cuEventRecord(event, gated.stream));
    ok!(cuStreamWaitEvent(other, event, 0));
    ok!(cuMemcpyHtoDAsync_v2(to, data, 4, other));
    gated.open();
    ok!(cuStreamSynchronize(other));
    assert_eq!(values::<u32>(to, 1), [8]);
    ok!(cuLaunchHostFunc(null_mut(), Some(increase), data));
    ok!(cuMemcpyHtoD_v2(to, data, 4));
    assert_eq!(values::<u32>(to, 1), [9]);
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(other));
}

#[test]
fn a_copy_to_registered_memory_returns_at_once() {
    let context = context();
    let (own, from, gated) = (Registered::new(2), device(&[3u32, 4]), Gated::new());
    let (at, stream) = (own.at() as u64, gated.stream as u64);
    let copy = move || {
        let (at, stream) = (at as *mut c_void, stream as CUstream);
        ok!(cuMemcpyDtoHAsync_v2(at, from, 8, stream));
    };
    returns(&context, || gated.open(), copy);
    ok!(cuStreamSynchronize(gated.stream));
    assert_eq!(own.0[own.1..own.1 + 2], [3, 4]);
}

#[test]
fn registered_memory_has_the_data_when_anything_behind_is_seen() {
    let context = context();
    let (own, from) = (Registered::new(1), device(&[5u32]));
    let (at, gated) = (own.at() as u64, Gated::new());
    let stream = gated.stream as u64;
    let copy = move || {
        let (at, stream) = (at as *mut c_void, stream as CUstream);
        ok!(cuMemcpyDtoHAsync_v2(at, from, 4, stream));
    };
    let start = Instant::now();
    let still = || assert!(start.elapsed() < LONG);
    // A word that the device writes, which nobody asks for.
    let seen = gated.at() + 4;
    returns(
        &context,
        || {
            ok!(cuStreamWriteValue32_v2(gated.stream, seen, 1, 0));
            gated.open();
        },
        copy,
    );
    // SAFETY: the second word of the gate's memory.
    let word = unsafe { AtomicU32::from_ptr(seen as *mut u32) };
    while word.load(Ordering::SeqCst) == 0 {
        still();
        std::hint::spin_loop();
    }
    assert_eq!(own.word().load(Ordering::SeqCst), 5);
    // An event that is asked for, and a function.
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, 2));
    own.word().store(0, Ordering::SeqCst);
    gated.wait_for(2);
    returns(
        &context,
        || {
            ok!(cuEventRecord(event, gated.stream));
            ok!(cuLaunchHostFunc(
                gated.stream,
                Some(increase),
                at as *mut c_void
            ));
            gated.open();
        },
        copy,
    );
    while cuda!(cuEventQuery(event)) != CUresult::CUDA_SUCCESS {
        still();
    }
    assert!([5, 6].contains(&own.word().load(Ordering::SeqCst)));
    ok!(cuStreamSynchronize(gated.stream));
    assert_eq!(own.word().load(Ordering::SeqCst), 6);
    ok!(cuEventDestroy_v2(event));
}

#[test]
fn a_registration_ends_with_its_context() {
    let mut pages = vec![0u32; 2048];
    let start = pages.as_mut_ptr().align_offset(4096);
    let data = pages[start..].as_mut_ptr();
    let at = data.cast::<c_void>();
    for _ in 0..2 {
        let _context = context();
        ok!(cuMemHostRegister_v2(at, 4096, 0));
    }
    let _context = context();
    let (to, gated) = (device(&[0u32]), Gated::new());
    // SAFETY: memory of this test, which nothing else accesses: the copy has read it when the call returns.
    unsafe {
        data.write_volatile(1);
        ok!(cuMemcpyHtoDAsync_v2(to, at, 4, gated.stream));
        data.write_volatile(2);
    }
    gated.end();
    assert_eq!(values::<u32>(to, 1), [1]);
}

#[test]
fn rows_and_large_copies_of_registered_memory_keep_their_order() {
    let context = context();
    let (rows, width, pitch) = (3usize, 8usize, 32usize);
    let (own, back) = (
        Registered::new(rows * pitch / 4),
        Registered::new(rows * pitch / 4),
    );
    let (there, gated) = (device(&[0u32; 64]), Gated::new());
    // SAFETY: numbers and pointers: zero is a value of each.
    let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    (copy.WidthInBytes, copy.Height, copy.Depth) = (width, rows, 1);
    copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    (copy.srcHost, copy.srcPitch) = (own.at().cast(), pitch);
    (copy.dstDevice, copy.dstPitch) = (there, 16);
    ok!(cuLaunchHostFunc(
        gated.stream,
        Some(increase),
        own.at().cast()
    ));
    ok!(cuMemcpy3DAsync_v2(&copy, gated.stream));
    let words = own.at();
    for row in 0..rows {
        // SAFETY: within the memory, which the stream does not read yet.
        unsafe { words.add(row * pitch / 4 + 1).write(row as u32 + 10) };
    }
    let mut copy_back = copy;
    copy_back.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    copy_back.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
    (copy_back.srcDevice, copy_back.srcPitch) = (there, 16);
    (copy_back.dstHost, copy_back.dstPitch) = (back.at().cast(), pitch);
    let (address, stream) = (&raw const copy_back as u64, gated.stream as u64);
    let copied = move || {
        let (copy, stream) = (address as *const CUDA_MEMCPY3D, stream as CUstream);
        ok!(cuMemcpy3DAsync_v2(copy, stream));
    };
    returns(&context, || gated.open(), copied);
    ok!(cuStreamSynchronize(gated.stream));
    let row = |row: usize| back.0[back.1 + row * pitch / 4..][..3].to_vec();
    assert_eq!(
        [row(0), row(1), row(2)],
        [[1, 10, 0], [0, 11, 0], [0, 12, 0]]
    );

    let words = (40 << 20) / 4 + 7;
    let (large, back) = (Registered::new(words), Registered::new(words));
    let mut there = 0;
    ok!(cuMemAlloc_v2(&mut there, 4 * words));
    gated.wait_for(2);
    ok!(cuMemcpyHtoDAsync_v2(
        there,
        large.at().cast(),
        4 * words,
        gated.stream
    ));
    for index in 0..words {
        // SAFETY: as above.
        unsafe { large.at().add(index).write(index as u32) };
    }
    ok!(cuMemcpyDtoHAsync_v2(
        back.at().cast(),
        there,
        4 * words,
        gated.stream
    ));
    gated.end();
    let is_right = |(index, word): (usize, &u32)| *word == index as u32;
    assert!(
        back.0[back.1..back.1 + words]
            .iter()
            .enumerate()
            .all(is_right)
    );
    ok!(cuMemFree_v2(there));
}

#[test]
fn copies_between_registered_and_pinned_memory_keep_their_order() {
    let context = context();
    let (own, gated) = (Registered::new(1), Gated::new());
    let (to, at) = (gated.at() + 4, own.at() as u64);
    ok!(cuLaunchHostFunc(
        gated.stream,
        Some(increase),
        own.at().cast()
    ));
    let stream = gated.stream as u64;
    let copy = move || ok!(cuMemcpyAsync(to, at, 4, stream as CUstream));
    returns(
        &context,
        || {
            own.word().store(2, Ordering::SeqCst);
            gated.open();
        },
        copy,
    );
    ok!(cuStreamSynchronize(gated.stream));
    // SAFETY: the second word of the gate's memory.
    assert_eq!(unsafe { (to as *const u32).read() }, 3);
}

/// What a function of the program waits for, and what became of that.
#[derive(Default)]
struct Awaited {
    is_called: AtomicU32,
    may_return: AtomicU32,
    has_waited: AtomicU32,
}

unsafe extern "C" fn wait_for_copies(data: *mut c_void) {
    // SAFETY: the test passes what lives until the function has returned.
    let awaited = unsafe { &*data.cast::<Awaited>() };
    awaited.is_called.store(1, Ordering::SeqCst);
    let start = Instant::now();
    while awaited.may_return.load(Ordering::SeqCst) == 0 {
        if start.elapsed() > LONG {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    awaited.has_waited.store(1, Ordering::SeqCst);
}

#[test]
fn registered_copies_do_not_wait_for_other_streams_functions() {
    let _context = context();
    let (own, back, other) = (Registered::new(1), Registered::new(1), Registered::new(1));
    let (there, gated) = (device(&[0u32]), Gated::new());
    let (mut graph, mut executable) = (null_mut(), null_mut());
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let busy = stream(NON_BLOCKING);
    ok!(cuStreamBeginCapture_v2(busy, mode));
    ok!(cuMemcpyHtoDAsync_v2(there, back.at().cast(), 4, busy));
    ok!(cuMemcpyDtoHAsync_v2(other.at().cast(), there, 4, busy));
    ok!(cuStreamEndCapture(busy, &mut graph));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));

    let awaited = Awaited::default();
    let data = (&raw const awaited).cast_mut().cast();
    ok!(cuLaunchHostFunc(busy, Some(wait_for_copies), data));
    let start = Instant::now();
    while awaited.is_called.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < LONG);
        thread::sleep(Duration::from_millis(1));
    }
    // Of a stream that has work, and of one that has none.
    own.word().store(7, Ordering::SeqCst);
    ok!(cuMemcpyHtoDAsync_v2(
        there,
        own.at().cast(),
        4,
        gated.stream
    ));
    own.word().store(8, Ordering::SeqCst);
    ok!(cuMemcpyDtoHAsync_v2(
        back.at().cast(),
        there,
        4,
        gated.stream
    ));
    ok!(cuGraphLaunch(executable, gated.stream));
    let to = gated.at() + 4;
    ok!(cuMemcpyAsync(to, other.at() as u64, 4, gated.stream));
    gated.end();
    // SAFETY: the second word of the gate's memory.
    assert_eq!(unsafe { (to as *const u32).read() }, 8);
    own.word().store(9, Ordering::SeqCst);
    ok!(cuMemcpyHtoDAsync_v2(
        there,
        own.at().cast(),
        4,
        gated.stream
    ));
    ok!(cuMemcpyDtoHAsync_v2(
        back.at().cast(),
        there,
        4,
        gated.stream
    ));
    ok!(cuStreamSynchronize(gated.stream));
    assert_eq!(back.word().load(Ordering::SeqCst), 9);
    awaited.may_return.store(1, Ordering::SeqCst);
    ok!(cuStreamSynchronize(busy));
    assert_eq!(awaited.has_waited.load(Ordering::SeqCst), 1);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    ok!(cuStreamDestroy_v2(busy));
}

/// Calls `enqueue` behind a function that has begun, and then submits about as many copies of memory that is not pinned as
/// a driver's queue holds. The function returns when all of them have been submitted.
fn behind_a_function(enqueue: impl FnOnce(CUstream)) {
    let (awaited, to, from) = (Awaited::default(), device(&[0u32]), [1u32]);
    let stream = stream(NON_BLOCKING);
    let data = (&raw const awaited).cast_mut().cast();
    ok!(cuLaunchHostFunc(stream, Some(wait_for_copies), data));
    let start = Instant::now();
    while awaited.is_called.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < LONG);
        thread::sleep(Duration::from_millis(1));
    }
    enqueue(stream);
    for _ in 0..800 {
        ok!(cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), 4, stream));
    }
    awaited.may_return.store(1, Ordering::SeqCst);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(awaited.has_waited.load(Ordering::SeqCst), 1);
    assert_eq!(values::<u32>(to, 1), [1]);
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn much_work_behind_a_registered_copy_does_not_keep_it_from_its_data() {
    let _context = context();
    let (own, there) = (Registered::new(1), device(&[0u32]));
    behind_a_function(|stream| {
        ok!(cuMemcpyHtoDAsync_v2(there, own.at().cast(), 4, stream));
        own.word().store(7, Ordering::SeqCst);
    });
    assert_eq!(values::<u32>(there, 1), [7]);
}

#[test]
fn much_work_behind_a_function_does_not_keep_it_from_its_call() {
    let _context = context();
    let own = AtomicU32::new(0);
    behind_a_function(|stream| {
        ok!(cuLaunchHostFunc(
            stream,
            Some(increase),
            own.as_ptr().cast()
        ));
    });
    assert_eq!(own.load(Ordering::SeqCst), 1);
}

#[test]
fn much_work_behind_a_graph_does_not_keep_its_function_from_its_call() {
    let _context = context();
    let own = AtomicU32::new(0);
    let (mut graph, mut node, mut executable) = (null_mut(), null_mut(), null_mut());
    let call = CUDA_HOST_NODE_PARAMS {
        r#fn: Some(increase),
        userData: own.as_ptr().cast(),
    };
    ok!(cuGraphCreate(&mut graph, 0));
    ok!(cuGraphAddHostNode(
        &mut node,
        graph,
        std::ptr::null(),
        0,
        &call
    ));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    behind_a_function(|stream| ok!(cuGraphLaunch(executable, stream)));
    assert_eq!(own.load(Ordering::SeqCst), 1);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
}

#[test]
fn streams_of_work_behind_a_function_do_not_keep_what_it_waits_for() {
    const STREAMS: usize = 5;
    let context = context();
    let (own, to, gated) = (AtomicU32::new(0), device(&[0u32]), Gated::new());
    let mut streams = [null_mut(); STREAMS];
    for stream in &mut streams {
        ok!(cuStreamCreate(stream, NON_BLOCKING));
    }
    ok!(cuLaunchHostFunc(
        gated.stream,
        Some(increase),
        own.as_ptr().cast()
    ));
    let ([last, others @ ..], gate) = (streams, gated.at());
    for stream in others {
        ok!(cuStreamWaitValue32_v2(stream, gate, 1, 0));
        for value in 0..600 {
            ok!(cuMemsetD32Async(to, value, 1, stream));
        }
    }
    let stream = last as u64;
    let write = move || ok!(cuStreamWriteValue32_v2(stream as CUstream, gate, 1, 0));
    returns(&context, || gated.open(), write);
    for stream in streams.into_iter().chain([gated.stream]) {
        ok!(cuStreamSynchronize(stream));
    }
    assert_eq!(
        (own.load(Ordering::SeqCst), values(to, 1)),
        (1, vec![599u32])
    );
    for stream in streams {
        ok!(cuStreamDestroy_v2(stream));
    }
}

#[test]
fn a_graph_reads_registered_memory_after_the_functions_before() {
    let _context = context();
    let (own, to) = (Registered::new(1), device(&[0u32]));
    let (mut stream, mut graph, mut executable) = (null_mut(), null_mut(), null_mut());
    ok!(cuStreamCreate(&mut stream, NON_BLOCKING));
    begin_capture(stream);
    ok!(cuLaunchHostFunc(stream, Some(increase), own.at().cast()));
    ok!(cuMemcpyHtoDAsync_v2(to, own.at().cast(), 4, stream));
    ok!(cuStreamEndCapture(stream, &mut graph));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    let run = |executable| {
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        values::<u32>(to, 1)[0]
    };
    assert_eq!([(); 3].map(|()| run(executable)), [1, 2, 3]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));

    // Of nodes: a copy before the function reads what there is at the launch, the one behind both functions what the
    // second leaves.
    let before = device(&[0u32]);
    ok!(cuGraphCreate(&mut graph, 0));
    let mut last = null_mut::<CUgraphNode_st>();
    let mut add = |to: CUdeviceptr| {
        // SAFETY: numbers and pointers: zero is a value of each.
        let mut copy: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
        (copy.WidthInBytes, copy.Height, copy.Depth) = (4, 1, 1);
        copy.srcMemoryType = CUmemorytype::CU_MEMORYTYPE_HOST;
        copy.dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
        (copy.srcHost, copy.dstDevice) = (own.at().cast(), to);
        let call = CUDA_HOST_NODE_PARAMS {
            r#fn: Some(increase),
            userData: own.at().cast(),
        };
        let (after, mut node, mut current) = (last, null_mut(), null_mut());
        ok!(cuCtxGetCurrent(&mut current));
        let count = usize::from(!after.is_null());
        ok!(cuGraphAddMemcpyNode(
            &mut node, graph, &after, count, &copy, current
        ));
        for _ in 0..2 {
            let after = node;
            ok!(cuGraphAddHostNode(&mut node, graph, &after, 1, &call));
        }
        last = node;
    };
    add(before);
    add(to);
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    assert_eq!(run(executable), 5);
    assert_eq!(values::<u32>(before, 1), [3]);
    assert_eq!(run(executable), 9);
    assert_eq!(values::<u32>(before, 1), [7]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    ok!(cuStreamDestroy_v2(stream));
}
