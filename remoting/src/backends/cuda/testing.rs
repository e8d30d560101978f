//! Test servers of a worker, before the stand-in for the driver.

use std::{sync::Arc, time::Duration};

use super::{CudaBackend, Server, driver::Api};
use crate::{
    link::{
        bell::Futex,
        endpoint::Receiver,
        port_bell::Waker,
        window::{self, Slice, Window},
    },
    session::{
        quota::Quota,
        server::{Nudge, Session, Tuning},
    },
};

/// A server with a quota of 1 GiB, the receiver of the calls that it gets, and its window.
pub(super) fn server() -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    let program = std::env::current_exe().unwrap();
    let driver = program.with_file_name("libgantry_cuda_driver.so");
    let api = Api::open(driver.to_str().unwrap(), None).unwrap();
    let file = window::create(window::SMALLEST).unwrap();
    let window = Window::map(&file, window::SMALLEST, 1 << 16).unwrap();
    let patience = Duration::from_millis(1);
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker: Waker::Futex(Futex { patience }),
        quota: Quota::new(1 << 30),
    };
    let backend = CudaBackend::new(Arc::new(api), "");
    let nudge = Nudge(Box::new(|| {}));
    let (server, calls) = Session::new(backend, Arc::clone(&window), tuning, nudge);
    (server, calls, window)
}
