//! Like [`null`](super::null), with handles that carry their kind: passing a handle of another
//! kind, or a number that is not a handle, ends the process. Fuzzers need this, because they would
//! not notice otherwise: a real driver takes one object for another.
//!
//! The kind that a function expects is derived from its argument names, which are the
//! specification's. A kernel has one argument of each kind.

use std::{
    cell::Cell,
    ffi::{c_char, c_void},
    sync::atomic::{AtomicUsize, Ordering},
};

use remoting_proto::apis::opencl::codes;

use super::{
    null::Argument,
    types::{ContextCallback, EventCallback, Handle, ImageDesc, ImageFormat, MemCallback},
};

/// The kind of a handle, stored in its upper half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum HandleType {
    Platform = 1,
    Device,
    Context,
    Queue,
    Mem,
    Sampler,
    Program,
    Kernel,
    Event,
}

const SHIFT: u32 = 40;

impl HandleType {
    /// The kind of an argument.
    fn of(argument: &str) -> Option<Self> {
        Some(match argument {
            "platform" | "platforms" => Self::Platform,
            "device" | "devices" | "device_list" | "out_devices" => Self::Device,
            "context" => Self::Context,
            "command_queue" => Self::Queue,
            "memobj" | "buffer" | "image" | "src_buffer" | "dst_buffer" | "src_image"
            | "dst_image" | "mem_objects" => Self::Mem,
            "sampler" => Self::Sampler,
            "program" | "input_programs" | "input_headers" => Self::Program,
            "kernel" | "source_kernel" => Self::Kernel,
            "event" | "event_list" | "event_wait_list" => Self::Event,
            _ => return None,
        })
    }

    /// The kind of a function's result.
    fn returned(function: &str) -> Option<Self> {
        Some(match function {
            "clCreateContext" => Self::Context,
            "clCreateBuffer" | "clCreateSubBuffer" | "clCreateImage" => Self::Mem,
            "clCreateSampler" => Self::Sampler,
            "clCreateKernel" | "clCloneKernel" => Self::Kernel,
            "clCreateUserEvent" => Self::Event,
            "clLinkProgram" => Self::Program,
            _ if function.starts_with("clCreateCommandQueue") => Self::Queue,
            _ if function.starts_with("clCreateProgram") => Self::Program,
            _ => return None,
        })
    }

    /// Makes a new handle.
    fn handle(self) -> Handle {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed) % (1 << 20) + 1;
        (self as usize) << SHIFT | number
    }

    /// Whether a handle is of this kind. Null is valid for any.
    fn has(self, handle: Handle) -> bool {
        handle == 0 || handle >> SHIFT == self as usize
    }

    fn check(self, handle: Handle) {
        assert!(self.has(handle), "{handle:#x} is passed for a {self:?}");
    }
}

thread_local! {
    /// Length of the array that is passed next.
    static COUNT: Cell<u32> = const { Cell::new(0) };
}

/// An argument, identified by its name.
pub trait Pass {
    /// Checks the argument, or writes a result to it.
    ///
    /// # Safety
    /// If it is a pointer, it is null or points to the number of elements given before.
    unsafe fn pass(self, name: &str);
}

impl Pass for Handle {
    unsafe fn pass(self, name: &str) {
        if let Some(kind) = HandleType::of(name) {
            kind.check(self);
        }
    }
}

impl Pass for u32 {
    unsafe fn pass(self, name: &str) {
        if name.starts_with("num_") {
            COUNT.set(self);
        }
    }
}

impl Pass for *const Handle {
    unsafe fn pass(self, name: &str) {
        if let Some(kind) = HandleType::of(name).filter(|_| !self.is_null()) {
            for at in 0..COUNT.get() as usize {
                // SAFETY: the caller's promise.
                kind.check(unsafe { self.add(at).read() });
            }
        }
    }
}

impl Pass for *mut Handle {
    unsafe fn pass(self, name: &str) {
        match HandleType::of(name) {
            // SAFETY: the caller's promise.
            Some(kind) if !self.is_null() => unsafe { self.write(kind.handle()) },
            Some(_) => {}
            // The result is a size.
            // SAFETY: as above.
            None => unsafe { self.tell() },
        }
    }
}

macro_rules! as_null {
    ($($type:ty)*) => {$(
        impl Pass for $type {
            unsafe fn pass(self, _: &str) {
                // SAFETY: the caller's promise.
                unsafe { self.tell() }
            }
        }
    )*};
}

