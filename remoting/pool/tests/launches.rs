//! What launches cost the thread of a program into which a guest's library is linked, before a pool with the stand-in
//! driver.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

#[allow(dead_code)]
#[path = "cuda/library.rs"]
mod library;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    ffi::{CString, c_char, c_int, c_uint, c_void},
    ptr::null_mut,
};

use cuda_definition::driver::types::*;
// The functions below are its.
use gantry_cuda as _;

unsafe extern "C" {
    fn cuInit(flags: c_uint) -> CUresult;
    fn cuCtxCreate_v4(
        context: *mut CUcontext,
        parameters: *mut CUctxCreateParams,
        flags: c_uint,
        device: CUdevice,
    ) -> CUresult;
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult;
    fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> CUresult;
    fn cuMemAlloc_v2(at: *mut CUdeviceptr, size: usize) -> CUresult;
    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> CUresult;
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> CUresult;
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> CUresult;
    fn cuStreamSynchronize(stream: CUstream) -> CUresult;
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, size: usize) -> CUresult;
    fn cuMemsetD32_v2(at: CUdeviceptr, value: c_uint, count: usize) -> CUresult;
}

/// The system's memory, and how often this thread has allocated some.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    ALLOCATED.set(ALLOCATED.get() + 1);
}

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static MEMORY: Counting = Counting;

#[track_caller]
fn good(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// How often this thread allocates memory in so many calls, after a few.
fn allocations(calls: u32, mut call: impl FnMut()) -> u64 {
    (0..10).for_each(|_| call());
    let before = ALLOCATED.get();
    (0..calls).for_each(|_| call());
    ALLOCATED.get() - before
}

#[test]
fn ten_thousand_launches_allocate_nothing() {
    let socket = library::start(1);
    unsafe { std::env::set_var(library::GIVEN, socket) };
    let ptx = CString::new(include_str!(
        "../../../tests/cuda-driver/tests/kernels/order.compute_75.ptx"
    ));
    let (ptx, name) = (ptx.unwrap(), c"twice");
    let (mut context, mut module, mut function) = (null_mut(), null_mut(), null_mut());
    let (mut stream, mut at) = (null_mut(), 0);
    unsafe {
        good(cuInit(0));
        good(cuCtxCreate_v4(&mut context, null_mut(), 0, 0));
        good(cuModuleLoadData(&mut module, ptx.as_ptr().cast()));
        good(cuModuleGetFunction(&mut function, module, name.as_ptr()));
        good(cuStreamCreate(&mut stream, 1));
        good(cuMemAlloc_v2(&mut at, 4));
        good(cuMemsetD32_v2(at, 1, 1));
    }
    let mut count: c_int = 1;
    let mut each = [(&raw mut at).cast(), (&raw mut count).cast::<c_void>()];
    let each = each.as_mut_ptr();
    let plain = || {
        good(unsafe { cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, each, null_mut()) });
    };
    assert_eq!(allocations(10_000, plain), 0);

    let mut attribute: CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    let mut config: CUlaunchConfig = unsafe { std::mem::zeroed() };
    (config.gridDimX, config.gridDimY, config.gridDimZ) = (1, 1, 1);
    (config.blockDimX, config.blockDimY, config.blockDimZ) = (1, 1, 1);
    (config.hStream, config.attrs, config.numAttrs) = (stream, &raw mut attribute, 1);
    let extended =
        || good(unsafe { cuLaunchKernelEx(&raw const config, function, each, null_mut()) });
    assert_eq!(allocations(1000, extended), 0);

    let mut value = 1u32;
    unsafe {
        good(cuStreamSynchronize(stream));
        good(cuMemcpyDtoH_v2((&raw mut value).cast(), at, 4));
    }
    // Doubled more than 32 times: each launch was carried out.
    assert_eq!(value, 0);
}
