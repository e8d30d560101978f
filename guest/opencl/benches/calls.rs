//! Measures the cost of calls up to the driver: encoding, decoding, the ring, a complete worker on
//! a driver that does nothing, and a round trip between two threads (which needs a processor for
//! each).

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use remoting_opencl::{OpenClBackend, Server, driver::Api};
use remoting_proto::{
    apis::opencl::calls::{
        Call, ContextId, CreateContext, CreateKernel, CreateProgram, CreateQueue, DeviceId, Finish,
        Grid, Info, KernelId, NdRange, Order, ProgramId, ProgramOrigin, QueueId, Request,
        SetArgument, Target, Value,
    },
    wire::{Blob, Flags, Header, Wire},
};
use remoting_session::{
    quota::Quota,
    server::{Nudge, Tuning},
};
use remoting_transport::{
    bell::Futex,
    endpoint::{Receiver, Sender},
    mapping,
    port_bell::Waker,
    ring::{Consumer, Producer},
    window::{self, Slice, Window},
};

const RING: u64 = 1 << 20;
const BELL: Futex = Futex {
    patience: Duration::from_millis(100),
};

/// Number of rounds of a measurement, and the least time of each.
const ROUNDS: usize = 100;
const ROUND: Duration = Duration::from_millis(10);

/// Prints how long `work` takes: the median of [`ROUNDS`], and the least.
fn measure<T>(name: &str, mut work: impl FnMut() -> T) {
    let mut time = |runs: u32| {
        let start = Instant::now();
        for _ in 0..runs {
            black_box(work());
        }
        start.elapsed()
    };
    let mut runs = 1;
    while time(runs) < ROUND {
        runs *= 2;
    }
    let mut rounds: Vec<_> = (0..ROUNDS).map(|_| time(runs).as_nanos()).collect();
    rounds.sort_unstable();
    let of_one = |nanos: u128| nanos as f64 / f64::from(runs);
    let (median, least) = (of_one(rounds[ROUNDS / 2]), of_one(rounds[0]));
    println!("{name}: {median:.1} ns, {least:.1} ns at least");
}

fn nd_range() -> NdRange {
    NdRange {
        order: Order {
            queue: QueueId(1),
            wait: Vec::new(),
            event: None,
        },
        kernel: KernelId(2),
        grid: Grid::Line([1 << 20], Some([256]), None),
    }
}

fn argument() -> SetArgument {
    SetArgument {
        kernel: KernelId(2),
        index: 1,
        value: Value::Bytes(Blob(vec![1, 2, 3, 4])),
    }
}

fn one<C: Call>(call: &C) {
    let mut bytes = Vec::with_capacity(256);
    measure(&format!("encode {}", C::NAME), || {
        bytes.clear();
        black_box(call).put(&mut bytes);
    });
    measure(&format!("decode {}", C::NAME), || {
        Request::decode(C::OPCODE, black_box(&bytes))
    });
}

fn codec() {
    one(&nd_range());
    one(&argument());
    let of = Target::WorkGroup(KernelId(2), None);
    one(&Info { of, parameter: 3 });
}

fn header(sequence: u64) -> Header {
    Header {
        length: 0,
        opcode: NdRange::OPCODE,
        flags: Flags::default(),
        sequence,
    }
}

fn ends(slices: [Slice; 2]) -> (Sender<Slice, Futex>, Receiver<Slice, Futex>) {
    let [one, other] = slices;
    (
        Sender::new(Producer::new(one, BELL), Duration::from_secs(1)),
        Receiver::new(Consumer::new(other, BELL)),
    )
}

