//! A worker's server for tests.

use std::{sync::Arc, time::Duration};

use crate::session::{
    quota::Quota,
    server::{Nudge, Session, Tuning},
};
use crate::{
    apis::opencl::calls::Request,
    backends::opencl::{OpenClBackend, Server, driver::Api},
    link::{
        bell::Futex,
        endpoint::Receiver,
        port_bell::Waker,
        window::{self, Slice, Window},
    },
    wire::{Flags, Header},
};

/// The size of its rings, in bytes.
pub(crate) const RING: u64 = 1 << 16;
/// How it sleeps.
pub(crate) const BELL: Futex = Futex {
    patience: Duration::from_millis(1),
};

/// Has a server carry a request out, as if it had come by its ring.
pub(crate) fn carry_out(server: &mut Server, request: Request) {
    let header = Header {
        length: 0,
        opcode: 70,
        flags: Flags::default(),
        sequence: 0,
    };
    server.serve(header, request).unwrap();
}

/// A server before an OpenCL that does nothing, its window, and the calls that it gets.
pub(crate) fn server() -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_before(Api::null())
}

/// The same before another OpenCL.
pub(crate) fn server_before(api: Api) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_with(api, Waker::Futex(BELL))
}

/// The same with another way of waking its client.
pub(crate) fn server_with(api: Api, waker: Waker) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    let file = window::create(window::SMALLEST).unwrap();
    let window = Window::map(&file, window::SMALLEST, RING).unwrap();
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker,
        quota: Quota::new(1 << 30),
    };
    let nudge = Nudge(Box::new(|| {}));
    let (server, calls) = Session::new(
        OpenClBackend::new(Arc::new(api), ""),
        Arc::clone(&window),
        tuning,
        nudge,
    );
    (server, calls, window)
}
