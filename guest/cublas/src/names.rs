//! The versions, properties and status names of both libraries.

use std::{
    ffi::{c_char, c_int},
    sync::OnceLock,
};

use cuda_definition::{
    cublas::types::{cublasStatus_t, libraryPropertyType},
    cublaslt,
};
use remoting_proto::apis::cuda::{codes, libraries::Library};

use crate::{
    call::{INVALID_VALUE, NOT_SUPPORTED, Outcome, ask, entry_points, put, status},
    interface::{interface, is_forked},
};

/// The version of the runtime API that these libraries are built for.
const RUNTIME: usize = 13_000;

/// The version of the host's library, requested only once: 130100 for 13.1.0.
///
/// # Errors
/// There is no worker, or it has no such library.
pub fn version() -> Outcome<u64> {
    static VERSION: OnceLock<u64> = OnceLock::new();
    if is_forked() {
        return Err(codes::NOT_INITIALIZED);
    }
    if let Some(version) = VERSION.get() {
        return Ok(*version);
    }
    match (interface()?.prepare)() {
        0 => {}
        code => return Err(code),
    }
    let function = Library::BlasLt
        .number("cublasLtGetVersion")
        .ok_or(NOT_SUPPORTED)?;
    let mut answer = [0; 8];
    if ask(Library::BlasLt, function, &[], &mut answer)? != answer.len() {
        return Err(codes::UNKNOWN);
    }
    Ok(*VERSION.get_or_init(|| u64::from_le_bytes(answer)))
}

fn property(of: u32) -> Outcome<c_int> {
    let version = version()?;
    let part = match of {
        0 => version / 10_000,
        1 => version / 100 % 100,
        2 => version % 100,
        _ => return Err(INVALID_VALUE),
    };
    Ok(part as c_int)
}

/// The name and the description of a status.
fn told(status: u32) -> (&'static std::ffi::CStr, &'static std::ffi::CStr) {
    match status {
        0 => (c"CUBLAS_STATUS_SUCCESS", c"success"),
        1 => (
            c"CUBLAS_STATUS_NOT_INITIALIZED",
            c"the library was not initialized",
        ),
        3 => (c"CUBLAS_STATUS_ALLOC_FAILED", c"an allocation failed"),
        7 => (
            c"CUBLAS_STATUS_INVALID_VALUE",
            c"an unsupported value or parameter was passed",
        ),
        8 => (
            c"CUBLAS_STATUS_ARCH_MISMATCH",
            c"the device lacks a feature that is needed",
        ),
        11 => (
            c"CUBLAS_STATUS_MAPPING_ERROR",
            c"access to memory of the device failed",
        ),
        13 => (
            c"CUBLAS_STATUS_EXECUTION_FAILED",
            c"the program on the device failed",
        ),
        14 => (
            c"CUBLAS_STATUS_INTERNAL_ERROR",
            c"an internal operation failed",
        ),
        15 => (
            c"CUBLAS_STATUS_NOT_SUPPORTED",
            c"the functionality is not supported",
        ),
        16 => (c"CUBLAS_STATUS_LICENSE_ERROR", c"a licence is missing"),
        _ => (c"unknown", c"unknown status"),
    }
}

/// Entry points that return something other than a status.
macro_rules! returning {
    ($module:ident: $(fn $name:ident($($argument:ident: $of:ty),*) -> $answer:ty $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(clippy::missing_safety_doc)]
        pub unsafe extern "C" fn $name($($argument: $of),*) -> $answer $body
        const _: cuda_definition::$module::signatures::$name = $name;
    )*};
}

returning! { cublas:
    fn cublasXerbla(_srName: *const c_char, _info: c_int) -> () { }
    fn cublasGetStatusString(status: cublasStatus_t) -> *const c_char { told(status.0).1.as_ptr() }
    fn cublasGetStatusName(status: cublasStatus_t) -> *const c_char { told(status.0).0.as_ptr() }
    fn cublasGetCudartVersion() -> usize { RUNTIME }
}

returning! { cublaslt:
    fn cublasLtGetStatusString(status: cublaslt::types::cublasStatus_t) -> *const c_char { told(status.0).1.as_ptr() }
    fn cublasLtGetStatusName(status: cublaslt::types::cublasStatus_t) -> *const c_char { told(status.0).0.as_ptr() }
    fn cublasLtGetCudartVersion() -> usize { RUNTIME }
    // Which CPU instructions the host's library may use is not up to the guest.
    fn cublasLtDisableCpuInstructionsSetMask(_mask: std::ffi::c_uint) -> std::ffi::c_uint { 0 }
    fn cublasLtGetVersion() -> usize { version().map_or(0, |version| version as usize) }
}

entry_points! { cublas:
    fn cublasGetProperty(r#type: libraryPropertyType, value: *mut c_int) {
        put(value, property(r#type.0)?)
    }
}

/// The same for the other library.
#[unsafe(no_mangle)]
#[allow(clippy::missing_safety_doc)]
pub unsafe extern "C" fn cublasLtGetProperty(
    r#type: cublaslt::types::libraryPropertyType,
    value: *mut c_int,
) -> cublaslt::types::cublasStatus_t {
    // SAFETY: the caller has room for a number.
    let outcome = property(r#type.0).and_then(|part| unsafe { put(value, part) });
    cublaslt::types::cublasStatus_t(status(outcome).0)
}
