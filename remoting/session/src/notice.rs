//! What the driver's threads and the worker's build threads tell the serving thread.

use std::{
    fs::File,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use remoting_proto::wire::Header;
use remoting_transport::{bell::Bell, port_bell::Waker, ring::Lines, window::Slice};
use remoting_turns::message::OtherArbiter;

use super::{checkpoint::Ordered, image::Immovable};

/// Something that happened outside the serving thread.
#[derive(Debug)]
pub enum Notice<N> {
    /// A fence that somebody waits for has changed.
    Wake,
    /// The client's callback with this number is due, with this status.
    Callback(u64, i32),
    /// A notice for the backend.
    Backend(N),
    /// An order of the process's control thread.
    Control(Ordered),
    /// A round of the state is in this file, or the reason why not; for the client's call with this header.
    Copied(Header, Result<File, Immovable>),
    /// An arbiter that this worker does not understand shares the device.
    Apart(OtherArbiter),
}

/// Where other threads leave notices.
#[derive(Debug)]
pub struct Board<N> {
    notices: Mutex<Vec<Notice<N>>>,
    any: AtomicBool,
    ring: Mutex<Slice>,
    bell: Waker,
}

impl<N> Board<N> {
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
    pub fn leave(&self, notice: Notice<N>) {
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
    pub fn take(&self) -> Vec<Notice<N>> {
        self.any.store(false, Ordering::SeqCst);
        std::mem::take(&mut *self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
