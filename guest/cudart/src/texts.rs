//! The texts of errors.

use std::{
    ffi::{CStr, c_char},
    ptr::null,
};

use cuda_definition::{
    driver::types::cudaError_enum,
    runtime::{signatures, types::*},
};

use crate::{
    driver::driver,
    error::{Error, known},
};

/// The texts of errors that the runtime detects itself, for which the driver has none.
const TEXTS: &[(Error, &CStr)] = &[
    (Error::cudaSuccess, c"no error"),
    (
        Error::cudaErrorInvalidConfiguration,
        c"invalid configuration argument",
    ),
    (Error::cudaErrorInvalidPitchValue, c"invalid pitch argument"),
    (Error::cudaErrorInvalidSymbol, c"invalid device symbol"),
    (Error::cudaErrorInvalidHostPointer, c"invalid host pointer"),
    (
        Error::cudaErrorInvalidDevicePointer,
        c"invalid device pointer",
    ),
    (Error::cudaErrorInvalidTexture, c"invalid texture reference"),
    (
        Error::cudaErrorInvalidChannelDescriptor,
        c"invalid channel descriptor",
    ),
    (
        Error::cudaErrorInvalidMemcpyDirection,
        c"invalid copy direction for memcpy",
    ),
    (Error::cudaErrorInvalidFilterSetting, c"invalid filter mode"),
    (
        Error::cudaErrorInsufficientDriver,
        c"CUDA driver version is insufficient for CUDA runtime version",
    ),
    (
        Error::cudaErrorCallRequiresNewerDriver,
        c"API call is not supported in the installed CUDA driver",
    ),
    (
        Error::cudaErrorDevicesUnavailable,
        c"CUDA-capable device(s) is/are busy or unavailable",
    ),
    (
        Error::cudaErrorIncompatibleDriverContext,
        c"incompatible driver context",
    ),
    (
        Error::cudaErrorMissingConfiguration,
        c"missing launch configuration",
    ),
    (
        Error::cudaErrorInvalidDeviceFunction,
        c"invalid device function",
    ),
];

/// # Safety
/// Only calls the driver, with a place for the answer.
fn text(error: Error) -> *const c_char {
    if let Some((_, text)) = TEXTS.iter().find(|(known, _)| *known == error) {
        return text.as_ptr();
    }
    let Some(name) = known(error) else {
        return c"unrecognized error code".as_ptr();
    };
    let mut text = null();
    // SAFETY: a number, and a place for a pointer to a static string.
    let answer = unsafe { driver!(cuGetErrorString(cudaError_enum(error.0), &raw mut text)) };
    match answer {
        Ok(()) if !text.is_null() => text,
        // There is no driver, or the driver does not know the error.
        _ => name.as_ptr(),
    }
}

/// An error's description.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(error: cudaError_t) -> *const c_char {
    text(error)
}
const _: signatures::cudaGetErrorString = cudaGetErrorString;
