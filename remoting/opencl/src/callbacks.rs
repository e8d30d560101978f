//! Notices that the driver's callbacks, which run in its threads, leave for the serving thread.

use std::{
    ffi::{CStr, c_char, c_void},
    sync::Arc,
};

use remoting_proto::{apis::opencl::calls::ContextId, wire::Header};
use remoting_session::{
    notice::{self, Notice},
    quota::Charge,
};

use super::{driver::api::Handle, programs::LinkedProgram, records::Rebuilt};

/// Maximum length of a report that is passed on, in bytes.
const LONGEST_REPORT: usize = 4096;

/// An OpenCL event that happened outside the serving thread.
#[derive(Debug)]
pub enum DriverNotice {
    /// A build or compilation of a program has completed with this code.
    Built(Header, Rebuilt, i32),
    /// Linking a program has completed with this code.
    Linked(Header, LinkedProgram, i32),
    /// The driver reports something about a context.
    Report(ContextId, Vec<u8>),
}

/// Where notices are left.
pub type Board = notice::Board<DriverNotice>;

/// The notice that a driver callback leaves, once.
#[derive(Debug)]
pub struct Leaf {
    board: Arc<Board>,
    /// The callback's number.
    callback: u64,
}

impl Leaf {
    /// Converts it to the driver's `user_data`, which is taken back by one of the functions below.
    pub fn into_raw(board: &Arc<Board>, callback: u64) -> *mut c_void {
        Box::into_raw(Box::new(Self {
            board: Arc::clone(board),
            callback,
        }))
        .cast()
    }

    /// Takes back data that the driver has refused.
    ///
    /// # Safety
    /// `data` comes from `into_raw`, and the driver will not pass it to a callback.
    pub unsafe fn drop_raw(data: *mut c_void) {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(data.cast::<Self>()) });
    }
}

/// The data of a context's callback in the driver, which lives as long as the context may.
#[derive(Debug)]
pub struct Reporter {
    board: Arc<Board>,
    context: ContextId,
}

impl Reporter {
    /// Creates a reporter for a context.
    pub fn new(board: &Arc<Board>, context: ContextId) -> Box<Self> {
        let board = Arc::clone(board);
        Box::new(Self { board, context })
    }
}

/// `clCreateContext`'s callback.
///
/// # Safety
/// `text` is null or a C string, and `data` points to a [`Reporter`].
pub unsafe extern "C" fn report(
    text: *const c_char,
    _: *const c_void,
    _: usize,
    data: *mut c_void,
) {
    if text.is_null() {
        return;
    }
    // SAFETY: the caller's promises.
    let (text, reporter) = unsafe { (CStr::from_ptr(text), &*data.cast::<Reporter>()) };
    let bytes = text.to_bytes();
    let bytes = bytes[..bytes.len().min(LONGEST_REPORT)].to_vec();
    reporter.board.leave(Notice::Backend(DriverNotice::Report(
        reporter.context,
        bytes,
    )));
}

/// `clSetEventCallback`'s callback.
///
/// # Safety
/// `data` comes from [`Leaf::into_raw`] and is passed once.
pub unsafe extern "C" fn event(_: Handle, status: i32, data: *mut c_void) {
    // SAFETY: the driver calls each registered callback once.
    let leaf = unsafe { Box::from_raw(data.cast::<Leaf>()) };
    leaf.board.leave(Notice::Callback(leaf.callback, status));
}

/// `clSetMemObjectDestructorCallback`'s callback.
///
/// # Safety
/// `data` comes from [`Leaf::into_raw`] and is passed once.
pub unsafe extern "C" fn mem(_: Handle, data: *mut c_void) {
    // SAFETY: as above.
    unsafe { event(0, 0, data) };
}

/// Converts a charge to the driver's `user_data`, for [`gone`].
pub fn charge_into_raw(charge: Charge) -> *mut c_void {
    Box::into_raw(Box::new(charge)).cast()
}

/// `clSetMemObjectDestructorCallback`'s callback: returns the charge, since the memory is free
/// again.
///
/// # Safety
/// `data` comes from [`charge_into_raw`] and is passed once.
pub unsafe extern "C" fn gone(_: Handle, data: *mut c_void) {
    // SAFETY: the driver calls each registered callback once.
    drop(unsafe { Box::from_raw(data.cast::<Charge>()) });
}
