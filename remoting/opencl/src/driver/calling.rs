//! Calls to the driver, and its events as fences.

use remoting_proto::{apis::opencl::codes, wire::Blob};
use remoting_session::backend::{Fences, Progress};

use super::api::{Api, Handle};

/// Calls a driver function. This is the one place that justifies the worker's calls.
#[doc(hidden)]
#[macro_export]
macro_rules! __cl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let api = &$api;
        // SAFETY: handles come from the tables, each of whose entries owns a reference. Pointers
        // refer to locals that outlive the call and have the sizes passed beside them, or into the
        // window, checked against its bounds; the window stays mapped while the worker lives. One
        // check is left to the driver: plain bytes from a client for a kernel argument, if the
        // driver does not tell whether the argument is a handle. A client that deceives the driver
        // harms only its own worker.
        unsafe { api.$name($($arg),*) }
    }};
}
pub use __cl as cl;

/// Calls a driver function that puts a command into a queue. Between the queue, which comes first, and what every command
/// has last, are its own arguments.
macro_rules! enqueue {
    ($api:expr, $slot:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $crate::driver::cl!(
            $api,
            $name($slot.queue, $($arg,)* $slot.count, $slot.wait, $slot.event)
        )
    };
}
pub(crate) use enqueue;

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

/// Converts bytes to a C string, up to the first zero.
pub(crate) fn c_string(bytes: &Blob) -> std::ffi::CString {
    let text = bytes.0.split(|&byte| byte == 0).next().unwrap_or_default();
    // `text` contains no zero, so this cannot fail.
    std::ffi::CString::new(text).unwrap_or_default()
}

/// Converts a code to an outcome.
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
