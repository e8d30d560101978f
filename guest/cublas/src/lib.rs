//! `libcublas.so.13` and `libcublasLt.so.13` of a guest: cuBLAS, executed by the host's library.
//!
//! The vendor's libraries ask the driver for private tables, which Gantry's driver does not have. These two libraries
//! intercept cuBLAS at its public API: a call becomes a message to the worker, over the connection of the process's
//! `libcuda.so.1`, which must be Gantry's.
//!
//! A call that returns no data is waited for only until a similar one has succeeded: one of the same function with the
//! same sizes, types and alignments. So errors are reported as they are natively, and a repeated call costs one posted
//! message.
//!
//! - `generated`: an entry point for each public symbol; an unsupported one reports its name once
//! - `interface`: the driver's connection; `call`: how calls are forwarded; `learned`: which have succeeded
//! - `scalars`: the sizes of numbers whose type is a parameter
//! - `handles`, `copies`: cuBLAS's entry points that are written by hand; `descriptors`, `light`: cuBLASLt's; `xt`:
//!   products of matrices in host memory; `names`: versions, properties and status names

// Entry points are called as in C, with the API's names. The API defines the requirements on pointers.
#![allow(non_snake_case, clippy::too_many_arguments)]

mod call;
mod copies;
mod descriptors;
mod generated;
mod handles;
mod interface;
mod learned;
mod light;
mod names;
mod scalars;
mod xt;
