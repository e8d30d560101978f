//! What is not offered: nothing here does anything but refuse.

use std::{ffi::c_void, ptr::null_mut};

use gantry_remoting::apis::opencl::codes;

use crate::{
    abi::{code, set},
    object::{Context, Device, Handle, Mem, Program, Queue, get},
};

/// For entry points whose result is a code. Arguments are not looked at.
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

// For entry points that make something of another API's object. What they are called with is not
// looked at; what counts is how many arguments stand before the last, where the code goes.
creations! {
    /// Of OpenGL: no context is created from one of its.
    gl_3(usize, usize) INVALID_CONTEXT;
    /// The same.
    gl_4(usize, usize, usize) INVALID_CONTEXT;
    /// The same.
    gl_6(usize, usize, usize, usize, usize) INVALID_CONTEXT;
    /// Of other APIs.
    foreign_4(usize, usize, usize) INVALID_OPERATION;
    /// The same.
    foreign_5(usize, usize, usize, usize) INVALID_OPERATION;
    /// The same.
    foreign_6(usize, usize, usize, usize, usize) INVALID_OPERATION;
}

/// No buffer or image has an OpenGL object.
pub extern "C" fn gl_object(mem: Handle<Mem>) -> i32 {
    code((|| {
        get(mem)?;
        Err(codes::INVALID_GL_OBJECT)
    })())
}

/// No queue's context is created from an OpenGL context.
pub extern "C" fn gl_queue(queue: Handle<Queue>) -> i32 {
    code((|| {
        get(queue)?;
        Err(codes::INVALID_CONTEXT)
    })())
}

/// Devices say that they have no pipes.
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

/// What is asked about is no pipe, whatever it is: there are none.
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
    code((|| {
        set(old, get(queue)?.it.properties);
        Err(codes::INVALID_OPERATION)
    })())
}

/// No queue of this driver is on a device.
pub extern "C" fn clSetDefaultDeviceCommandQueue(
    context: Handle<Context>,
    device: Handle<Device>,
    queue: Handle<Queue>,
) -> i32 {
    code((|| {
        get(context)?;
        get(device)?;
        get(queue)?;
        Err(codes::INVALID_OPERATION)
    })())
}

/// Deprecated with OpenCL 2.2; devices without global constructors refuse it.
pub extern "C" fn clSetProgramReleaseCallback(
    program: Handle<Program>,
    _: *const c_void,
    _: *mut c_void,
) -> i32 {
    code((|| {
        get(program)?;
        Err(codes::INVALID_OPERATION)
    })())
}
