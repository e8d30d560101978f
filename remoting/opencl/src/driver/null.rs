//! An OpenCL driver that does nothing, synchronously and successfully, for tests of the code in
//! front of it.
//!
//! Every function succeeds. Handles and counts are written where the caller expects some. Memory
//! whose size only other arguments tell (parameter values, contents) is left alone, as are all
//! buffers. Shared virtual memory has addresses and nothing else. Callbacks about events and
//! objects are called before their registration returns.

use std::{
    ffi::{c_char, c_void},
    sync::atomic::{AtomicUsize, Ordering},
};

use remoting_proto::apis::opencl::codes;

use super::types::{ContextCallback, EventCallback, Handle, ImageDesc, ImageFormat, MemCallback};

/// Makes a handle: never 0, and small enough to be a size as well.
fn some() -> Handle {
    static LAST: AtomicUsize = AtomicUsize::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) % 4096 + 1
}

/// An argument: if it points to where a caller expects a result, a result is written.
pub trait Argument {
    /// Writes the result for the caller.
    ///
    /// # Safety
    /// If it is a pointer to one handle or number, it is null or writable.
    unsafe fn tell(self);
}

macro_rules! told {
    ($($type:ty: $value:expr;)*) => {$(
        impl Argument for $type {
            unsafe fn tell(self) {
                if !self.is_null() {
                    // SAFETY: the caller's promise.
                    unsafe { self.write($value) };
                }
            }
        }
    )*};
}

macro_rules! ignored {
    ($($type:ty)*) => {$(
        impl Argument for $type {
            unsafe fn tell(self) {}
        }
    )*};
}

told! {
    *mut Handle: some();
    *mut u32: 1;
    *mut i32: 0;
    *mut u64: 1;
}

ignored! {
    i32 u32 u64 usize
    *const usize *const isize *const u64 *const u8 *const *const u8
    *const c_char *const *const c_char
    *const c_void *mut c_void *const *const c_void
    *const ImageFormat *mut ImageFormat *const ImageDesc
    Option<ContextCallback> Option<MemCallback> Option<EventCallback>
}

/// The result of a function.
pub trait Outcome {
    /// Success.
    fn success() -> Self;
}

impl Outcome for i32 {
    fn success() -> Self {
        0
    }
}

impl Outcome for Handle {
    fn success() -> Self {
        some()
    }
}

impl Outcome for () {
    fn success() -> Self {}
}

impl Outcome for *mut c_void {
    fn success() -> Self {
        std::ptr::null_mut()
    }
}

/// `clGetPlatformInfo`: only a version.
///
/// # Safety
/// As in the specification.
pub unsafe extern "C" fn platform_info(
    _: Handle,
    name: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    const VERSION: &[u8] = b"OpenCL 3.0 null\0";
    // SAFETY: the caller guarantees `size` bytes, or null.
    unsafe {
        if name == codes::PLATFORM_VERSION && size >= VERSION.len() && !value.is_null() {
            value
                .cast::<u8>()
                .copy_from_nonoverlapping(VERSION.as_ptr(), VERSION.len());
        }
        size_ret.tell();
    }
    0
}

/// `clGetDeviceInfo`: a device with coarse-grained shared virtual memory, and nothing else.
///
/// # Safety
/// As in the specification.
pub unsafe extern "C" fn device_info(
    _: Handle,
    name: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    // SAFETY: the caller guarantees `size` bytes, and a number or null.
    unsafe {
        if name == codes::DEVICE_SVM_CAPABILITIES && size == size_of::<u64>() && !value.is_null() {
            let value = value.cast::<u64>();
            value.write_unaligned(codes::DEVICE_SVM_COARSE_GRAIN_BUFFER);
        }
        size_ret.tell();
    }
    0
}

/// `clSVMAlloc`: addresses without memory behind them. They are unique, and not aligned.
///
/// # Safety
/// None is needed.
pub unsafe extern "C" fn svm_alloc(_: Handle, _: u64, size: usize, _: u32) -> *mut c_void {
    static NEXT: AtomicUsize = AtomicUsize::new((1 << 40) + 64);
    if size > 1 << 20 {
        return std::ptr::null_mut();
    }
    NEXT.fetch_add(size.next_multiple_of(64), Ordering::Relaxed) as *mut c_void
}

/// `clSetEventCallback`.
///
/// # Safety
/// As in the specification.
pub unsafe extern "C" fn set_event_callback(
    event: Handle,
    at: i32,
    notify: Option<EventCallback>,
    data: *mut c_void,
) -> i32 {
    if let Some(notify) = notify {
        // SAFETY: calls the caller's callback with the caller's data, once.
        unsafe { notify(event, at, data) };
    }
    0
}

/// `clSetMemObjectDestructorCallback`.
///
/// # Safety
/// As in the specification.
pub unsafe extern "C" fn set_mem_callback(
    mem: Handle,
    notify: Option<MemCallback>,
    data: *mut c_void,
) -> i32 {
    if let Some(notify) = notify {
        // SAFETY: as above.
        unsafe { notify(mem, data) };
    }
    0
}
