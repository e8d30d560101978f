//! The entry points: the driver's C interface.
//!
//! Each function is checked against the API's definition at compile time. There is nothing in place
//! of missing functions: a test that needs one fails with its name.

pub mod arrays;
mod copies;
mod device;
mod flood;
mod graph_memory;
mod graphs;
mod images;
mod memory;
mod modules;
mod names;
mod streams;
mod volumes;

use std::ffi::{CStr, c_char};

use cuda_definition::driver::types::CUresult;

use crate::driver::{Answer, context, devices};

/// An exported function.
pub struct Export {
    /// Its symbol.
    pub symbol: &'static str,
    /// Its address.
    pub address: fn() -> *const (),
}

/// All exported functions.
pub fn exports() -> impl Iterator<Item = &'static Export> {
    let all = [
        arrays::EXPORTS,
        names::EXPORTS,
        device::EXPORTS,
        memory::EXPORTS,
        copies::EXPORTS,
        modules::EXPORTS,
        streams::EXPORTS,
        graphs::EXPORTS,
        volumes::EXPORTS,
    ];
    all.into_iter().flatten()
}

/// Defines exported functions with the signatures from the definition.
macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $of:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, unused_unsafe, clippy::missing_safety_doc)]
            pub unsafe extern "C" fn $name($($argument: $of),*) -> CUresult {
                // SAFETY: callers keep the API's promises about the pointers that they pass, as
                // with any C library. Handles are looked up and never dereferenced.
                let answer = || -> $crate::driver::Answer { unsafe { $body } };
                $crate::api::result(answer())
            }
            const _: cuda_definition::driver::signatures::$name = $name;
        )*
        pub(super) const EXPORTS: &[$crate::api::Export] = &[$(
            $crate::api::Export { symbol: stringify!($name), address: || $name as *const () },
        )*];
    };
}
use entry_points;

fn result(answer: Answer) -> CUresult {
    answer.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Writes a result.
///
/// # Safety
/// `to` is null or has room for a value.
unsafe fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes a result that the caller may not want, in which case `to` is null.
///
/// # Safety
/// As for [`put`].
unsafe fn offer<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller's promise.
        unsafe { to.write_unaligned(value) };
    }
}

/// A string from the caller.
///
/// # Safety
/// `text` is null or ends with a zero byte.
unsafe fn text<'a>(text: *const c_char) -> Answer<&'a str> {
    if text.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// Checks a device number.
fn device(number: i32) -> Answer {
    context::initialised()?;
    if (0..devices()).contains(&number) {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }
}
