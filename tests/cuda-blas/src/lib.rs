//! A stand-in for cuBLAS and cuBLASLt that computes on the CPU, in the memory of the stand-in driver.
//!
//! It has the functions of a training step, so that the path of a call from a guest's libraries to a worker's can be
//! tested without a GPU: results in stream order, scalars of the host and of the device, workspaces, capture. Memory
//! that is not the device's is refused. Both libraries are this single file.
//!
//! - `numbers`: types of matrices; `product`: the computation
//! - `stream`: computing in stream order, by the driver's public functions
//! - `api`: entry points of cuBLAS; `light`: of cuBLASLt

#![allow(non_snake_case, clippy::too_many_arguments)]

mod api;
mod light;
mod numbers;
mod product;
mod stream;

/// A result, whose error is the number of a status.
pub(crate) type Outcome<T = ()> = Result<T, u32>;

pub(crate) const NOT_INITIALIZED: u32 = 1;
pub(crate) const INVALID_VALUE: u32 = 7;
pub(crate) const EXECUTION_FAILED: u32 = 13;
pub(crate) const NOT_SUPPORTED: u32 = 15;

/// Defines entry points with the signatures from the definition.
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
