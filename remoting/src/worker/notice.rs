//! What the driver's own threads and the worker's build threads tell the serving thread.

use std::{
    ffi::{CStr, c_char, c_void},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use super::programs::LinkedProgram;
use crate::{
    opencl::api::Handle,
    protocol::{Header, calls::ContextId},
    transport::{bell::Bell, port_bell::Waker, ring::Lines, window::Slice},
    turns::message::OtherArbiter,
};

/// The longest report that is passed on, in bytes.
const LONGEST_REPORT: usize = 4096;

/// Something that happened outside of the serving thread.
#[derive(Debug)]
pub enum Notice {
    /// An event that is waited for has changed.
    Wake,
    /// The client's callback of this number is due, with this status.
    Callback(u64, i32),
    /// A build or compilation has ended with this code.
    Built(Header, i32),
    /// A program has been linked, or not, with this code.
    Linked(Header, LinkedProgram, i32),
    /// The driver has something to say about a context.
    Report(ContextId, Vec<u8>),
    /// The device is shared by an arbiter that this worker does not understand.
    Apart(OtherArbiter),
}

/// Where notices are left.
#[derive(Debug)]
pub struct Board {
    notices: Mutex<Vec<Notice>>,
    any: AtomicBool,
    ring: Mutex<Slice>,
    bell: Waker,
}

impl Board {
    /// A board whose reader sleeps on this ring.
    pub fn new(ring: Slice, bell: Waker) -> Arc<Self> {
        Arc::new(Self {
            notices: Mutex::new(Vec::new()),
            any: AtomicBool::new(false),
            ring: Mutex::new(ring),
            bell,
        })
    }

    /// Leaves a notice and wakes the serving thread.
    pub fn leave(&self, notice: Notice) {
        self.notices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(notice);
        self.any.store(true, Ordering::SeqCst);
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        self.bell.ring(&ring.control().items.0);
    }

    /// Whether there are notices: one atomic load.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// Takes all notices.
    pub fn take(&self) -> Vec<Notice> {
        self.any.store(false, Ordering::SeqCst);
        std::mem::take(&mut *self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a callback of the driver leaves, once.
#[derive(Debug)]
pub struct Leaf {
    board: Arc<Board>,
    /// The callback's number.
    callback: u64,
}

impl Leaf {
    /// As the driver's `user_data`; given back by one of the functions below.
    pub fn into_raw(board: &Arc<Board>, callback: u64) -> *mut c_void {
        Box::into_raw(Box::new(Self {
            board: Arc::clone(board),
            callback,
        }))
        .cast()
    }

    /// Takes back what the driver has refused.
    ///
    /// # Safety
    /// `data` comes from `into_raw`, and the driver will not call back with it.
    pub unsafe fn drop_raw(data: *mut c_void) {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(data.cast::<Self>()) });
    }
}

/// What a context's callback in the driver needs, as long as the context may live.
#[derive(Debug)]
pub struct Reporter {
    board: Arc<Board>,
    context: ContextId,
}

impl Reporter {
    /// Reports about a context.
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
    reporter
        .board
        .leave(Notice::Report(reporter.context, bytes));
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
