//! The entry points that are generated from the API's definition.

#![allow(
    clippy::all,
    clippy::pedantic,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::let_unit_value,
    unsafe_op_in_unsafe_fn,
    unused_unsafe,
    unused_parens,
    unused_imports
)]

use std::ffi::*;

/// A parameter as a word: all parameters of these APIs are numbers, enumerations and pointers.
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
