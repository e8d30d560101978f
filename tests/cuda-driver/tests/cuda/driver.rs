//! The few calls that all tests make to whichever library this program tests.

use std::{
    ffi::{CString, c_void},
    ptr::null_mut,
    sync::{Mutex, MutexGuard, PoisonError},
};

use cuda_definition::driver::types::*;

/// Calls a function by its symbol, with the signature from the definition.
macro_rules! cuda {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the signature is the definition's; tests pass what the function requires.
        #[allow(unused_unsafe)]
        unsafe {
            let function = $crate::library::library()
                .get::<cuda_definition::driver::signatures::$name>(stringify!($name).as_bytes())
                .expect("it is exported");
            function($($argument),*)
        }
    }};
}
pub(crate) use cuda;

/// Like `cuda!`, but the call must succeed.
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let result = $crate::driver::cuda!($name($($argument),*));
        assert_eq!(result, CUresult::CUDA_SUCCESS, "{}", $crate::driver::name_of(result));
    }};
}
pub(crate) use ok;

pub fn name_of(result: CUresult) -> &'static str {
    let found = CUresult::NAMES.iter().find(|(_, known)| *known == result);
    found.map_or("an unknown error", |(name, _)| name)
}

/// A test's own context, current in its thread.
pub struct Own(CUcontext, #[allow(dead_code)] crate::library::Turn);

pub fn context() -> Own {
    let turn = crate::library::turn();
    ok!(cuInit(0));
    let mut context = null_mut();
    ok!(cuCtxCreate_v4(&mut context, null_mut(), 0, 0));
    Own(context, turn)
}

impl Own {
    pub fn handle(&self) -> CUcontext {
        self.0
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        cuda!(cuCtxDestroy_v2(self.0));
    }
}

/// Held by tests that look at state shared by all contexts.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn module(ptx: &str) -> CUmodule {
    let ptx = CString::new(ptx).expect("PTX has no zero byte");
    let mut module = null_mut();
    ok!(cuModuleLoadData(&mut module, ptx.as_ptr().cast()));
    module
}

pub fn function(module: CUmodule, name: &str) -> CUfunction {
    let name = CString::new(name).expect("names have no zero byte");
    let mut function = null_mut();
    ok!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

/// A stream with these flags.
pub fn stream(flags: u32) -> CUstream {
    let mut stream = null_mut();
    ok!(cuStreamCreate(&mut stream, flags));
    stream
}

pub fn current() -> CUcontext {
    let mut current = null_mut();
    ok!(cuCtxGetCurrent(&mut current));
    current
}

/// An empty graph.
pub fn graph() -> CUgraph {
    let mut graph = null_mut();
    ok!(cuGraphCreate(&mut graph, 0));
    graph
}

pub fn instance(graph: CUgraph) -> CUgraphExec {
    let mut executable = null_mut();
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    executable
}

/// Begins a capture in a stream, beside which anything may be called.
pub fn begin_capture(stream: CUstream) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    ok!(cuStreamBeginCapture_v2(stream, mode));
}

pub fn end_capture(stream: CUstream) -> CUgraph {
    let mut graph = null_mut();
    ok!(cuStreamEndCapture(stream, &mut graph));
    graph
}

/// Allocates device memory with these values.
pub fn device<T: Copy>(values: &[T]) -> CUdeviceptr {
    let mut at = 0;
    ok!(cuMemAlloc_v2(&mut at, size_of_val(values)));
    ok!(cuMemcpyHtoD_v2(
        at,
        values.as_ptr().cast(),
        size_of_val(values)
    ));
    at
}

/// Reads values from device memory.
pub fn values<T: Copy + Default>(at: CUdeviceptr, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    ok!(cuMemcpyDtoH_v2(
        values.as_mut_ptr().cast(),
        at,
        size_of_val(values.as_slice())
    ));
    values
}

/// The address of an argument, as a launch expects it.
pub fn argument<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Launches a kernel into a stream, and returns the result.
pub fn launch(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: CUstream,
    arguments: &[*mut c_void],
) -> CUresult {
    let mut arguments = arguments.to_vec();
    cuda!(cuLaunchKernel(
        function,
        grid[0],
        grid[1],
        grid[2],
        block[0],
        block[1],
        block[2],
        shared,
        stream,
        arguments.as_mut_ptr(),
        null_mut(),
    ))
}

/// Launches a kernel in the default stream; this must succeed.
pub fn run(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    arguments: &[*mut c_void],
) {
    let result = launch(function, grid, block, shared, null_mut(), arguments);
    assert_eq!(result, CUresult::CUDA_SUCCESS, "{}", name_of(result));
    ok!(cuCtxSynchronize());
}
