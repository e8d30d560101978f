//! The entry points that are generated from the API's definition, and the table of all.

#![allow(
    clippy::all,
    clippy::pedantic,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::let_unit_value,
    unsafe_op_in_unsafe_fn,
    unused_unsafe,
    unused_parens
)]

use std::ffi::*;

use cuda_definition::driver::types::*;

/// A symbol that the library exports.
pub struct Symbol {
    pub name: &'static str,
    pub address: *const (),
}

// SAFETY: addresses of functions.
unsafe impl Sync for Symbol {}

/// A parameter as a word: all parameters of the API are numbers, enumerations, pointers, and
/// structures of at most eight bytes.
fn word<T: Copy>(value: T) -> u64 {
    const { assert!(size_of::<T>() <= 8) };
    let mut word = 0u64;
    // SAFETY: the value has at most this many bytes.
    unsafe {
        (&raw mut word)
            .cast::<u8>()
            .copy_from_nonoverlapping((&raw const value).cast(), size_of::<T>());
    }
    word
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));
