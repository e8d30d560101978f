//! `libcudart.so.13`: the CUDA runtime API over the public CUDA driver API.
//!
//! The vendor's own runtime asks the driver for private tables, which Gantry's driver does not have. This
//! one calls public functions of `libcuda.so.1` alone, found when they are first used, so that it works
//! over the vendor's driver, in a guest and over the stand-in of the tests. Handles, addresses and errors
//! are the driver's own, so that programs can use both APIs together.
//!
//! - [`registration`]: what compiled programs call before `main` and for `<<<...>>>`; [`registry`]: what is
//!   kept of it.
//! - [`context`], [`error`]: what each thread has.
//! - All others: entry points by subject. `refused` has those that are not served.

// Entry points are called as in C, with its names; what a pointer has to be is said by the API.
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
mod volumes;
