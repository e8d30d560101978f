//! `libcudart.so.13`: the CUDA runtime API on top of the public CUDA driver API.
//!
//! The vendor's runtime asks the driver for private tables, which Gantry's driver does not have.
//! This one only calls public functions of `libcuda.so.1`, looked up on first use. So it works with
//! the vendor's driver, in a guest, and with the tests' driver substitute. Handles, addresses and
//! errors are the driver's own, so that programs can use both APIs together.
//!
//! - [`registration`]: what compiled programs call before `main` and for `<<<...>>>`; [`registry`]:
//!   what is registered.
//! - [`context`], [`error`]: per-thread state.
//! - All others: entry points by subject. `refused` has those that are not supported.

// Entry points are called as in C, with the API's names. The API defines the requirements on
// pointers.
#![allow(non_snake_case)]

mod api;
mod arrays;
mod context;
mod copies;
mod device;
mod driver;
mod error;
mod graphs;
mod launch;
mod libraries;
mod memory;
mod nodes;
mod properties;
mod refused;
mod registration;
mod registry;
mod streams;
mod texts;
mod volumes;
