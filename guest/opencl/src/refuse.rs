//! Features that are not offered: every function here only refuses.

use std::{ffi::c_void, ptr::null_mut};

use remoting_proto::apis::opencl::codes;

use crate::{
    abi::{code, set},
    object::{Context, Device, Handle, Mem, Program, Queue, get},
};

/// For entry points that return a code. Arguments are not examined.
pub extern "C" fn refused() -> i32 {
    codes::INVALID_OPERATION
}

macro_rules! creations {
    ($($(#[$meta:meta])* $name:ident($($unused:ty),*) $code:ident;)*) => {$(
        $(#[$meta])*
        pub extern "C" fn $name($(_: $unused,)* errcode_ret: *mut i32) -> *mut c_void {
            set(errcode_ret, codes::$code);
            null_mut()
        }
    )*};
}

// For entry points that create an object from another API's. Their arguments are not examined; only
// the number of arguments before the last one matters, which is the pointer for the code.
creations! {
    /// OpenGL: no context is created from one of its contexts.
    gl_3(usize, usize) INVALID_CONTEXT;
    /// The same.
    gl_4(usize, usize, usize) INVALID_CONTEXT;
    /// The same.
    gl_6(usize, usize, usize, usize, usize) INVALID_CONTEXT;
    /// Other APIs.
    foreign_4(usize, usize, usize) INVALID_OPERATION;
    /// The same.
    foreign_5(usize, usize, usize, usize) INVALID_OPERATION;
    /// The same.
    foreign_6(usize, usize, usize, usize, usize) INVALID_OPERATION;
}

/// No buffer or image has an OpenGL object.
pub extern "C" fn gl_object(mem: Handle<Mem>) -> i32 {
    code(|| {
        get(mem)?;
        Err(codes::INVALID_GL_OBJECT)
    })
}

/// No queue's context is created from an OpenGL context.
pub extern "C" fn gl_queue(queue: Handle<Queue>) -> i32 {
    code(|| {
        get(queue)?;
        Err(codes::INVALID_CONTEXT)
    })
}

/// Devices report that they have no pipes.
pub extern "C" fn clCreatePipe(
    _: Handle<Context>,
    _: u64,
    _: u32,
    _: u32,
    _: *const isize,
    errcode_ret: *mut i32,
) -> Handle<Mem> {
    set(errcode_ret, codes::INVALID_OPERATION);
    null_mut()
}

/// The object in question is not a pipe, since there are none.
pub extern "C" fn clGetPipeInfo() -> i32 {
    codes::INVALID_MEM_OBJECT
}

/// Withdrawn after OpenCL 1.0: "a device that does not support changing it returns this code".
pub extern "C" fn clSetCommandQueueProperty(
    queue: Handle<Queue>,
    _: u64,
    _: u32,
    old: *mut u64,
) -> i32 {
    code(|| {
        set(old, get(queue)?.it.properties);
        Err(codes::INVALID_OPERATION)
    })
}

/// This driver has no device-side queues.
pub extern "C" fn clSetDefaultDeviceCommandQueue(
    context: Handle<Context>,
    device: Handle<Device>,
    queue: Handle<Queue>,
) -> i32 {
    code(|| {
        get(context)?;
        get(device)?;
        get(queue)?;
        Err(codes::INVALID_OPERATION)
    })
}

/// Deprecated since OpenCL 2.2; refused by devices without global constructors.
pub extern "C" fn clSetProgramReleaseCallback(
    program: Handle<Program>,
    _: *const c_void,
    _: *mut c_void,
) -> i32 {
    code(|| {
        get(program)?;
        Err(codes::INVALID_OPERATION)
    })
}
