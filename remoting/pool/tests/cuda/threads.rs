//! Several threads of a program, of which one waits for work that goes on with what another does.

use std::{
    collections::HashSet,
    ffi::c_void,
    ptr::null_mut,
    sync::{
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use cuda_definition::driver::types::*;

use crate::driver::{argument, context, cuda, device, function, launch, module, ok, stream};

const ORDER: &str =
    include_str!("../../../../tests/cuda-driver/tests/kernels/order.compute_75.ptx");

unsafe extern "C" fn set(data: *mut c_void) {
    // SAFETY: tests give one that stays until the function has returned.
    unsafe { &*data.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
}

unsafe extern "C" fn receive(data: *mut c_void) {
    // SAFETY: as above.
    let from = unsafe { &*data.cast::<mpsc::Receiver<()>>() };
    // Who would have sent may have failed.
    let _ = from.recv();
}

#[test]
fn a_call_that_waits_for_a_kernel_holds_up_no_other_thread() {
    let own = context();
    let current = own.handle() as u64;
    let (mut stream, mut word) = (null_mut(), null_mut());
    ok!(cuStreamCreate(&mut stream, 1));
    ok!(cuMemHostAlloc(&mut word, 4, 2));
    // SAFETY: so much memory is there, and nobody frees it.
    let word = unsafe { &*word.cast::<AtomicU32>() };
    word.store(0, Ordering::SeqCst);
    let (at, until) = (std::ptr::from_ref(word) as u64, 1u32);
    let spin = function(module(ORDER), "spin");
    let arguments = [argument(&at), argument(&until)];
    let launched = launch(spin, [1; 3], [1; 3], 0, stream, &arguments);
    assert_eq!(launched, CUresult::CUDA_SUCCESS);
    let (memory, other) = (device(&[1u32]), module(ORDER) as u64);
    let (ended, called) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            ok!(cuCtxSetCurrent(current as CUcontext));
            // Both wait for the kernel.
            ok!(cuMemFree_v2(memory));
            ended.store(true, Ordering::SeqCst);
            ok!(cuModuleUnload(other as CUmodule));
        });
        // This thread is served meanwhile, and then lets the kernel end.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            let own = crate::driver::stream(1);
            ok!(cuStreamDestroy_v2(own));
        }
        assert!(!ended.load(Ordering::SeqCst));
        // What waits for the kernel then waits for this as well, of which the program is told first.
        let data = std::ptr::from_ref(&called).cast_mut().cast();
        ok!(cuLaunchHostFunc(stream, Some(set), data));
        word.store(1, Ordering::SeqCst);
    });
    assert!(ended.load(Ordering::SeqCst) && called.load(Ordering::SeqCst));
    ok!(cuCtxSynchronize());
}

#[test]
fn a_call_that_waits_for_a_function_holds_up_no_other_thread() {
    let own = context();
    let current = own.handle() as u64;
    let stream = stream(1);
    let memory = device(&[7u32]);
    let (sender, receiver) = mpsc::channel();
    let data = std::ptr::from_ref(&receiver).cast_mut().cast();
    ok!(cuLaunchHostFunc(stream, Some(receive), data));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            ok!(cuCtxSetCurrent(current as CUcontext));
            // The driver might wait for the function in any of these.
            let other = module(ORDER) as u64;
            ok!(cuMemFree_v2(memory));
            ok!(cuModuleUnload(other as CUmodule));
            ended.store(true, Ordering::SeqCst);
        });
        // This thread is served meanwhile, and then lets the function return.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            let mut event = null_mut();
            ok!(cuEventCreate(&mut event, 0));
            ok!(cuEventDestroy_v2(event));
        }
        assert!(!ended.load(Ordering::SeqCst));
        sender.send(()).unwrap();
    });
    ok!(cuStreamSynchronize(stream));
    ok!(cuStreamDestroy_v2(stream));
}

/// Memory that kernels and the host see alike.
fn pinned() -> *mut u32 {
    let mut at: *mut c_void = null_mut();
    ok!(cuMemHostAlloc(&mut at, 4, 2));
    at.cast()
}

