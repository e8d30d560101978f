//! Which calls wait for the device, and which for nothing but what it has already.

use std::{
    ffi::c_void,
    os::{
        fd::{FromRawFd, IntoRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use remoting_proto::{
    apis::opencl::{
        OpenCl,
        calls::{
            self, Call, ContextId, CreateContext, CreateKernel, CreateProgram, CreateQueue,
            CreateUserEvent, DeviceId, EventId, Finish, Grid, KernelId, NdRange, Order, ProgramId,
            ProgramOrigin, QueueId, ReleaseEvent, Request, SetUserEventStatus, WaitForEvents,
        },
    },
    wire::{Api as _, Blob, Flags, Header, api::Cost},
};
use remoting_transport::{
    alarm::Alarm,
    bell::{Bell, Futex},
    endpoint::{Receiver, Sender},
    port_bell::{Events, Waker},
    ring::{Consumer, Lines, Producer},
    window::{Slice, Window},
};
use remoting_turns::{
    fake::{self, Fake},
    message,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    Server,
    driver::{Api, api::Handle},
    testing::{self, BELL},
};

const QUEUE: QueueId = QueueId(0);
const KERNEL: KernelId = KernelId(0);

fn nd_range(kernel: KernelId, size: u64, event: Option<EventId>) -> NdRange {
    NdRange {
        order: Order {
            queue: QUEUE,
            wait: Vec::new(),
            event,
        },
        kernel,
        grid: Grid::line(size),
    }
}

#[test]
fn kernels_and_sizes_are_kinds_of_their_own_and_waiting_needs_no_device() {
    let header = Header {
        length: 0,
        opcode: 1,
        flags: Flags::default(),
        sequence: 0,
    };
    let of = |kernel, size| {
        let request = Request::NdRange(nd_range(KernelId(kernel), size, None));
        OpenCl::cost(header.opcode, &request)
    };
    assert_eq!(of(1, 64), of(1, 64));
    assert_ne!(of(1, 64), of(2, 64));
    assert_ne!(of(1, 64), of(1, 65));
    let finish = Request::Finish(Finish { queue: QUEUE });
    let cost = OpenCl::cost(header.opcode, &finish);
    assert!(matches!(cost, Cost::Nothing(_)), "{cost:?}");
}

/// A client of a worker, whose commands are over as soon as the driver has them, and the arbiter.
struct Client {
    server: Server,
    taken: Receiver<Slice, Waker>,
    calls: Sender<Slice, Futex>,
    answers: Receiver<Slice, Futex>,
    body: Vec<u8>,
    sequence: u64,
    window: Arc<Window>,
    arbiter: Fake,
}

impl Client {
    fn new() -> Self {
        Self::of(Api::null())
    }

    fn of(api: Api) -> Self {
        Self::with(api, Waker::Futex(BELL))
    }

    fn with(api: Api, waker: Waker) -> Self {
        let (mut server, taken, window) = testing::server_with(api, waker);
        let (calls, answers) = (window.calls(), window.answers());
        let (control, pool) = UnixStream::pair().unwrap();
        server.share(control, &fake::join(), None).unwrap();
        fake::belongs(&pool);
        let mut client = Self {
            server,
            taken,
            calls: Sender::new(Producer::new(calls, BELL), Duration::ZERO),
            answers: Receiver::new(Consumer::new(answers, BELL)),
            body: Vec::new(),
            sequence: 0,
            window,
            arbiter: Fake::meet(pool),
        };
        client.send(&CreateContext {
            id: ContextId(0),
            devices: vec![DeviceId(0)],
            platform: None,
        });
        client.send(&CreateQueue {
            id: QUEUE,
            context: ContextId(0),
            device: DeviceId(0),
            properties: 0,
            further: Vec::new(),
        });
        client.send(&CreateProgram {
            id: ProgramId(0),
            context: ContextId(0),
            origin: ProgramOrigin::Source(Blob::default()),
        });
        client.send(&CreateKernel {
            id: KERNEL,
            program: ProgramId(0),
            name: Blob(b"kernel".to_vec()),
        });
        client
    }

    /// Sends a call that is to be answered; its number.
    fn send<C: Call>(&mut self, call: &C) -> u64 {
        let mut bytes = Vec::new();
        call.put(&mut bytes);
        self.sequence += 1;
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: Flags::ANSWER,
            sequence: self.sequence,
        };
        self.calls.send(header, &bytes, || true).unwrap();
        self.sequence
    }

    fn enqueue(&mut self, event: u32) -> u64 {
        self.send(&nd_range(KERNEL, 1, Some(EventId(event))))
    }

    fn wait(&mut self, event: u32) -> u64 {
        self.send(&WaitForEvents {
            events: vec![EventId(event)],
        })
    }

    /// Lets the worker do what it can.
    fn serve(&mut self) {
        while self.server.turn(&mut self.taken, &mut self.body).unwrap() {}
    }

    /// Gives the worker a turn for one command, once it has asked for one.
    fn turn(&mut self) {
        self.turn_of(0, true);
    }

    /// Gives the worker a turn of so many nanoseconds, once it has asked for one.
    fn turn_of(&mut self, slice: u64, contended: bool) {
        while self.arbiter.heard().is_none() {
            self.serve();
            thread::sleep(Duration::from_millis(1));
        }
        self.arbiter.give(slice, contended);
        self.serve();
    }

    /// The numbers of the calls that have been answered since, all of which had success, in the
    /// order of the calls.
    fn answered(&mut self) -> Vec<u64> {
        let mut answered = Vec::new();
        while let Some(header) = self.answers.poll(&mut self.body).unwrap() {
            assert_eq!(header.opcode, calls::ANSWER);
            assert_eq!(self.body[..4], [0; 4], "{header:?}");
            answered.push(header.sequence);
        }
        answered.sort_unstable();
        answered
    }
}

#[test]
fn a_client_learns_of_what_has_completed_while_others_of_its_commands_wait_for_the_device() {
    let mut client = Client::new();
    let first = client.enqueue(1);
    let second = client.enqueue(2);
    let third = client.enqueue(3);
    // Those commands are not there yet: these wait behind them.
    let one = client.wait(1);
    let two = client.wait(2);
    client.serve();
    client.answered();
    client.turn();
    assert_eq!(client.answered(), [first, one]);
    client.turn();
    assert_eq!(client.answered(), [second, two]);
    // One that comes later waits for what is there, past all that is kept.
    let again = client.wait(2);
    client.serve();
    assert_eq!(client.answered(), [again]);
    client.turn();
    assert_eq!(client.answered(), [third]);
}

#[test]
fn a_wait_for_a_number_that_is_given_anew_waits_for_the_new_command() {
    let mut client = Client::new();
    client.enqueue(1);
    client.serve();
    client.turn();
    let second = client.enqueue(2);
    let third = client.enqueue(3);
    let release = client.send(&ReleaseEvent { id: EventId(1) });
    let anew = client.enqueue(1);
    let wait = client.wait(1);
    client.serve();
    client.answered();
    client.turn();
    assert_eq!(client.answered(), [second]);
    client.turn();
    assert_eq!(client.answered(), [third, release]);
    client.turn();
    assert_eq!(client.answered(), [anew, wait]);
}

/// The event of a command that waits for another, which is one that only the client decides.
const STUCK: Handle = 1 << 20;
static DECIDED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn enqueue(
    _: Handle,
    _: Handle,
    _: u32,
    _: *const usize,
    _: *const usize,
    _: *const usize,
    waits: u32,
    _: *const Handle,
    event: *mut Handle,
) -> i32 {
    // SAFETY: the worker wants to know the event of every command.
    unsafe { event.write(if waits > 0 { STUCK } else { 1 }) };
    0
}

unsafe extern "C" fn event_status(
    event: Handle,
    _: u32,
    _: usize,
    value: *mut c_void,
    _: *mut usize,
) -> i32 {
    const QUEUED: i32 = 3;
    let waits = event == STUCK && !DECIDED.load(Ordering::Relaxed);
    // SAFETY: the status of an event is asked for, a number of 32 bits.
    unsafe { value.cast::<i32>().write(if waits { QUEUED } else { 0 }) };
    0
}

unsafe extern "C" fn decide(_: Handle, _: i32) -> i32 {
    DECIDED.store(true, Ordering::Relaxed);
    0
}

#[test]
fn commands_behind_one_that_waits_for_the_client_go_on_and_so_does_the_client() {
    let mut client = Client::of(Api::null().with_events(enqueue, event_status, decide));
    let event = client.send(&CreateUserEvent {
        id: EventId(1),
        context: ContextId(0),
    });
    let mut waits = nd_range(KERNEL, 1, None);
    waits.order.wait = vec![EventId(1)];
    let stuck = client.send(&waits);
    let others: Vec<_> = (0..40)
        .map(|_| client.send(&nd_range(KERNEL, 1, None)))
        .collect();
    client.turn_of(6_000_000, false);
    let answered = client.answered();
    let all: Vec<_> = answered.into_iter().filter(|call| *call >= event).collect();
    assert_eq!(all[0], event);
    assert_eq!(all[1..], others);
    let decided = client.send(&SetUserEventStatus {
        id: EventId(1),
        status: 0,
    });
    let end = client.send(&Finish { queue: QUEUE });
    client.serve();
    assert_eq!(client.answered(), [stuck, decided, end]);
}

#[test]
fn a_turn_in_which_a_guests_client_is_to_run_interrupts_it_if_it_sleeps_for_long() {
    let event = || EventFd::new(EFD_NONBLOCK).unwrap();
    // SAFETY: its only owner gives the descriptor up.
    let owned = |event: EventFd| unsafe { OwnedFd::from_raw_fd(event.into_raw_fd()) };
    for sleeps in [true, false] {
        let interrupt = event();
        let events = Events {
            doorbell: owned(event()),
            interrupt: owned(interrupt.try_clone().unwrap()),
            patience: Duration::from_millis(1),
        };
        let mut client = Client::with(Api::null(), Waker::Guest(Arc::new(events)));
        client.arbiter.coschedule(true);
        client.enqueue(1);
        client.serve();
        let (alarm, _) = Alarm::create().unwrap();
        let window = Arc::clone(&client.window);
        let answers = window.answers();
        let items = &answers.control().items.0;
        let seen = items.load(Ordering::Acquire);
        thread::scope(|scope| {
            if sleeps {
                scope.spawn(|| alarm.sleep(items, seen, Duration::from_secs(3600)));
                while items.load(Ordering::Acquire) == seen {
                    thread::yield_now();
                }
            }
            client.turn();
            assert_eq!(interrupt.read().is_ok(), sleeps);
            // As its agent does.
            alarm.wake();
        });
    }
}

#[test]
fn a_turn_in_which_the_client_is_to_run_wakes_who_sleeps_on_its_answer() {
    for wakes in [true, false] {
        let mut client = Client::new();
        client.arbiter.coschedule(wakes);
        client.enqueue(1);
        client.serve();
        let window = Arc::clone(&client.window);
        let items = move || window.answers().control().items.0.load(Ordering::Acquire);
        let seen = items();
        let sleeper = wakes.then(|| {
            let window = Arc::clone(&client.window);
            thread::spawn(move || {
                let patience = Duration::from_secs(3600);
                let answers = window.answers();
                Futex { patience }.wait(&answers.control().items.0, seen, Duration::ZERO);
            })
        });
        // An answer alone would not wake it: nobody has said that there is a sleeper.
        client.turn();
        assert_eq!(items() != seen, wakes);
        if let Some(sleeper) = sleeper {
            sleeper.join().unwrap();
        }
    }
}

#[test]
fn a_worker_whose_arbiter_is_of_another_build_ends_and_names_both_versions() {
    let (mut server, mut taken, _window) = testing::server();
    let (control, pool) = UnixStream::pair().unwrap();
    server.share(control, &fake::join(), None).unwrap();
    fake::belongs(&pool);
    Fake::of_another_build(&pool, 9);
    let mut body = Vec::new();
    let error = loop {
        match server.turn(&mut taken, &mut body) {
            Ok(_) => thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
    };
    let cause = std::error::Error::source(&error).unwrap().to_string();
    let ours = format!("this worker {}:", message::VERSION);
    assert!(
        cause.contains("version 9 ") && cause.contains(&ours),
        "{error}, because {cause}"
    );
}

#[test]
fn the_arbiter_sees_what_memory_a_client_has_that_computes_nothing() {
    let mut client = Client::new();
    let memory = |client: &Client| client.arbiter.account.memory.load(Ordering::Relaxed);
    let charge = client.server.quota.charge(1 << 20).unwrap();
    // Until the worker has found its arbiter.
    while memory(&client) != 1 << 20 {
        client.send(&Finish { queue: QUEUE });
        client.serve();
        thread::sleep(Duration::from_millis(1));
    }
    client.arbiter = client.arbiter.replace();
    while memory(&client) != 1 << 20 {
        client.server.before_sleep();
        thread::sleep(Duration::from_millis(1));
    }
    drop(charge);
    client.server.before_sleep();
    assert_eq!(memory(&client), 0);
}
