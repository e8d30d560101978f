//! What the compiler's host code calls: registration before `main`, and `<<<...>>>`.

use std::{
    cell::RefCell,
    ffi::{c_char, c_int, c_uint, c_void},
    mem::ManuallyDrop,
    ptr::null_mut,
    sync::Arc,
};

use cuda_definition::runtime::{signatures, types::*};

use crate::{
    api::{entry_points, put, run},
    context,
    driver::is_forked,
    error::Error,
    registry::{self, Binary},
};

/// The header of each image in a program: `__fatBinC_Wrapper_t` of `fatbinary_section.h`.
#[repr(C)]
struct Wrapper {
    magic: u32,
    version: u32,
    data: *const c_void,
    /// A file name, or images that were linked before: not used here.
    _more: *const c_void,
}

const MAGIC: u32 = 0x4662_43b1;

/// A launch that has begun: `kernel<<<grid, block, shared, stream>>>`.
struct Configuration {
    grid: dim3,
    block: dim3,
    shared: usize,
    stream: cudaStream_t,
}

thread_local! {
    // Without a destructor: programs may launch kernels while they exit.
    static CONFIGURATIONS: RefCell<ManuallyDrop<Vec<Configuration>>> =
        const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// The image of a handle, which is of use in this process.
///
/// # Safety
/// The handle was returned by `__cudaRegisterFatBinary` and has not been unregistered.
unsafe fn binary(handle: *mut *mut c_void) -> Option<Arc<Binary>> {
    let known = handle.cast::<Binary>().cast_const();
    // A child of a process that uses the runtime needs no images, and must not wait for the registry.
    if known.is_null() || is_forked() {
        return None;
    }
    // SAFETY: the caller's promise; the handle keeps its own reference.
    unsafe {
        Arc::increment_strong_count(known);
        Some(Arc::from_raw(known))
    }
}

/// Registers an image.
///
/// # Safety
/// It points to what the compiler has generated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterFatBinary(fatCubin: *mut c_void) -> *mut *mut c_void {
    if fatCubin.is_null() {
        return null_mut();
    }
    // SAFETY: the caller's promise.
    let wrapper = unsafe { fatCubin.cast::<Wrapper>().read() };
    let image = match (wrapper.magic, wrapper.version) {
        (MAGIC, 1 | 2) => wrapper.data,
        // Some other image: the driver accepts it, or reports that it does not.
        _ => fatCubin.cast_const(),
    };
    Arc::into_raw(Binary::new(image)).cast_mut().cast()
}
const _: signatures::__cudaRegisterFatBinary = __cudaRegisterFatBinary;

/// Called when everything in an image is registered. Nothing to do.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_fatCubinHandle: *mut *mut c_void) {}
const _: signatures::__cudaRegisterFatBinaryEnd = __cudaRegisterFatBinaryEnd;

/// Unregisters an image.
///
/// # Safety
/// It was registered and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaUnregisterFatBinary(fatCubinHandle: *mut *mut c_void) {
    // In a child, programs that exit unregister what is their parent's.
    if !fatCubinHandle.is_null() && !is_forked() {
        // SAFETY: the caller's promise.
        let binary = unsafe { Arc::from_raw(fatCubinHandle.cast::<Binary>().cast_const()) };
        binary.forget();
    }
}
const _: signatures::__cudaUnregisterFatBinary = __cudaUnregisterFatBinary;

/// Registers a kernel.
///
/// # Safety
/// The image is registered, and the name exists as long as the image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterFunction(
    fatCubinHandle: *mut *mut c_void,
    hostFun: *const c_char,
    deviceFun: *mut c_char,
    deviceName: *const c_char,
    _thread_limit: c_int,
    _tid: *mut uint3,
    _bid: *mut uint3,
    _bDim: *mut dim3,
    _gDim: *mut dim3,
    _wSize: *mut c_int,
) {
    let name = if deviceName.is_null() {
        deviceFun.cast_const()
    } else {
        deviceName
    };
    // SAFETY: the caller's promise.
    if let Some(binary) = unsafe { binary(fatCubinHandle) } {
        registry::add_function(&binary, hostFun.cast(), name);
    }
}
const _: signatures::__cudaRegisterFunction = __cudaRegisterFunction;

