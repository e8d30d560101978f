//! An OpenCL driver whose devices are those of the host.
//!
//! It has the form that the ecosystem expects: an installable client driver (ICD) that the loader
//! `libOpenCL.so.1` finds by a file in `/etc/OpenCL/vendors`, beside whatever other drivers there
//! are. Each call becomes a message to a worker process ([`gantry_remoting`]). Not waited for are
//! commands, new buffers and samplers, and values of an argument of which the host's driver has
//! taken one like it before. What returns data waits, and so do new contexts, queues, images,
//! programs and kernels and the first value of an argument: the call itself has to return why there
//! is none, and only the host's driver knows.
//!
//! `GANTRY_OPENCL` names the socket of the workers, an [`Address`] where they are reached by a
//! stream, or `messages:` and the socket of `gantry-accel passive`, to which calls are delegated; or
//! is `off`, or `gate` for who wants to hear why there is no exitless gate, which is used anyhow
//! where there is one. `GANTRY_OPENCL_SPIN` is the time in microseconds that a waiting call polls before it
//! sleeps.
//!
//! [`Address`]: gantry_remoting::link::stream::address::Address
//!
//! - `table`: the dispatch table, and what becomes of each entry point
//! - `link`: OpenCL's own part of the connection, which is [`gantry_client`]'s: there is the way of
//!   a call, and of its data
//! - `svm`: memory whose addresses mean the same to the device
//! - `include`: headers that travel with sources
//! - `told`: what the application has been told of its devices, and another one may lack
//! - `abi`: what C programs hand over; `object`: handles and reference counts
//! - the others: entry points by subject

#![allow(missing_docs, non_snake_case, clippy::too_many_arguments)]

mod abi;
mod command;
mod context;
mod event;
mod include;
mod link;
mod mapping;
mod memory;
mod object;
mod platform;
mod program;
mod refuse;
mod svm;
mod table;
#[cfg(test)]
mod testing;
mod told;
mod transfer;

use std::ffi::{c_char, c_void};

/// Where the loader starts.
#[unsafe(no_mangle)]
pub extern "C" fn clGetExtensionFunctionAddress(name: *const c_char) -> *mut c_void {
    platform::clGetExtensionFunctionAddress(name)
}

/// The platforms.
#[unsafe(no_mangle)]
pub extern "C" fn clIcdGetPlatformIDsKHR(
    count: u32,
    platforms: *mut *mut c_void,
    count_ret: *mut u32,
) -> i32 {
    platform::clIcdGetPlatformIDsKHR(count, platforms.cast(), count_ret)
}

/// What a platform says of itself.
#[unsafe(no_mangle)]
pub extern "C" fn clGetPlatformInfo(
    platform: *mut c_void,
    name: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    platform::clGetPlatformInfo(platform.cast(), name, size, value, size_ret)
}