as_null! {
    i32 u64
    *mut u32 *mut i32 *mut u64
    *const isize *const u64 *const u8 *const *const u8
    *const c_char *const *const c_char
    *const c_void *mut c_void *const *const c_void
    *const ImageFormat *mut ImageFormat *const ImageDesc
    Option<ContextCallback> Option<MemCallback> Option<EventCallback>
}

/// A function's result, by its name.
pub trait Give {
    /// Success.
    fn give(function: &str) -> Self;
}

impl Give for i32 {
    fn give(_: &str) -> Self {
        0
    }
}

impl Give for () {
    fn give(_: &str) -> Self {}
}

impl Give for *mut c_void {
    fn give(_: &str) -> Self {
        std::ptr::null_mut()
    }
}

impl Give for Handle {
    fn give(function: &str) -> Self {
        HandleType::returned(function).map_or(1, HandleType::handle)
    }
}

/// The arguments of every kernel: address space and type name.
const ARGUMENTS: [(u32, &[u8]); 6] = [
    (codes::KERNEL_ARG_ADDRESS_GLOBAL, b"float*\0"),
    (codes::KERNEL_ARG_ADDRESS_GLOBAL, b"image2d_t\0"),
    (codes::KERNEL_ARG_ADDRESS_PRIVATE, b"sampler_t\0"),
    (codes::KERNEL_ARG_ADDRESS_PRIVATE, b"ulong\0"),
    (codes::KERNEL_ARG_ADDRESS_LOCAL, b"float*\0"),
    (codes::KERNEL_ARG_ADDRESS_PRIVATE, b"queue_t\0"),
];

/// `clGetKernelInfo`: only the number of arguments.
///
/// # Safety
/// As in the specification.
pub unsafe extern "C" fn kernel_info(
    kernel: Handle,
    name: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    HandleType::Kernel.check(kernel);
    // SAFETY: the caller guarantees `size` bytes, or null.
    unsafe {
        if name == codes::KERNEL_NUM_ARGS && size >= size_of::<u32>() && !value.is_null() {
            value.cast::<u32>().write_unaligned(ARGUMENTS.len() as u32);
        }
        size_ret.tell();
    }
    0
}

/// `clGetKernelArgInfo`: address spaces and types.
///
/// # Safety
/// As in the specification.
pub unsafe extern "C" fn argument_info(
    kernel: Handle,
    index: u32,
    name: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    HandleType::Kernel.check(kernel);
    let Some((space, kind)) = ARGUMENTS.get(index as usize) else {
        return codes::INVALID_ARG_INDEX;
    };
    let space = space.to_ne_bytes();
    let told = match name {
        codes::KERNEL_ARG_ADDRESS_QUALIFIER => &space[..],
        codes::KERNEL_ARG_TYPE_NAME => kind,
        _ => &[],
    };
    // SAFETY: the caller guarantees `size` bytes, or null.
    unsafe {
        if size >= told.len() && !value.is_null() {
            value.cast::<u8>().copy_from(told.as_ptr(), told.len());
        }
        size_ret.tell();
    }
    0
}

/// `clSetKernelArg`.
///
/// # Safety
/// As in the specification.
pub unsafe extern "C" fn set_argument(
    kernel: Handle,
    index: u32,
    size: usize,
    value: *const c_void,
) -> i32 {
    HandleType::Kernel.check(kernel);
    let kind = match index {
        0 | 1 => HandleType::Mem,
        2 => HandleType::Sampler,
        3 | 4 => return 0,
        5 => panic!("a device's queue, which no application has"),
        _ => return codes::INVALID_ARG_INDEX,
    };
    assert_eq!(size, size_of::<Handle>());
    if !value.is_null() {
        // SAFETY: the caller guarantees that the value has the size passed beside it.
        kind.check(unsafe { value.cast::<Handle>().read_unaligned() });
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_told_from_those_of_other_kinds() {
        let sampler = HandleType::returned("clCreateSampler").unwrap().handle();
        assert!(HandleType::of("sampler").unwrap().has(sampler));
        for other in ["memobj", "kernel", "event_wait_list", "context"] {
            assert!(!HandleType::of(other).unwrap().has(sampler), "{other}");
        }
        assert!(!HandleType::Sampler.has(7), "a number that is no handle");
        assert!(HandleType::of("offset").is_none(), "a size");
    }
}
