//! A stand-in for cuBLAS and cuBLASLt that computes on the CPU, over the memory of the stand-in driver.
//!
//! It has the functions of a training step, so that the way of a call from a guest's libraries to a
//! worker's is tested where there is no GPU: results in the order of streams, numbers of the host's and of
//! the device's, workspaces, capture. Memory that is not the device's is refused. Both libraries are
//! this one file.
//!
//! - `numbers`: types of matrices; `product`: what is computed
//! - `stream`: doing it in the order of a stream, by the driver's public functions
//! - `api`: what C calls of cuBLAS; `light`: of cuBLASLt

#![allow(non_snake_case, clippy::too_many_arguments)]

mod api;
mod light;
mod numbers;
mod product;
mod stream;

/// A result: what is wrong is a status's number.
pub(crate) type Outcome<T = ()> = Result<T, u32>;

pub(crate) const NOT_INITIALIZED: u32 = 1;
pub(crate) const INVALID_VALUE: u32 = 7;
pub(crate) const EXECUTION_FAILED: u32 = 13;
pub(crate) const NOT_SUPPORTED: u32 = 15;

/// Defines entry points with the signatures that the definition has.
macro_rules! entry_points {
    ($module:ident: $(fn $name:ident($($argument:ident: $of:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, clippy::missing_safety_doc)]
        pub unsafe extern "C" fn $name($($argument: $of),*) -> cublasStatus_t {
            // SAFETY: callers keep the API's promises about pointers.
            let call = || -> $crate::Outcome { unsafe { $body } };
            cublasStatus_t(call().err().unwrap_or(0))
        }
        const _: cuda_definition::$module::signatures::$name = $name;
    )*};
}
pub(crate) use entry_points;
