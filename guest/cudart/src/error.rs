//! Errors: the thread's last error, and names.

use std::{
    cell::Cell,
    ffi::{CString, c_char},
    sync::OnceLock,
};

use cuda_definition::{
    driver::types::CUresult,
    runtime::{signatures, types::*},
};

/// An error, by the runtime's number.
pub type Error = cudaError;
/// The result of a function.
pub type Answer<T = ()> = Result<T, Error>;

thread_local! {
    static LAST: Cell<Error> = const { Cell::new(Error::cudaSuccess) };
}

/// Records an error as the thread's last one and returns its number, as every function of the API
/// does.
pub fn result(answer: Answer) -> cudaError_t {
    match answer {
        Ok(()) => Error::cudaSuccess,
        Err(error) => {
            LAST.set(error);
            error
        }
    }
}

/// The thread's last error.
pub fn last() -> Error {
    LAST.get()
}

/// Converts the driver's result to the runtime's numbers, which are the same for every error that
/// the runtime knows.
///
/// # Errors
/// The driver's.
pub fn check(result: CUresult) -> Answer {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(from_driver(result))
}

fn from_driver(result: CUresult) -> Error {
    match cudaError(result.0) {
        error if known(error).is_some() => error,
        _ => Error::cudaErrorUnknown,
    }
}

/// The name of an error that the runtime knows.
pub fn known(error: Error) -> Option<&'static CString> {
    static NAMES: OnceLock<Vec<(Error, CString)>> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        let named = Error::NAMES.iter();
        named
            .map(|(name, error)| (*error, CString::new(*name).unwrap_or_default()))
            .collect()
    });
    names
        .iter()
        .find(|(known, _)| *known == error)
        .map(|(_, name)| name)
}

/// Returns the thread's last error and resets it.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> cudaError_t {
    LAST.replace(Error::cudaSuccess)
}
const _: signatures::cudaGetLastError = cudaGetLastError;

/// Returns the thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> cudaError_t {
    last()
}
const _: signatures::cudaPeekAtLastError = cudaPeekAtLastError;

/// An error's name as in source code.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(error: cudaError_t) -> *const c_char {
    known(error).map_or(c"unrecognized error code".as_ptr(), |name| name.as_ptr())
}
const _: signatures::cudaGetErrorName = cudaGetErrorName;

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn the_driver_s_errors_keep_their_numbers() {
        for (name, error) in CUresult::NAMES {
            let ours = from_driver(*error);
            // An error for which the runtime has no number is unknown to it.
            assert!(
                ours.0 == error.0 || ours == Error::cudaErrorUnknown,
                "{name}"
            );
        }
        assert_eq!(
            from_driver(CUresult::CUDA_ERROR_NOT_FOUND),
            Error::cudaErrorSymbolNotFound
        );
        assert_eq!(
            from_driver(CUresult::CUDA_ERROR_INVALID_CONTEXT),
            Error::cudaErrorDeviceUninitialized
        );
    }

    #[test]
    fn the_last_error_is_told_once_and_success_does_not_change_it() {
        result(Err(Error::cudaErrorNotReady));
        result(Ok(()));
        assert_eq!(cudaPeekAtLastError(), Error::cudaErrorNotReady);
        assert_eq!(cudaGetLastError(), Error::cudaErrorNotReady);
        assert_eq!(cudaGetLastError(), Error::cudaSuccess);
    }

    #[test]
    fn every_error_has_a_name() {
        for (name, error) in Error::NAMES {
            // SAFETY: names are static strings.
            let told = unsafe { CStr::from_ptr(cudaGetErrorName(*error)) };
            assert_eq!(told.to_str(), Ok(*name));
        }
    }
}
