//! A link to a worker that a test plays.

use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

use remoting_proto::{
    apis::cuda::{Cuda, calls::Await},
    wire::{
        Flags, Header, Wire,
        messages::{ANSWER, Call, RELEASED, StageId},
    },
};
use remoting_transport::{
    bell::Futex,
    endpoint::{Receiver, Sender},
    mapping,
    port_bell::Doorbell,
    ring::{Consumer, Producer},
    window::{SMALLEST, Slice, Window},
};

use crate::{
    Connection, Driver, Link,
    connect::Environment,
    peer::{Peer, Seat, Spins},
};

#[derive(Debug)]
pub(crate) enum Test {}

impl Driver for Test {
    const NAME: &'static str = "test";
    const API: &'static str = "CUDA";
    const ADDRESS_VARIABLE: &'static str = "GANTRY_TEST_ADDRESS";
    const SPIN_VARIABLE: &'static str = "GANTRY_TEST_SPIN";
    const SOCKET: &'static str = "off";

    type Schema = Cuda;
    type Status = i32;
    const WORKER_LOST: i32 = -1;
    const WINDOW_FULL: i32 = -2;
    const FORKED: i32 = -3;

    type State = ();

    fn connection() -> &'static Connection<Self> {
        static LINK: Connection<Test> = Connection::new();
        &LINK
    }

    fn await_stage(stage: StageId) -> impl Call<Answer = ()> {
        Await { stage }
    }
}

/// The worker's ends of the rings.
pub(crate) struct Worker {
    calls: Receiver<Slice, Futex>,
    answers: Sender<Slice, Futex>,
}

/// A link without threads of its own, and its worker.
pub(crate) fn link() -> (Link<Test>, Worker) {
    let file = mapping::create(SMALLEST).unwrap();
    let window = Window::map(&file, SMALLEST, 1 << 16).unwrap();
    let patience = Duration::from_millis(1);
    let (spin, attended) = (Duration::ZERO, Duration::ZERO);
    let seat = Arc::new(Seat {
        bell: Doorbell::Futex(Futex { patience }),
        peer: Peer::Nobody,
        spins: Spins { spin, attended },
        stream: None,
    });
    let worker = Worker {
        calls: Receiver::new(Consumer::new(window.calls(), Futex { patience })),
        answers: Sender::new(Producer::new(window.answers(), Futex { patience }), spin),
    };
    let (due, _) = mpsc::channel();
    let link = Link::new(window, seat, due, Environment::of::<Test>());
    (link, worker)
}

impl Worker {
    /// Waits for the next call: its number.
    pub(crate) fn called(&mut self) -> u64 {
        let mut body = Vec::new();
        loop {
            match self.calls.poll(&mut body).unwrap() {
                Some(header) => return header.sequence,
                None => std::thread::yield_now(),
            }
        }
    }

    /// Answers a call without a result.
    pub(crate) fn answer(&mut self, sequence: u64, code: i32) {
        let outcome = if code == 0 { Ok(()) } else { Err(code) };
        self.send(ANSWER, sequence, &outcome);
    }

    /// Releases a stage whose command has succeeded.
    pub(crate) fn release(&mut self, stage: StageId) {
        self.send(RELEASED, 0, &(stage, true));
    }

    fn send(&mut self, opcode: u16, sequence: u64, message: &impl Wire) {
        let mut body = Vec::new();
        message.put(&mut body);
        let header = Header {
            length: 0,
            opcode,
            flags: Flags::default(),
            sequence,
        };
        self.answers.send(header, &body, || true).unwrap();
    }
}