#[test]
fn a_stream_that_was_idle_is_waited_for_once_another_thread_has_sent_it_work() {
    let own = context();
    let current = own.handle() as u64;
    let (mut stream, word, count) = (null_mut(), pinned(), 1u32);
    ok!(cuStreamCreate(&mut stream, 1));
    let (at, to) = (word as u64, stream as u64);
    let twice = function(module(ORDER), "twice") as u64;
    // SAFETY: a word that nobody else uses; kernels have ended when it is looked at.
    unsafe { word.write_volatile(1) };
    for round in 1..20 {
        // It is known to be idle the second time.
        ok!(cuStreamSynchronize(stream));
        ok!(cuStreamSynchronize(stream));
        let sent = thread::spawn(move || {
            ok!(cuCtxSetCurrent(current as CUcontext));
            let arguments = [argument(&at), argument(&count)];
            let (twice, stream) = (twice as CUfunction, to as CUstream);
            launch(twice, [1; 3], [1; 3], 0, stream, &arguments)
        });
        assert_eq!(sent.join().unwrap(), CUresult::CUDA_SUCCESS);
        ok!(cuStreamSynchronize(stream));
        // SAFETY: as above.
        assert_eq!(unsafe { word.read_volatile() }, 1 << round);
    }
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn a_stream_that_was_idle_tells_of_a_fault_in_another_one() {
    let _context = context();
    let (mut idle, mut other) = (null_mut(), null_mut());
    for stream in [&mut idle, &mut other] {
        ok!(cuStreamCreate(stream, 1));
        ok!(cuStreamSynchronize(*stream));
        ok!(cuStreamSynchronize(*stream));
    }
    let (memory, beyond) = (device(&[0u32; 4]), 4u32);
    let function = function(module(ORDER), "beyond");
    let arguments = [argument(&memory), argument(&beyond)];
    let launched = launch(function, [1; 3], [1; 3], 0, other, &arguments);
    assert_eq!(launched, CUresult::CUDA_SUCCESS);
    let failed = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(cuda!(cuStreamSynchronize(other)), failed);
    assert_eq!(cuda!(cuStreamSynchronize(idle)), failed);
    assert_eq!(cuda!(cuStreamSynchronize(idle)), failed);
}

/// What a callback has been told.
static TOLD: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn told(_: CUstream, result: CUresult, data: *mut c_void) {
    TOLD.store(result.0, Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { &*data.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
}

#[test]
fn a_function_behind_a_fault_holds_nothing_up_and_a_callback_is_told_of_it() {
    let own = context();
    let (mut stream, gate) = (null_mut(), pinned());
    ok!(cuStreamCreate(&mut stream, 1));
    // SAFETY: a word that kernels look at, too.
    let gate = unsafe { AtomicU32::from_ptr(gate) };
    gate.store(0, Ordering::SeqCst);
    let (at, one, beyond) = (gate.as_ptr() as u64, 1u32, 4u32);
    let (memory, mut managed, module) = (device(&[0u32; 4]), 0, module(ORDER));
    ok!(cuMemAllocManaged(&mut managed, 4, 1));
    let run = |name, arguments: &[*mut c_void]| {
        let launched = launch(function(module, name), [1; 3], [1; 3], 0, stream, arguments);
        assert_eq!(launched, CUresult::CUDA_SUCCESS);
    };
    run("spin", &[argument(&at), argument(&one)]);
    run("beyond", &[argument(&memory), argument(&beyond)]);
    let (called, answered) = (AtomicBool::new(false), AtomicBool::new(false));
    let data = |flag: &AtomicBool| std::ptr::from_ref(flag).cast_mut().cast();
    ok!(cuLaunchHostFunc(stream, Some(set), data(&called)));
    ok!(cuStreamAddCallback(stream, Some(told), data(&answered), 0));
    gate.store(1, Ordering::SeqCst);
    let failed = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(cuda!(cuStreamSynchronize(stream)), failed);
    while !answered.load(Ordering::SeqCst) {
        thread::yield_now();
    }
    assert_eq!(cudaError_enum(TOLD.load(Ordering::SeqCst)), failed);
    // These may wait for functions, and none is due any more.
    for freed in [memory, managed] {
        assert_eq!(cuda!(cuMemFree_v2(freed)), failed);
    }
    assert_eq!(cuda!(cuMemFreeHost(gate.as_ptr().cast())), failed);
    assert_ne!(cuda!(cuModuleUnload(module)), CUresult::CUDA_SUCCESS);
    drop(own);
    assert!(!called.load(Ordering::SeqCst));
    // Another context is as good as any.
    let _other = context();
    let memory = device(&[1u32]);
    ok!(cuMemFree_v2(memory));
}

#[test]
fn memory_is_known_that_has_the_address_of_what_another_thread_has_just_freed() {
    let own = context();
    let current = own.handle() as u64;
    thread::scope(|scope| {
        for value in [7u32, 9] {
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(current as CUcontext));
                for _ in 0..400 {
                    let memory = device(&[value; 4]);
                    assert_eq!(crate::driver::values::<u32>(memory, 4), [value; 4]);
                    ok!(cuMemFree_v2(memory));
                }
            });
        }
    });
}

