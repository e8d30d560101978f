//! Common code of all entry points.

use std::ffi::c_char;

use cuda_definition::{
    driver::types::CUstream,
    runtime::types::{cudaError_t, cudaStream_t},
};

use crate::{
    driver::is_forked,
    error::{Answer, Error, result},
};

/// The stream that a null stream handle denotes in an entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The stream that all threads share.
    Legacy,
    /// The thread's own stream, in symbols that end in `_ptds` or `_ptsz`.
    PerThread,
}

/// `cudaStreamPerThread`
const PER_THREAD: usize = 2;

impl Base {
    /// Converts a stream for the driver.
    pub fn stream(self, stream: cudaStream_t) -> CUstream {
        match self {
            Self::PerThread if stream.is_null() => PER_THREAD as CUstream,
            _ => stream.cast(),
        }
    }
}

/// Runs a call of the program's, unless this process is forked from one that uses the runtime.
#[inline]
pub fn run(call: impl FnOnce() -> Answer) -> cudaError_t {
    if is_forked() {
        return result(Err(Error::cudaErrorInitializationError));
    }
    result(call())
}

/// Runs a call that a forked child may make.
#[inline]
pub fn run_everywhere(call: impl FnOnce() -> Answer) -> cudaError_t {
    result(call())
}

/// Defines entry points with the signatures of the API's definition. Those that begin with `everywhere:` are called in
/// forked children, too.
macro_rules! entry_points {
    (everywhere: $($functions:tt)*) => {
        $crate::api::entry_points! { @by $crate::api::run_everywhere, $($functions)* }
    };
    (fn $($functions:tt)*) => {
        $crate::api::entry_points! { @by $crate::api::run, fn $($functions)* }
    };
    (@by $run:path, $(fn $name:ident($($argument:ident: $of:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = "As the API's documentation says."]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, unused_unsafe, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub unsafe extern "C" fn $name(
                $($argument: $of),*
            ) -> cuda_definition::runtime::types::cudaError_t {
                // SAFETY: callers keep the API's promises about the pointers that they pass, as callers of any C
                // library do.
                $run(|| -> $crate::error::Answer { unsafe { $body } })
            }
            const _: cuda_definition::runtime::signatures::$name = $name;
        )*
    };
}
pub(crate) use entry_points;

/// Defines entry points that involve a default stream, twice each: for the legacy default stream and for the thread's
/// own.
macro_rules! streamed {
    ($(fn $name:ident / $per_thread:ident [$base:ident] ($($argument:ident: $of:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = "As the API's documentation says."]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, unused_unsafe, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub unsafe extern "C" fn $name(
                $($argument: $of),*
            ) -> cuda_definition::runtime::types::cudaError_t {
                let $base = $crate::api::Base::Legacy;
                // SAFETY: callers keep the API's promises about the pointers that they pass, as callers of any C
                // library do.
                $crate::api::run(|| -> $crate::error::Answer { unsafe { $body } })
            }
            const _: cuda_definition::runtime::signatures::$name = $name;

            #[doc = "The same, for the thread's own default stream."]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, unused_unsafe, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub unsafe extern "C" fn $per_thread(
                $($argument: $of),*
            ) -> cuda_definition::runtime::types::cudaError_t {
                let $base = $crate::api::Base::PerThread;
                // SAFETY: as above.
                $crate::api::run(|| -> $crate::error::Answer { unsafe { $body } })
            }
            const _: cuda_definition::runtime::signatures::$name = $per_thread;
        )*
    };
}
pub(crate) use streamed;

/// Writes a result.
///
/// # Safety
/// `to` is null or valid for writing.
///
/// # Errors
/// It is null.
pub unsafe fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(Error::cudaErrorInvalidValue);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Reads a value that the caller points to.
///
/// # Safety
/// `from` is null or points to a value.
///
/// # Errors
/// It is null.
pub unsafe fn get<T: Copy>(from: *const T) -> Answer<T> {
    if from.is_null() {
        return Err(Error::cudaErrorInvalidValue);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { from.read() })
}

/// Checks that a string of the caller's is not null.
///
/// # Errors
/// It is null.
pub fn some_text(text: *const c_char) -> Answer<*const c_char> {
    if text.is_null() {
        Err(Error::cudaErrorInvalidValue)
    } else {
        Ok(text)
    }
}
