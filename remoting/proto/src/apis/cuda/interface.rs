//! What `libcuda.so.1` in a guest has for the libraries above it, in the same process: a table of
//! functions, which they find by a symbol of its own.

use super::libraries;
use crate::wire::codec::{named, with};

/// The symbol: a function that takes [`FINGERPRINT`] and gives the table, or null if builds differ.
pub const SYMBOL: &core::ffi::CStr = c"gantry_cuda_interface";

/// Changes with what is said to libraries, and with the table.
pub const FINGERPRINT: u64 = with(libraries::FINGERPRINT, named("interface 1"));

/// The table. Kinds are [`Kind`](super::Kind)'s numbers, results those of calls to the worker.
#[derive(Debug)]
#[repr(C)]
pub struct Interface {
    /// The number of a handle's object; [`NO_HANDLE`](super::NO_HANDLE) of what is none.
    pub number: extern "C" fn(kind: u32, handle: u64) -> u32,
    /// The handle of an object that the worker has just made.
    pub handle: extern "C" fn(kind: u32, number: u32) -> u64,
    /// An object is about to be destroyed.
    pub forget: extern "C" fn(handle: u64),
    /// Makes sure that there is a driver and a current context.
    pub prepare: extern "C" fn() -> i32,
    /// A call that writes nothing, and whether to wait for what becomes of it: library, function,
    /// parameters.
    pub post: unsafe extern "C" fn(u32, u32, *const u8, usize, bool) -> i32,
    /// A call that is answered: library, function, parameters, room for the answer, its length.
    pub call: unsafe extern "C" fn(u32, u32, *const u8, usize, *mut u8, usize, *mut usize) -> i32,
}
