//! Test servers of a worker, before the stand-in for the driver.

use std::{sync::Arc, time::Duration};

use remoting_proto::{
    apis::cuda::{
        forwarded::number,
        plan::{Outgoing, Plan, Scalars},
    },
    wire::{Blob, Flags, Header, Wire},
};
use remoting_session::{
    quota::Quota,
    server::{Nudge, Tuning},
};
use remoting_transport::{
    bell::Futex,
    endpoint::Receiver,
    mapping,
    port_bell::Waker,
    window::{self, Slice, Window},
};

use super::{CudaBackend, Server, driver::Api};

/// A server with a quota of 1 GiB, the receiver of the calls that it gets, and its window.
pub(super) fn server() -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    server_of(driver(), window::SMALLEST)
}

/// The stand-in for the driver.
pub(super) fn driver() -> Api {
    let program = std::env::current_exe().unwrap();
    let driver = program.with_file_name("libgantry_cuda_driver.so");
    Api::open(driver.to_str().unwrap(), None).unwrap()
}

/// The same, with another driver and a window of this size in bytes.
pub(super) fn server_of(api: Api, size: u64) -> (Server, Receiver<Slice, Waker>, Arc<Window>) {
    let window = Window::map(&mapping::create(size).unwrap(), size, 1 << 16).unwrap();
    // For ever: streams of the stand-in may wait for words of the window, and it knows what is registered there, when the
    // test is over.
    std::mem::forget(Arc::clone(&window));
    let patience = Duration::from_millis(1);
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker: Waker::Futex(Futex { patience }),
        quota: Quota::new(1 << 30),
    };
    let backend = CudaBackend::new(Arc::new(api), &Default::default());
    let nudge = Nudge(Box::new(|| {}));
    let (server, calls) = Server::new(backend, Arc::clone(&window), tuning, nudge);
    (server, calls, window)
}

/// The header of a request that nobody waits for.
pub(super) fn posted(opcode: u16) -> Header {
    Header {
        length: 0,
        opcode,
        flags: Flags::default(),
        sequence: 0,
    }
}

/// What a forwarded entry point is sent.
pub(super) fn arguments(symbol: &str, words: &[u64]) -> (u16, Blob) {
    let function = number(symbol);
    let outgoing = Outgoing {
        plan: Plan::of(function).unwrap(),
        words,
        scalars: Scalars::default(),
    };
    let mut bytes = Vec::new();
    // SAFETY: tests pass what the API wants.
    assert!(unsafe { outgoing.encode(|_, value| value as u32, &mut bytes) });
    (function, Blob(bytes))
}

/// The object that a forwarded entry point makes, which its first parameter points to.
pub(super) fn made(server: &mut Server, context: u32, symbol: &str, words: &[u64]) -> u32 {
    let mut place = 0u64;
    let words = [&[&raw mut place as u64], words].concat();
    let (function, bytes) = arguments(symbol, &words);
    let made = server.forward(context, function, &bytes.0);
    <(u32, u32)>::from_bytes(&made.unwrap().0).unwrap().1
}
