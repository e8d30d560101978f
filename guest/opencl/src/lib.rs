//! An OpenCL driver for the host's devices.
//!
//! It has the form that the ecosystem expects: an installable client driver (ICD) that the loader
//! `libOpenCL.so.1` finds through a file in `/etc/OpenCL/vendors`, alongside any other drivers.
//! Each call becomes a message to a worker process ([`remoting_proto::apis`]). The driver does not wait
//! for commands, for new buffers and samplers, or for values of an argument if the host's driver
//! has accepted a similar value before. It waits for calls that return data, for new contexts,
//! queues, images, programs and kernels, and for the first value of an argument: these calls must
//! return the reason for a failure themselves, which only the host's driver knows.
//!
//! `GANTRY_OPENCL` is the path of the workers' socket, an [`Address`] where they are reached
//! through a stream, or `messages:` followed by the socket of `gantry-accel passive`, to which
//! calls are delegated. `off` disables the driver. `gate` reports why there is no exitless gate; a
//! gate is used in any case if there is one. `GANTRY_OPENCL_SPIN` is how long a waiting call polls
//! before it sleeps, in microseconds.
//!
//! [`Address`]: remoting_stream::address::Address
//!
//! - `table`: the dispatch table, and the state of each entry point
//! - `link`: OpenCL's own part of the connection; the connection itself is [`gantry_client`]'s,
//!   which describes the path of a call and its data
//! - `svm`: memory whose addresses mean the same to the device
//! - `include`: headers that are sent along with sources
//! - `told`: what the application has been told about its devices, which another device may lack
//! - `abi`: what C programs pass; `object`: handles and reference counts
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

/// The loader's entry point.
#[unsafe(no_mangle)]
pub extern "C" fn clGetExtensionFunctionAddress(name: *const c_char) -> *mut c_void {
    platform::clGetExtensionFunctionAddress(name)
}

/// Returns the platforms.
#[unsafe(no_mangle)]
pub extern "C" fn clIcdGetPlatformIDsKHR(
    count: u32,
    platforms: *mut *mut c_void,
    count_ret: *mut u32,
) -> i32 {
    platform::clIcdGetPlatformIDsKHR(count, platforms.cast(), count_ret)
}

/// Returns information about a platform.
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