/// Registers a variable.
///
/// # Safety
/// As for [`__cudaRegisterFunction`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterVar(
    fatCubinHandle: *mut *mut c_void,
    hostVar: *mut c_char,
    _deviceAddress: *mut c_char,
    deviceName: *const c_char,
    _ext: c_int,
    size: usize,
    _constant: c_int,
    _global: c_int,
) {
    // SAFETY: the caller's promise.
    if let Some(binary) = unsafe { binary(fatCubinHandle) } {
        registry::add_variable(&binary, hostVar.cast(), deviceName, size, None);
    }
}
const _: signatures::__cudaRegisterVar = __cudaRegisterVar;

/// Registers a managed variable. The program uses it through a pointer, which is set when the image
/// is loaded.
///
/// # Safety
/// As for [`__cudaRegisterFunction`]; the pointer exists as long as the image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterManagedVar(
    fatCubinHandle: *mut *mut c_void,
    hostVarPtrAddress: *mut *mut c_void,
    _deviceAddress: *mut c_char,
    deviceName: *const c_char,
    _ext: c_int,
    size: usize,
    _constant: c_int,
    _global: c_int,
) {
    // SAFETY: the caller's promise.
    if let Some(binary) = unsafe { binary(fatCubinHandle) } {
        let place = hostVarPtrAddress.cast();
        registry::add_variable(&binary, place, deviceName, size, Some(place));
    }
}
const _: signatures::__cudaRegisterManagedVar = __cudaRegisterManagedVar;

/// Loads an image, because the program is about to use a managed variable of it. Returns nonzero on
/// success.
///
/// # Safety
/// The image is registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaInitModule(fatCubinHandle: *mut *mut c_void) -> c_char {
    // SAFETY: the caller's promise.
    let answer = run(|| match unsafe { binary(fatCubinHandle) } {
        Some(binary) => binary.initialise(),
        None => Err(Error::cudaErrorInvalidResourceHandle),
    });
    c_char::from(answer == Error::cudaSuccess)
}
const _: signatures::__cudaInitModule = __cudaInitModule;

/// Begins a launch.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    gridDim: dim3,
    blockDim: dim3,
    sharedMem: usize,
    stream: *mut CUstream_st,
) -> c_uint {
    let configuration = Configuration {
        grid: gridDim,
        block: blockDim,
        shared: sharedMem,
        stream,
    };
    CONFIGURATIONS.with_borrow_mut(|all| all.push(configuration));
    0
}
const _: signatures::__cudaPushCallConfiguration = __cudaPushCallConfiguration;

entry_points! {
    fn __cudaPopCallConfiguration(
        gridDim: *mut dim3,
        blockDim: *mut dim3,
        sharedMem: *mut usize,
        stream: *mut c_void,
    ) {
        let last = CONFIGURATIONS.with_borrow_mut(|all| all.pop());
        let last = last.ok_or(Error::cudaErrorMissingConfiguration)?;
        put(gridDim, last.grid)?;
        put(blockDim, last.block)?;
        put(sharedMem, last.shared)?;
        put(stream.cast::<cudaStream_t>(), last.stream)
    }

    fn __cudaGetKernel(kernel: *mut cudaKernel_t, host: *const c_void) {
        context::ready()?;
        put(kernel, registry::kernel(host)?.cast())
    }

    fn cudaGetKernel(kernelPtr: *mut cudaKernel_t, entryFuncAddr: *const c_void) {
        context::ready()?;
        put(kernelPtr, registry::kernel(entryFuncAddr)?.cast())
    }
}
