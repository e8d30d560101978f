//! Commands that go on for as long as the test wants, and a worker that looks after them.

use std::{sync::atomic::Ordering, thread, time::Duration};

use remoting_proto::{
    apis::opencl::{
        calls::{
            self, Call, ContextId, CreateContext, CreateQueue, CreateUserEvent, DeviceId, EventId,
            Finish, Marker, QueueId,
        },
        codes,
    },
    wire::{Flags, Header, Wire},
};
use remoting_session::{
    backend::QueueKey,
    limit::{Limit, MOST, Order},
};
use remoting_transport::{
    bell::Futex,
    endpoint::{Receiver, Sender},
    port_bell::Waker,
    ring::{Consumer, Producer},
    window::Slice,
};

use crate::{
    Server,
    driver::api::Handle,
    testing::{self, BELL},
};

/// A worker before an OpenCL that does nothing, and its application.
struct Pair {
    server: Server,
    calls: Receiver<Slice, Waker>,
    sender: Sender<Slice, Futex>,
    answers: Receiver<Slice, Futex>,
}

impl Pair {
    fn new() -> Self {
        let (mut server, calls, window) = testing::server();
        let limit = Duration::from_secs(3600);
        server.limit(limit, |_| panic!("nothing runs")).unwrap();
        let mut pair = Self {
            server,
            calls,
            sender: Sender::new(Producer::new(window.calls(), BELL), Duration::ZERO),
            answers: Receiver::new(Consumer::new(window.answers(), BELL)),
        };
        let (context, id) = (ContextId(0), QueueId(0));
        pair.post(&CreateContext {
            id: context,
            devices: vec![DeviceId(0)],
            platform: None,
        });
        pair.post(&CreateQueue {
            id,
            context,
            device: DeviceId(0),
            properties: 0,
            further: Vec::new(),
        });
        assert!(pair.turn());
        pair
    }

    fn send<C: Call>(&mut self, call: &C, flags: Flags) {
        let mut body = Vec::new();
        call.put(&mut body);
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags,
            sequence: 1,
        };
        self.sender.send(header, &body, || true).unwrap();
    }

    fn post<C: Call>(&mut self, call: &C) {
        self.send(call, Flags::default());
    }

    fn turn(&mut self) -> bool {
        self.server.turn(&mut self.calls, &mut Vec::new()).unwrap()
    }

    /// The answer that is there, if there is one.
    fn answer(&mut self) -> Option<Result<(), i32>> {
        let mut body = Vec::new();
        while let Some(header) = self.answers.poll(&mut body).unwrap() {
            if header.opcode == calls::ANSWER {
                return Some(Result::from_bytes(&body).unwrap());
            }
        }
        None
    }

    /// Has the thread look after so many commands more than there are.
    fn fill(&self, count: usize) {
        self.limit().count.fetch_add(count, Ordering::AcqRel);
    }

    fn limit(&self) -> &Limit<Handle> {
        self.server.limit.as_ref().unwrap()
    }
}

fn marker() -> Marker {
    Marker {
        order: calls::Order {
            queue: QueueId(0),
            wait: Vec::new(),
            event: None,
        },
    }
}

#[test]
fn while_the_driver_has_all_that_is_looked_after_no_other_call_is_taken() {
    let mut pair = Pair::new();
    pair.fill(MOST);
    pair.send(&Finish { queue: QueueId(0) }, Flags::ANSWER);
    assert!(!pair.turn());
    assert_eq!(pair.answer(), None);
    pair.limit().count.fetch_sub(1, Ordering::AcqRel);
    assert!(pair.turn());
    assert_eq!(pair.answer(), Some(Ok(())));
}

#[test]
fn commands_that_may_wait_for_the_client_are_refused_beyond_that() {
    let mut pair = Pair::new();
    pair.post(&CreateUserEvent {
        id: EventId(0),
        context: ContextId(0),
    });
    assert!(pair.turn());
    pair.send(&marker(), Flags::ANSWER);
    assert!(pair.turn());
    assert_eq!(pair.answer(), Some(Ok(())));
    pair.fill(MOST);
    pair.send(&marker(), Flags::ANSWER);
    assert!(pair.turn());
    assert_eq!(pair.answer(), Some(Err(codes::OUT_OF_RESOURCES)));
}

#[test]
fn who_waits_for_room_is_woken_when_there_is_some() {
    let pair = Pair::new();
    pair.fill(MOST - 1);
    pair.limit().order(Order {
        fence: 1,
        queue: QueueKey {
            raw: 1,
            in_order: true,
        },
    });
    // Commands of this driver have ended when they are looked at.
    while pair.limit().is_full() {
        thread::yield_now();
    }
    while !pair.server.board.any() {
        thread::yield_now();
    }
}
