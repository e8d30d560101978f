//! A worker's server for tests.

use std::{sync::Arc, time::Duration};

use super::{
    quota::Quota,
    server::{Nudge, Server, Tuning},
};
use crate::{
    opencl::Api,
    transport::{
        bell::Futex,
        link::Receiver,
        port_bell::Waker,
        window::{self, Slice, Window},
    },
};

/// The size of its rings, in bytes.
pub(super) const RING: u64 = 1 << 16;
/// How it sleeps.
pub(super) const BELL: Futex = Futex {
    patience: Duration::from_millis(1),
};

/// A server before an OpenCL that does nothing, its window, and the calls that it gets.
pub(super) fn server() -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_before(Api::null())
}

/// The same before another OpenCL.
pub(super) fn server_before(api: Api) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    let file = window::create(window::SMALLEST).unwrap();
    let window = Window::map(&file, window::SMALLEST, RING).unwrap();
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker: Waker::Futex(BELL),
        device: String::new(),
        quota: Quota::new(1 << 30),
    };
    let nudge = Nudge(Box::new(|| {}));
    let (server, calls) = Server::new(Arc::new(api), Arc::clone(&window), tuning, nudge);
    (server, calls, window)
}
