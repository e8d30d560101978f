//! Streams: what waits and what does not.

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::atomic::{AtomicU32, Ordering},
};

use cuda_definition::driver::types::*;

use crate::driver::{
    argument, context, cuda, device, function, launch, module, ok, stream, values,
};

const ORDER: &str = include_str!("../kernels/order.compute_75.ptx");
const NON_BLOCKING: u32 = 1;

fn event() -> CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, 0));
    event
}

/// Host memory shared by kernels and the host.
fn pinned(count: usize) -> &'static [AtomicU32] {
    let mut at: *mut c_void = null_mut();
    ok!(cuMemHostAlloc(&mut at, count * 4, 2));
    // SAFETY: memory of that size, which no test frees and nobody else uses yet.
    unsafe {
        // It may have belonged to another test before.
        at.cast::<u32>().write_bytes(0, count);
        std::slice::from_raw_parts(at.cast(), count)
    }
}

fn address(word: &AtomicU32) -> CUdeviceptr {
    std::ptr::from_ref(word) as CUdeviceptr
}

/// Launches a kernel that runs until the word has a value.
fn spin(module: CUmodule, stream: CUstream, word: &AtomicU32, until: u32) {
    let at = address(word);
    let spin = function(module, "spin");
    let result = launch(
        spin,
        [1, 1, 1],
        [1, 1, 1],
        0,
        stream,
        &[argument(&at), argument(&until)],
    );
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

#[test]
fn a_launch_returns_before_its_kernel_ends() {
    let _context = context();
    let (module, word, stream) = (module(ORDER), &pinned(1)[0], stream(NON_BLOCKING));
    spin(module, stream, word, 1);
    let event = event();
    ok!(cuEventRecord(event, stream));
    assert_eq!(cuda!(cuStreamQuery(stream)), CUresult::CUDA_ERROR_NOT_READY);
    assert_eq!(cuda!(cuEventQuery(event)), CUresult::CUDA_ERROR_NOT_READY);
    word.store(1, Ordering::SeqCst);
    ok!(cuEventSynchronize(event));
    ok!(cuStreamQuery(stream));
}

#[test]
fn streams_run_at_the_same_time_and_events_order_them() {
    let _context = context();
    let (module, words) = (module(ORDER), pinned(2));
    let (first, second) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    // The first waits for what the second writes.
    spin(module, first, &words[0], 1);
    ok!(cuStreamWriteValue32_v2(second, address(&words[0]), 1, 0));
    ok!(cuStreamSynchronize(first));
    // The second waits for an event that the first has not reached.
    spin(module, first, &words[1], 1);
    let event = event();
    ok!(cuEventRecord(event, first));
    ok!(cuStreamWaitEvent(second, event, 0));
    ok!(cuStreamWriteValue32_v2(second, address(&words[0]), 2, 0));
    assert_eq!(cuda!(cuStreamQuery(second)), CUresult::CUDA_ERROR_NOT_READY);
    assert_eq!(words[0].load(Ordering::SeqCst), 1);
    words[1].store(1, Ordering::SeqCst);
    ok!(cuStreamSynchronize(second));
    assert_eq!(words[0].load(Ordering::SeqCst), 2);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_only() {
    let _context = context();
    let (module, words) = (module(ORDER), pinned(2));
    let (blocking, free) = (stream(0), stream(NON_BLOCKING));
    spin(module, free, &words[0], 1);
    // The non-blocking stream does not hold this up.
    ok!(cuStreamSynchronize(null_mut()));
    spin(module, blocking, &words[1], 1);
    ok!(cuMemsetD32Async(address(&words[0]), 1, 1, null_mut()));
    assert_eq!(
        cuda!(cuStreamQuery(null_mut())),
        CUresult::CUDA_ERROR_NOT_READY
    );
    assert_eq!(words[0].load(Ordering::SeqCst), 0);
    words[1].store(1, Ordering::SeqCst);
    ok!(cuCtxSynchronize());
    assert_eq!(words[0].load(Ordering::SeqCst), 1);
}

#[test]
fn copies_that_are_longer_than_what_is_under_way_of_them_arrive_whole() {
    let _context = context();
    // Not a multiple of any chunk size.
    let numbers: Vec<u32> = (0..(9 << 20) + 77)
        .map(|n: u32| n.wrapping_mul(31))
        .collect();
    let (mut stream, bytes) = (null_mut(), size_of_val(&numbers[..]));
    ok!(cuStreamCreate(&mut stream, 1));
    let mut at = 0;
    ok!(cuMemAlloc_v2(&mut at, bytes));
    let mut back = vec![0u32; numbers.len()];
    for asynchronous in [true, false] {
        // The other stream does not wait for this.
        ok!(cuMemsetD32_v2(at, 0, numbers.len()));
        ok!(cuCtxSynchronize());
        back.fill(0);
        let (from, to) = (numbers.as_ptr().cast(), back.as_mut_ptr().cast());
        if asynchronous {
            ok!(cuMemcpyHtoDAsync_v2(at, from, bytes, stream));
            ok!(cuMemcpyDtoHAsync_v2(to, at, bytes, stream));
            ok!(cuStreamSynchronize(stream));
        } else {
            ok!(cuMemcpyHtoD_v2(at, from, bytes));
            ok!(cuMemcpyDtoH_v2(to, at, bytes));
        }
        assert!(back == numbers);
    }
    ok!(cuMemFree_v2(at));
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn pageable_memory_is_read_before_a_copy_returns_and_pinned_memory_later() {
    let _context = context();
    let (module, words, stream) = (module(ORDER), pinned(2), stream(NON_BLOCKING));
    let (to_pageable, to_pinned) = (device(&[0u32]), device(&[0u32]));
    let mut pageable = 5u32;
    words[1].store(5, Ordering::SeqCst);
    spin(module, stream, &words[0], 1);
    ok!(cuMemcpyHtoDAsync_v2(
        to_pageable,
        (&raw const pageable).cast(),
        4,
        stream
    ));
    ok!(cuMemcpyHtoDAsync_v2(
        to_pinned,
        address(&words[1]) as *const c_void,
        4,
        stream
    ));
    pageable += 1;
    words[1].store(6, Ordering::SeqCst);
    words[0].store(1, Ordering::SeqCst);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(pageable, 6);
    assert_eq!(values::<u32>(to_pageable, 1), [5]);
    assert_eq!(values::<u32>(to_pinned, 1), [6]);
}

unsafe extern "C" fn increment(word: *mut c_void) {
    // SAFETY: the test passes a counter that outlives the stream's work.
    unsafe { &*word.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn host_functions_run_in_their_place() {
    let _context = context();
    let (module, words, stream) = (module(ORDER), pinned(2), stream(NON_BLOCKING));
    spin(module, stream, &words[0], 1);
    let counter = address(&words[1]) as *mut c_void;
    ok!(cuLaunchHostFunc(stream, Some(increment), counter));
    assert_eq!(words[1].load(Ordering::SeqCst), 0);
    words[0].store(1, Ordering::SeqCst);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(words[1].load(Ordering::SeqCst), 1);
}

#[test]
fn values_are_waited_for_in_all_four_ways() {
    let _context = context();
    let (words, stream) = (pinned(1), stream(NON_BLOCKING));
    for (flags, value, enough) in [(0, 3, 4), (1, 9, 9), (2, 0b100, 0b110), (3, 0x7fff_ffff, 0)] {
        words[0].store(if flags == 3 { u32::MAX } else { 0 }, Ordering::SeqCst);
        ok!(cuStreamWaitValue32_v2(
            stream,
            address(&words[0]),
            value,
            flags
        ));
        assert_eq!(
            cuda!(cuStreamQuery(stream)),
            CUresult::CUDA_ERROR_NOT_READY,
            "{flags}"
        );
        words[0].store(enough, Ordering::SeqCst);
        ok!(cuStreamSynchronize(stream));
    }
}

#[test]
fn what_is_captured_runs_when_its_graph_is_launched_and_each_time() {
    let _context = context();
    let (module, stream, other) = (module(ORDER), stream(NON_BLOCKING), stream(NON_BLOCKING));
    let memory = device(&[1u32, 2, 3]);
    let count = 3u32;
    let (fork, join) = (event(), event());
    let twice = function(module, "twice");
    ok!(cuStreamBeginCapture_v2(
        stream,
        CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL
    ));
    launch(
        twice,
        [1, 1, 1],
        [4, 1, 1],
        0,
        stream,
        &[argument(&memory), argument(&count)],
    );
    // Another stream joins the capture and comes back.
    ok!(cuEventRecord(fork, stream));
    ok!(cuStreamWaitEvent(other, fork, 0));
    launch(
        twice,
        [1, 1, 1],
        [4, 1, 1],
        0,
        other,
        &[argument(&memory), argument(&count)],
    );
    ok!(cuEventRecord(join, other));
    ok!(cuStreamWaitEvent(stream, join, 0));
    assert_eq!(
        cuda!(cuStreamSynchronize(stream)),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    );
    let (mut graph, mut executable, mut nodes) = (null_mut(), null_mut(), 0);
    ok!(cuStreamEndCapture(stream, &mut graph));
    ok!(cuGraphGetNodes(graph, null_mut(), &mut nodes));
    assert_eq!(nodes, 2);
    assert_eq!(values::<u32>(memory, 3), [1, 2, 3]);
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    ok!(cuGraphDestroy(graph));
    for _ in 0..2 {
        ok!(cuGraphLaunch(executable, stream));
    }
    ok!(cuStreamSynchronize(stream));
    assert_eq!(values::<u32>(memory, 3), [16, 32, 48]);
    // Both streams work as before.
    launch(
        twice,
        [1, 1, 1],
        [4, 1, 1],
        0,
        other,
        &[argument(&memory), argument(&count)],
    );
    ok!(cuStreamSynchronize(other));
    assert_eq!(values::<u32>(memory, 3), [32, 64, 96]);
}

#[test]
fn blocks_of_a_cooperative_launch_wait_for_each_other() {
    let _context = context();
    let meet = function(module(ORDER), "meet");
    let (arrived, seen) = (device(&[0u32]), device(&[0u32; 6]));
    let mut arguments = [argument(&arrived), argument(&seen)];
    ok!(cuLaunchCooperativeKernel(
        meet,
        6,
        1,
        1,
        32,
        1,
        1,
        0,
        null_mut(),
        arguments.as_mut_ptr()
    ));
    assert_eq!(values::<u32>(seen, 6), [6; 6]);
    let too_many = cuda!(cuLaunchCooperativeKernel(
        meet,
        9,
        1,
        1,
        1024,
        1,
        1,
        0,
        null_mut(),
        arguments.as_mut_ptr()
    ));
    assert_eq!(too_many, CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
}
