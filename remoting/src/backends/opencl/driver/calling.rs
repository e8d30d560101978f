//! Calling the driver, and its events as fences.

use super::api::{Api, Handle};
use crate::{
    apis::opencl::codes,
    session::backend::{Fences, Progress},
    wire::Blob,
};

/// Calls a function of the driver. The one place where the worker's promises to it are stated.
macro_rules! cl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let api = &$api;
        // SAFETY: handles come from the tables, each of whose entries owns a reference; pointers
        // are to locals that outlive the call, of the sizes that are passed beside them, or into
        // the window, checked against its bounds, which stays mapped while the worker lives. One
        // thing is left to the driver: plain bytes of a client for a kernel's argument of which it
        // does not say whether that is a handle, which it has to check; who deceives it has nobody's
        // worker but its own.
        unsafe { api.$name($($arg),*) }
    }};
}
pub(crate) use cl;

/// `CL_EVENT_COMMAND_EXECUTION_STATUS`.
pub(crate) fn status(api: &Api, event: Handle) -> i32 {
    let mut status = 0i32;
    let code = cl!(
        api,
        clGetEventInfo(
            event,
            codes::EVENT_COMMAND_EXECUTION_STATUS,
            size_of::<i32>(),
            (&raw mut status).cast(),
            std::ptr::null_mut(),
        )
    );
    if code == 0 { status } else { code }
}

/// Bytes as a C string: up to the first zero.
pub(crate) fn c_string(bytes: &Blob) -> std::ffi::CString {
    let text = bytes.0.split(|&byte| byte == 0).next().unwrap_or_default();
    // `text` has no zero, so that this cannot fail.
    std::ffi::CString::new(text).unwrap_or_default()
}

/// A code as an outcome.
pub(crate) fn outcome(code: i32) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// `CL_RUNNING`.
const RUNNING: i32 = 1;

impl Fences for Api {
    /// An event.
    type Fence = Handle;

    fn poll(&self, event: Handle) -> Progress {
        match status(self, event) {
            0 => Progress::Complete,
            RUNNING => Progress::Running,
            // Queued or submitted.
            2.. => Progress::Waiting,
            _ => Progress::Failed,
        }
    }

    fn retain(&self, event: Handle) {
        cl!(self, clRetainEvent(event));
    }

    fn release(&self, event: Handle) {
        cl!(self, clReleaseEvent(event));
    }
}
