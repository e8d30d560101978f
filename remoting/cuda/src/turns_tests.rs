//! Which requests wait for their turn, with the stand-in for the driver.

use std::{
    os::unix::net::UnixStream,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use remoting_proto::{
    apis::cuda::{
        Cuda,
        calls::{Allocate, CopyRows, FunctionTurn, HostFunction, Post, Request, Source},
    },
    wire::{Api as _, api::Cost, messages::Call},
};
use remoting_transport::{
    endpoint::Receiver,
    port_bell::Waker,
    window::{Slice, Window},
};
use remoting_turns::fake::{self, Fake};

use super::{Server, testing};

/// A worker before the stand-in, with a context, and its arbiter.
struct Sharer {
    server: Server,
    taken: Receiver<Slice, Waker>,
    window: Arc<Window>,
    body: Vec<u8>,
    arbiter: Fake,
    context: u32,
}

impl Sharer {
    fn new() -> Self {
        let (mut server, taken, window) = testing::server();
        let (control, pool) = UnixStream::pair().unwrap();
        server.share(control, &fake::join(), None).unwrap();
        fake::belongs(&pool);
        let mut sharer = Self {
            server,
            taken,
            window,
            body: Vec::new(),
            arbiter: Fake::meet(pool),
            context: 0,
        };
        sharer.context = sharer.made("cuCtxCreate_v2", &[0, 0]);
        sharer
    }

    /// The object that a forwarded entry point makes, which its first parameter points to.
    fn made(&mut self, symbol: &str, words: &[u64]) -> u32 {
        testing::made(&mut self.server, self.context, symbol, words)
    }

    fn allocated(&mut self, size: u64) -> u64 {
        let call = Allocate {
            context: self.context,
            size,
            source: Source::Device(),
        };
        self.server.allocate(&call).unwrap()
    }

    /// Sends a request that nobody waits for.
    fn post<C: Call>(&mut self, call: C, request: impl Fn(C) -> Request) {
        let header = testing::posted(C::OPCODE);
        self.server.serve_in_turn(header, request(call), 0).unwrap();
    }

    fn post_forwarded(&mut self, symbol: &str, words: &[u64]) {
        let (function, arguments) = testing::arguments(symbol, words);
        let context = self.context;
        let call = Post {
            context,
            function,
            arguments,
        };
        self.post(call, Request::Post);
    }

    fn serve(&mut self) {
        while self.server.turn(&mut self.taken, &mut self.body).unwrap() {}
    }

    /// Gives the worker a turn of a second, once it has asked for one.
    fn turn(&mut self) {
        while self.arbiter.heard().is_none() {
            self.serve();
            thread::sleep(Duration::from_millis(1));
        }
        self.arbiter.give(1_000_000_000, true);
        self.serve();
    }

    /// Requests that the arbiter knows of.
    fn calls(&self) -> u64 {
        self.arbiter.account.calls.load(Ordering::Relaxed)
    }
}

#[test]
fn copies_of_rows_wait_for_their_turn_and_are_measured() {
    let mut sharer = Sharer::new();
    let (to, from) = (sharer.allocated(4096), sharer.allocated(4096));
    let copy = CopyRows {
        context: sharer.context,
        stream: 0,
        to: (to, 64),
        from: (from, 64),
        width: 32,
        rows: 4,
    };
    sharer.post(copy, Request::CopyRows);
    sharer.serve();
    assert!(!sharer.server.holds_nothing());
    assert_eq!(sharer.calls(), 0);
    sharer.turn();
    assert!(sharer.server.holds_nothing());
    assert_eq!(sharer.calls(), 1);
}

#[test]
fn larger_copies_of_rows_are_of_another_class() {
    let of = |width, rows| {
        let copy = CopyRows {
            context: 1,
            stream: 0,
            to: (0, width),
            from: (0, width),
            width,
            rows,
        };
        Cuda::cost(CopyRows::OPCODE, &Request::CopyRows(copy))
    };
    assert_eq!(of(64, 64), of(128, 32));
    assert_ne!(of(64, 64), of(64, 64 << 10));
    assert!(matches!(of(u64::MAX, 2), Cost::Work(_)));
}

#[test]
fn work_that_waits_for_the_client_is_neither_lost_nor_overtaken_nor_free() {
    let mut sharer = Sharer::new();
    let graph = sharer.made("cuGraphCreate", &[0]);
    let executable = sharer.made("cuGraphInstantiateWithFlags", &[graph.into(), 0]);
    let stream = sharer.made("cuStreamCreate", &[1]);
    let done = sharer.window.data();
    let call = HostFunction {
        context: sharer.context,
        stream,
        number: 1,
        done,
        lasting: false,
        turn: FunctionTurn::Intact(),
    };
    sharer.post(call, Request::HostFunction);
    // The driver may wait in these: they are put off until the client's function has returned.
    for _ in 0..3 {
        sharer.post_forwarded("cuGraphUpload", &[executable.into(), stream.into()]);
    }
    sharer.turn();
    assert_eq!(sharer.calls(), 0);
    let word = sharer.window.at(done, 4).unwrap().cast::<u32>();
    // SAFETY: an aligned word of the window, which the driver's thread polls.
    unsafe { word.write_volatile(1) };
    while sharer.calls() < 3 {
        sharer.serve();
        thread::sleep(Duration::from_millis(1));
    }
    assert!(sharer.server.holds_nothing());
}
