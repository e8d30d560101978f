//! Work in the order of a stream: functions of the host's that the driver calls.

use std::{
    ffi::{CStr, c_void},
    sync::OnceLock,
};

use cuda_definition::driver::{
    signatures,
    types::{CUstream, CUstreamCaptureStatus},
};

use crate::{EXECUTION_FAILED, Outcome};

/// A function of the process's driver, which is the one that is open already.
fn symbol(name: &CStr) -> Option<usize> {
    static DRIVER: OnceLock<usize> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        // SAFETY: what is open under its name, or none.
        unsafe {
            libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) as usize
        }
    });
    if *driver == 0 {
        return None;
    }
    // SAFETY: an open library and a string.
    let found = unsafe { libc::dlsym(*driver as *mut c_void, name.as_ptr()) };
    (!found.is_null()).then_some(found as usize)
}

macro_rules! driver {
    ($name:ident, $text:literal, ($($argument:expr),*)) => {{
        static ENTRY: OnceLock<Option<usize>> = OnceLock::new();
        match *ENTRY.get_or_init(|| symbol($text)) {
            // SAFETY: what bears the name has the signature that the definition has; pointers are to
            // locals or to what the function is called with later.
            Some(address) => unsafe {
                let function = std::mem::transmute::<usize, signatures::$name>(address);
                function($($argument),*).0
            },
            None => 1,
        }
    }};
}

/// The allocation that an address is in: where it begins, and its size.
pub fn allocation(at: u64) -> Option<(u64, u64)> {
    let (mut start, mut size) = (0, 0);
    let found = driver!(
        cuMemGetAddressRange_v2,
        c"cuMemGetAddressRange_v2",
        (&raw mut start, &raw mut size, at)
    );
    (found == 0).then_some((start, size as u64))
}

type Work = Box<dyn Fn() + Send>;

unsafe extern "C" fn once(data: *mut c_void) {
    // SAFETY: made below for one call.
    let work = unsafe { Box::from_raw(data.cast::<Work>()) };
    work();
}

unsafe extern "C" fn again(data: *mut c_void) {
    // SAFETY: made below, for good.
    let work = unsafe { &*data.cast::<Work>() };
    work();
}

/// Does something in the order of a stream. A stream that is captured keeps it for each launch of the
/// graph.
pub fn submit(stream: CUstream, work: impl Fn() + Send + 'static) -> Outcome {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let asked = driver!(
        cuStreamIsCapturing,
        c"cuStreamIsCapturing",
        (stream, &raw mut status)
    );
    if asked != 0 {
        return Err(EXECUTION_FAILED);
    }
    let captured = status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let call = if captured { again } else { once };
    let work: Box<Work> = Box::new(Box::new(work));
    let data = Box::into_raw(work).cast::<c_void>();
    let given = driver!(
        cuLaunchHostFunc,
        c"cuLaunchHostFunc",
        (stream, Some(call), data)
    );
    if given != 0 {
        // SAFETY: nobody else has it.
        drop(unsafe { Box::from_raw(data.cast::<Work>()) });
        return Err(EXECUTION_FAILED);
    }
    Ok(())
}

/// Waits for all that a stream has.
pub fn wait(stream: CUstream) -> Outcome {
    match driver!(cuStreamSynchronize, c"cuStreamSynchronize", (stream)) {
        0 => Ok(()),
        _ => Err(EXECUTION_FAILED),
    }
}