#[test]
fn threads_that_end_leave_their_own_streams_to_others() {
    let own = context();
    let current = own.handle() as u64;
    let memory = device(&[0u32]);
    let mut streams = HashSet::new();
    for value in 0..300 {
        let ended = thread::spawn(move || {
            let (stream, mut id) = (2 as CUstream, 0);
            ok!(cuCtxSetCurrent(current as CUcontext));
            ok!(cuMemsetD32Async(memory, value, 1, stream));
            ok!(cuStreamSynchronize(stream));
            assert_eq!(crate::driver::values::<u32>(memory, 1), [value]);
            ok!(cuStreamGetId(stream, &mut id));
            id
        });
        streams.insert(ended.join().unwrap());
    }
    assert!(streams.len() < 10, "{}", streams.len());
}

#[test]
fn captures_of_threads_own_streams_end_one_by_one() {
    let own = context();
    let current = own.handle() as u64;
    // More than one page each, so that each has a place of its own.
    let bytes = 64 << 10;
    let to = [(); 3].map(|()| device(&vec![0u8; bytes]));
    let mut from = [(); 3].map(|()| vec![1u8; bytes]);
    let stream = || 2 as CUstream;
    let begin = || {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        ok!(cuStreamBeginCapture_v2(stream(), mode));
    };
    let copy = |index: usize, from: &[u8]| {
        let from = from.as_ptr().cast();
        ok!(cuMemcpyHtoDAsync_v2(to[index], from, bytes, stream()));
    };
    let end = || {
        let (mut graph, mut executable) = (null_mut(), null_mut());
        ok!(cuStreamEndCapture(stream(), &mut graph));
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        executable as u64
    };
    begin();
    copy(0, &from[0]);
    let other = thread::scope(|scope| {
        let other = scope.spawn(|| {
            ok!(cuCtxSetCurrent(current as CUcontext));
            begin();
            copy(2, &from[2]);
            end()
        });
        other.join().unwrap()
    });
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    ok!(cuStreamIsCapturing(stream(), &mut status));
    let active = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    assert_eq!(status, active);
    copy(1, &from[1]);
    let mine = end();
    // Both read what is there at the launch.
    for (value, one) in (7..).zip(&mut from) {
        one.fill(value);
    }
    for executable in [mine, other] {
        ok!(cuGraphLaunch(executable as CUgraphExec, null_mut()));
    }
    ok!(cuCtxSynchronize());
    for (to, from) in to.into_iter().zip(from) {
        assert!(crate::driver::values::<u8>(to, bytes) == from);
        ok!(cuMemFree_v2(to));
    }
}

#[test]
fn a_program_cannot_destroy_a_default_stream() {
    let _context = context();
    let memory = device(&[0u32]);
    let own = 2 as CUstream;
    let (mut id, mut again) = (0, 0);
    ok!(cuStreamGetId(own, &mut id));
    for handle in 0..=2 {
        let destroyed = cuda!(cuStreamDestroy_v2(handle as CUstream));
        assert_eq!(destroyed, CUresult::CUDA_ERROR_INVALID_HANDLE, "{handle}");
    }
    ok!(cuStreamGetId(own, &mut again));
    assert_eq!(again, id);
    ok!(cuMemsetD32Async(memory, 5, 1, own));
    ok!(cuStreamSynchronize(own));
    assert_eq!(crate::driver::values::<u32>(memory, 1), [5]);
}

/// Reads memory when its thread ends.
struct Late(CUdeviceptr, mpsc::Sender<u32>);

impl Drop for Late {
    fn drop(&mut self) {
        let (stream, mut seen) = (2 as CUstream, 0u32);
        let to = (&raw mut seen).cast();
        ok!(cuMemcpyDtoHAsync_v2(to, self.0, 4, stream));
        ok!(cuStreamSynchronize(stream));
        let _ = self.1.send(seen);
    }
}

unsafe extern "C" fn pause(_: *mut c_void) {
    thread::sleep(Duration::from_millis(200));
}

#[test]
fn a_thread_that_ends_goes_on_in_its_own_stream() {
    thread_local!(static LATE: std::cell::RefCell<Option<Late>> = const { std::cell::RefCell::new(None) });
    let own = context();
    let current = own.handle() as u64;
    let memory = device(&[0u32]);
    let (sender, seen) = mpsc::channel();
    let ended = thread::spawn(move || {
        // Dropped after what the library keeps for the thread.
        LATE.set(Some(Late(memory, sender)));
        let stream = 2 as CUstream;
        ok!(cuCtxSetCurrent(current as CUcontext));
        ok!(cuLaunchHostFunc(stream, Some(pause), null_mut()));
        ok!(cuMemsetD32Async(memory, 9, 1, stream));
    });
    ended.join().unwrap();
    assert_eq!(seen.recv().unwrap(), 9);
}
