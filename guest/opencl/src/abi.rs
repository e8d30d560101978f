//! What C programs pass: pointers that may be null, arrays with counts, handles.
//!
//! The specification makes the caller responsible for what non-null pointers point to. Only the
//! functions in this module rely on that.

use std::ffi::{CStr, c_char, c_void};

use gantry_client::Driver;
use remoting_proto::apis::opencl::codes;

use crate::link::{self, OpenCl};

/// The result of most entry points.
pub type Outcome<T = ()> = Result<T, i32>;

/// Writes an optional result of the caller's.
pub fn set<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: see the module.
        unsafe { to.write_unaligned(value) };
    }
}

/// Copies an array of the caller's. Empty if the pointer is null.
pub fn array<T: Copy>(from: *const T, count: usize) -> Vec<T> {
    if from.is_null() {
        return Vec::new();
    }
    (0..count)
        // SAFETY: see the module.
        .map(|index| unsafe { from.add(index).read_unaligned() })
        .collect()
}

/// Whether the caller's bytes equal these.
pub fn same(from: *const u8, count: usize, bytes: &[u8]) -> bool {
    // SAFETY: see the module: there are `count` bytes.
    !from.is_null()
        && count == bytes.len()
        && unsafe { std::slice::from_raw_parts(from, count) } == bytes
}

/// Copies the caller's bytes, as many as there is room for.
pub fn copy(from: *const u8, to: &mut [u8]) {
    // SAFETY: see the module: there are this many bytes.
    to.copy_from_slice(unsafe { std::slice::from_raw_parts(from, to.len()) });
}

/// Copies an array that must be present exactly if its count is not zero.
pub fn list<T: Copy>(from: *const T, count: u32, code: i32) -> Outcome<Vec<T>> {
    if from.is_null() != (count == 0) {
        return Err(code);
    }
    Ok(array(from, count as usize))
}

/// Copies pairs of property and value up to a zero.
pub fn properties(from: *const isize) -> Vec<isize> {
    let mut list = Vec::new();
    if from.is_null() {
        return list;
    }
    loop {
        // SAFETY: see the module: the list ends with a zero.
        let key = unsafe { from.add(list.len()).read() };
        if key == 0 {
            return list;
        }
        list.push(key);
        // SAFETY: as above: each property has a value.
        list.push(unsafe { from.add(list.len()).read() });
    }
}

/// Copies N sizes as 64-bit numbers. None if the pointer is null.
pub fn sizes<const N: usize>(from: *const usize) -> Option<[u64; N]> {
    if from.is_null() {
        return None;
    }
    // SAFETY: see the module.
    Some(unsafe { from.cast::<[usize; N]>().read_unaligned() }.map(|size| size as u64))
}

/// The bytes of a C string. Empty if the pointer is null.
pub fn text(from: *const c_char) -> Vec<u8> {
    if from.is_null() {
        return Vec::new();
    }
    // SAFETY: see the module.
    unsafe { CStr::from_ptr(from) }.to_bytes().to_vec()
}

/// Returns the value of a `clGet...Info`.
pub fn give(value: &[u8], size: usize, to: *mut c_void, size_ret: *mut usize) -> Outcome {
    if !to.is_null() {
        if size < value.len() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: see the module: there are `size` bytes.
        unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to.cast(), value.len()) };
    }
    set(size_ret, value.len());
    Ok(())
}

/// The bytes of numbers or pointers.
pub fn bytes<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: only used with integers and pointers, which have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }.to_vec()
}

/// Runs a call, unless this process [is forked](link::is_forked). Nothing, and no lock in particular,
/// precedes the check: other threads of the parent may have held locks.
pub fn run<T>(call: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    if link::is_forked() {
        return Err(OpenCl::FORKED);
    }
    call()
}

/// Runs a call and returns its code.
pub fn code(call: impl FnOnce() -> Outcome) -> i32 {
    run(call).err().unwrap_or(codes::SUCCESS)
}

/// Runs a call that returns a new handle, or null and the error.
pub fn handle<T>(call: impl FnOnce() -> Outcome<*mut T>, errcode_ret: *mut i32) -> *mut T {
    match run(call) {
        Ok(handle) => {
            set(errcode_ret, codes::SUCCESS);
            handle
        }
        Err(code) => {
            set(errcode_ret, code);
            std::ptr::null_mut()
        }
    }
}

/// Defines entry points. Each runs its body unless this process is forked, and returns what that came to:
///
/// - `fn name(parameters)` a code
/// - `fn name(parameters; around)` the code of a command, whose wait list and event (`around`) are its last parameters
/// - `fn name(parameters) -> Handle<T>` a new handle; where to put the code is its last parameter
/// - `fn [one: false, other: true] |flag| (parameters; around)` defines two that differ in a flag
macro_rules! entry_points {
    () => {};
    ($(#[$about:meta])* fn $name:ident($($parameter:ident: $of:ty),*) $body:block $($rest:tt)*) => {
        $(#[$about])*
        pub extern "C" fn $name($($parameter: $of),*) -> i32 {
            $crate::abi::code(|| $body)
        }
        $crate::abi::entry_points! { $($rest)* }
    };
    ($(#[$about:meta])* fn $name:ident($($parameter:ident: $of:ty),*; $around:ident) $body:block $($rest:tt)*) => {
        $(#[$about])*
        pub extern "C" fn $name(
            $($parameter: $of,)*
            count: u32,
            wait: *const $crate::object::Handle<$crate::object::Event>,
            event: *mut $crate::object::Handle<$crate::object::Event>,
        ) -> i32 {
            let $around = $crate::event::Around { count, wait, event };
            $crate::abi::code(|| $body)
        }
        $crate::abi::entry_points! { $($rest)* }
    };
    ($(#[$about:meta])* fn $name:ident($($parameter:ident: $of:ty),*) -> $handle:ty $body:block $($rest:tt)*) => {
        $(#[$about])*
        pub extern "C" fn $name($($parameter: $of,)* errcode_ret: *mut i32) -> $handle {
            $crate::abi::handle(|| $body, errcode_ret)
        }
        $crate::abi::entry_points! { $($rest)* }
    };
    (fn [$($name:ident: $value:literal),*] |$flag:ident| $parameters:tt $body:tt $($rest:tt)*) => {
        $($crate::abi::entry_points! { @flag $flag $value fn $name $parameters $body })*
        $crate::abi::entry_points! { $($rest)* }
    };
    (@flag $flag:ident $value:literal fn $name:ident $parameters:tt { $($body:tt)* }) => {
        $crate::abi::entry_points! { fn $name $parameters { let $flag = $value; $($body)* } }
    };
}
pub(crate) use entry_points;
