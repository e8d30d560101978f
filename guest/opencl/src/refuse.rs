//! What is not offered.

use std::{ffi::c_void, ptr::null_mut};

use gantry_remoting::opencl::codes;

use crate::{
    abi::set,
    object::{Context, Handle, Mem},
};

/// For entry points whose result is a code. Arguments are not looked at.
pub extern "C" fn refused() -> i32 {
    codes::INVALID_OPERATION
}

/// For entry points whose result is a pointer.
pub extern "C" fn null() -> *mut c_void {
    null_mut()
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
