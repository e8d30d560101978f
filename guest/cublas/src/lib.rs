//! `libcublas.so.13` and `libcublasLt.so.13` of a guest: cuBLAS, carried out by the host's.
//!
//! The vendor's own asks the driver for private tables, which Gantry's has not. These two cut cuBLAS at its
//! public API: a call becomes a message to the worker, by the connection of the process's `libcuda.so.1`,
//! which must be Gantry's.
//!
//! A call that writes nothing for its caller is not waited for once its like has succeeded: the same
//! function with the same sizes, types and alignments. So what is wrong with a call is told as natively,
//! and what is repeated costs a posted message.
//!
//! - `generated`: an entry point for each public symbol; what is not served says so, once by name
//! - `interface`: the driver's connection; `call`: how calls are carried; `learned`: which have succeeded
//! - `scalars`: how long numbers are whose type a parameter says
//! - `handles`, `copies`: cuBLAS's entry points that are written by hand; `descriptors`, `light`:
//!   cuBLASLt's; `xt`: products of matrices in the host's memory; `names`: what both say of themselves

// Entry points are called as in C, with its names; what a pointer has to be is said by the API.
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
