//! Common code of all entry points.

use cuda_definition::driver::types::{CUresult, cudaError_enum};
use gantry_client::Driver;
use remoting_proto::apis::cuda::codes;

use crate::{
    idle,
    link::{self, Cuda, Link},
};

/// A result. The error is the number of a `CUresult`.
pub type Outcome<T = ()> = Result<T, i32>;

/// Marks the driver as initialized, for this process and not for its children.
///
/// # Errors
/// There is no memory.
pub fn start() -> Outcome {
    Cuda::connection().start().map_err(|_| codes::OUT_OF_MEMORY)
}

/// Marks the driver as not initialized after all.
pub fn stop() {
    Cuda::connection().stop();
}

/// Whether this process was forked from one that has called `cuInit`: it can call nothing, as
/// natively.
#[inline]
pub fn is_forked() -> bool {
    Cuda::connection().is_forked()
}

/// The connection. Fails if `cuInit` has not been called in this process.
pub fn connected() -> Outcome<&'static Link> {
    if !Cuda::connection().is_started() {
        return Err(codes::NOT_INITIALIZED);
    }
    link::get().ok_or(codes::DEVICE_UNAVAILABLE)
}

/// Converts a result for the caller.
pub fn result(outcome: Outcome) -> CUresult {
    if let Err(code) = outcome
        && code != codes::NOT_READY
    {
        idle::note_failure();
    }
    cudaError_enum(outcome.err().unwrap_or(0).cast_unsigned())
}

/// Runs a call of the program's, unless this process is forked. Nothing, and no lock in particular,
/// precedes the check: other threads of the parent may have held locks.
#[inline]
pub fn run(call: impl FnOnce() -> Outcome) -> CUresult {
    if is_forked() {
        return CUresult::CUDA_ERROR_NOT_INITIALIZED;
    }
    result(call())
}

/// Runs a call that a forked child may make.
#[inline]
pub fn result_of(call: impl FnOnce() -> Outcome) -> CUresult {
    result(call())
}

/// Defines entry points that are written by hand, with the signatures of the API's definition. Those
/// that begin with `everywhere:` need no initialized driver, and work in forked children, too.
macro_rules! entry_points {
    (everywhere: $($functions:tt)*) => {
        $crate::entry::entry_points! { @by $crate::entry::result_of, $($functions)* }
    };
    (fn $($functions:tt)*) => {
        $crate::entry::entry_points! { @by $crate::entry::run, fn $($functions)* }
    };
    (@by $run:path, $(fn $name:ident($($argument:ident: $of:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, clippy::missing_safety_doc)]
        pub unsafe extern "C" fn $name($($argument: $of),*) -> CUresult {
            // SAFETY: callers keep the API's promises about the pointers that they pass, as callers
            // of any C library do.
            $run(|| -> $crate::entry::Outcome { unsafe { $body } })
        }
        const _: cuda_definition::driver::signatures::$name = $name;
    )*};
}
pub(crate) use entry_points;

/// Writes a result.
///
/// # Safety
/// `to` is null or valid for writing.
pub unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes an optional result.
///
/// # Safety
/// As for [`put`].
pub unsafe fn offer<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller's promise.
        unsafe { to.write_unaligned(value) };
    }
}

/// Writes a text with a terminating zero, truncated to fit.
///
/// # Safety
/// There is room for `length` bytes.
pub unsafe fn put_text(to: *mut std::ffi::c_char, length: i32, text: &[u8]) -> Outcome {
    let room = usize::try_from(length).unwrap_or(0);
    if to.is_null() || room == 0 {
        return Err(codes::INVALID_VALUE);
    }
    let bytes = text.len().min(room - 1);
    // SAFETY: the caller's promise.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), bytes);
        to.add(bytes).write(0);
    }
    Ok(())
}