fn ring() {
    let file = mapping::create(window::SMALLEST).expect("there is memory");
    let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
    let (mut sender, mut receiver) = ends([window.calls(), window.calls()]);
    let mut bytes = Vec::new();
    nd_range().put(&mut bytes);
    let mut body = Vec::new();
    measure("send and receive a kernel's enqueue, one thread", || {
        sender
            .send(header(1), &bytes, || true)
            .expect("there is room");
        receiver.poll(&mut body).expect("it is whole")
    });

    let file = mapping::create(window::SMALLEST).expect("there is memory");
    let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
    let (mut sender, mut receiver) = ends([window.calls(), window.answers()]);
    let (mut back, mut there) = ends([window.answers(), window.calls()]);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut body = Vec::new();
            while !over.load(Ordering::Relaxed) {
                if let Ok(Some(header)) = there.poll(&mut body) {
                    back.send(header, &body[..4], || true)
                        .expect("there is room");
                }
            }
        });
        measure("round trip of 14 bytes between two threads", || {
            sender
                .send(header(1), &[7; 14], || true)
                .expect("there is room");
            while !matches!(receiver.poll(&mut body), Ok(Some(_))) {}
        });
        over.store(true, Ordering::Relaxed);
    });
}

/// An application's side of a worker that runs in the same thread.
struct Client {
    calls: Sender<Slice, Futex>,
    answers: Receiver<Slice, Futex>,
    server: Server,
    taken: Receiver<Slice, Waker>,
    call: Vec<u8>,
    body: Vec<u8>,
}

impl Client {
    fn new() -> Self {
        let file = mapping::create(window::SMALLEST).expect("there is memory");
        let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
        let tuning = Tuning {
            spin: Duration::ZERO,
            waker: Waker::Futex(BELL),
            quota: Quota::new(0),
        };
        let (calls, answers) = ends([window.calls(), window.answers()]);
        let nudge = Nudge(Box::new(|| {}));
        let backend = OpenClBackend::new(Arc::new(Api::null()), &Default::default());
        let (server, taken) = Server::new(backend, window, tuning, nudge);
        Self {
            calls,
            answers,
            server,
            taken,
            call: Vec::new(),
            body: Vec::new(),
        }
    }

    fn send<C: Call>(&mut self, call: &C, flags: Flags) {
        self.call.clear();
        call.put(&mut self.call);
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: flags.with(Flags::ALONE),
            sequence: 1,
        };
        let sent = self.calls.send(header, &self.call, || true);
        sent.expect("there is room");
    }

    fn serve(&mut self) {
        let served = self.server.turn(&mut self.taken, &mut self.body);
        assert!(served.expect("these are calls"));
    }

    fn answer(&mut self) {
        let answer = self.answers.poll(&mut self.body).expect("it is whole");
        assert!(answer.is_some(), "there is an answer");
        assert_eq!(self.body[..4], [0; 4], "it is success");
    }
}

/// The work of both sides for a kernel that is waited for, in one thread: a round trip without the
/// communication between two processors.
fn worker() {
    let mut client = Client::new();
    let nothing = Flags::default();
    let (context, queue) = (ContextId(0), QueueId(1));
    let devices = vec![DeviceId(0)];
    let platform = None;
    client.send(
        &CreateContext {
            id: context,
            devices,
            platform,
        },
        nothing,
    );
    client.send(
        &CreateQueue {
            id: queue,
            context,
            device: DeviceId(0),
            properties: 0,
            further: Vec::new(),
        },
        nothing,
    );
    let program = ProgramId(0);
    let origin = ProgramOrigin::Source(Blob(b"kernel".to_vec()));
    client.send(
        &CreateProgram {
            id: program,
            context,
            origin,
        },
        nothing,
    );
    let name = Blob(b"kernel".to_vec());
    client.send(
        &CreateKernel {
            id: KernelId(2),
            program,
            name,
        },
        nothing,
    );
    client.serve();
    let (kernel, finish) = (nd_range(), Finish { queue });
    client.send(&kernel, Flags::ANSWER);
    client.serve();
    client.answer();
    measure("a kernel's enqueue, both sides' work", || {
        client.send(&kernel, nothing);
        client.serve();
    });
    measure("finish, both sides' work", || {
        client.send(&finish, Flags::ANSWER);
        client.serve();
        client.answer();
    });
}

fn main() {
    codec();
    ring();
    worker();
}
