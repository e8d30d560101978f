//! What libraries above the driver use of its connection. Gantry's `libcublas.so.13` and
//! `libcublasLt.so.13` find it through [`gantry_cuda_interface`], a symbol that no other driver
//! has.

use std::{
    ptr::{null, null_mut},
    sync::Mutex,
};

use base::Unpoisoned;
use cuda_definition::driver::types::{CUcontext, CUresult};
use remoting_proto::{
    apis::cuda::{
        Kind, NO_HANDLE,
        calls::{Library, PostLibrary},
        codes,
        interface::{self, Interface},
        libraries::Library as Named,
    },
    wire::Blob,
};

use crate::{
    context,
    entry::{Outcome, connected, is_forked},
    handles,
};

/// The kinds of objects that libraries refer to.
fn kind(kind: u32) -> Option<Kind> {
    [Kind::Stream, Kind::Blas, Kind::BlasLt]
        .into_iter()
        .find(|one| *one as u32 == kind)
}

extern "C" fn number(of: u32, handle: u64) -> u32 {
    kind(of).map_or(NO_HANDLE, |kind| handles::number(kind, handle))
}

extern "C" fn handle(of: u32, number: u32) -> u64 {
    kind(of).map_or(0, |kind| handles::handle(kind, number))
}

extern "C" fn forget(handle: u64) {
    handles::forget(handle);
}

/// The current context. If there is none, the first device's primary context becomes current, as it
/// does natively.
fn current() -> Outcome<u32> {
    if is_forked() {
        return Err(codes::NOT_INITIALIZED);
    }
    if let Ok(current) = context::need() {
        return Ok(current);
    }
    static PRIMARY: Mutex<Option<usize>> = Mutex::new(None);
    let mut primary = PRIMARY.lock_unpoisoned();
    let outcome = |result: CUresult| match result.0 {
        0 => Ok(()),
        code => Err(code.cast_signed()),
    };
    if let Some(known) = *primary {
        // SAFETY: a handle that the driver has returned. If it has become invalid, another one
        // replaces it.
        let set = unsafe { context::cuCtxSetCurrent(known as CUcontext) };
        if outcome(set).is_ok() {
            return context::need();
        }
    }
    let mut made = null_mut();
    // SAFETY: valid for writing a context, and the context that was written there.
    unsafe {
        outcome(crate::device::cuInit(0))?;
        outcome(context::cuDevicePrimaryCtxRetain(&raw mut made, 0))?;
        *primary = Some(made as usize);
        outcome(context::cuCtxSetCurrent(made))?;
    }
    context::need()
}

/// Copies bytes that the caller keeps valid during the call.
///
/// # Safety
/// There are this many.
unsafe fn bytes(at: *const u8, length: usize) -> Vec<u8> {
    if length == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at, length) }.to_vec()
}

/// Makes a call, and waits for it only if `waits` is set.
unsafe extern "C" fn post(
    library: u32,
    function: u32,
    arguments: *const u8,
    length: usize,
    waits: bool,
) -> i32 {
    let outcome = (|| {
        let link = connected()?;
        let call = PostLibrary {
            context: current()?,
            library: library as u8,
            function: function as u16,
            // SAFETY: the library's promise.
            arguments: Blob(unsafe { bytes(arguments, length) }),
        };
        // What the driver refuses in a capture would be missing in the graph.
        if waits || crate::capture::captures() {
            link.ask(&call)
        } else {
            link.post(&call)
        }
    })();
    outcome.err().unwrap_or(0)
}

unsafe extern "C" fn call(
    library: u32,
    function: u32,
    arguments: *const u8,
    length: usize,
    answer: *mut u8,
    room: usize,
    written: *mut usize,
) -> i32 {
    let outcome = (|| {
        let context = current()?;
        let Blob(got) = connected()?.ask(&Library {
            context,
            library: library as u8,
            function: function as u16,
            // SAFETY: the library's promise.
            arguments: Blob(unsafe { bytes(arguments, length) }),
        })?;
        if got.len() > room {
            return Err(codes::UNKNOWN);
        }
        // SAFETY: there is room for this many bytes, and for their number.
        unsafe {
            answer.copy_from_nonoverlapping(got.as_ptr(), got.len());
            written.write(got.len());
        }
        Ok(())
    })();
    outcome.err().unwrap_or(0)
}

extern "C" fn prepare() -> i32 {
    current().err().unwrap_or(0)
}

static INTERFACE: Interface = Interface {
    number,
    handle,
    forget,
    prepare,
    post,
    call,
};

/// Returns the interface for a library of the same build, and null for another one.
#[unsafe(no_mangle)]
pub extern "C" fn gantry_cuda_interface(fingerprint: u64) -> *const Interface {
    // Both sides take the functions' numbers from this list.
    debug_assert!(Named::ALL.len() == 2);
    if fingerprint == interface::FINGERPRINT {
        &raw const INTERFACE
    } else {
        null()
    }
}
