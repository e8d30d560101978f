//! Types of OpenCL, with handles as plain numbers.

use std::ffi::{c_char, c_void};

pub use remoting_proto::apis::opencl::image::{ImageDesc, ImageFormat};

/// An object of the driver.
pub type Handle = usize;

/// `clCreateContext`'s callback.
pub type ContextCallback = unsafe extern "C" fn(*const c_char, *const c_void, usize, *mut c_void);

/// A callback about a buffer or image.
pub type MemCallback = unsafe extern "C" fn(Handle, *mut c_void);

/// A callback about a program.
pub type ProgramCallback = unsafe extern "C" fn(Handle, *mut c_void);

/// A callback about an event.
pub type EventCallback = unsafe extern "C" fn(Handle, i32, *mut c_void);

/// `clGet...Info` of most kinds of objects.
pub type Info = unsafe extern "C" fn(Handle, u32, usize, *mut c_void, *mut usize) -> i32;

/// `clBuildProgram`.
#[cfg(test)]
pub(crate) type Build = unsafe extern "C" fn(
    Handle,
    u32,
    *const Handle,
    *const c_char,
    Option<ProgramCallback>,
    *mut c_void,
) -> i32;

/// `clSetKernelArg`.
pub type SetArgument = unsafe extern "C" fn(Handle, u32, usize, *const c_void) -> i32;
