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
    time::Duration,
};

use criterion::{Criterion, criterion_group, criterion_main};
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

fn one<C: Call>(criterion: &mut Criterion, call: &C) {
    let mut bytes = Vec::with_capacity(256);
    criterion.bench_function(&format!("encode {}", C::NAME), |bencher| {
        bencher.iter(|| {
            bytes.clear();
            black_box(call).put(&mut bytes);
        });
    });
    criterion.bench_function(&format!("decode {}", C::NAME), |bencher| {
        bencher.iter(|| Request::decode(C::OPCODE, black_box(&bytes)));
    });
}

fn codec(criterion: &mut Criterion) {
    one(criterion, &nd_range());
    one(criterion, &argument());
    let of = Target::WorkGroup(KernelId(2), None);
    one(criterion, &Info { of, parameter: 3 });
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

fn ring(criterion: &mut Criterion) {
    let file = mapping::create(window::SMALLEST).expect("there is memory");
    let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
    let (mut sender, mut receiver) = ends([window.calls(), window.calls()]);
    let mut bytes = Vec::new();
    nd_range().put(&mut bytes);
    let mut body = Vec::new();
    criterion.bench_function(
        "send and receive a kernel's enqueue, one thread",
        |bencher| {
            bencher.iter(|| {
                sender
                    .send(header(1), &bytes, || true)
                    .expect("there is room");
                receiver.poll(&mut body).expect("it is whole")
            });
        },
    );

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
        criterion.bench_function("round trip of 14 bytes between two threads", |bencher| {
            bencher.iter(|| {
                sender
                    .send(header(1), &[7; 14], || true)
                    .expect("there is room");
                while !matches!(receiver.poll(&mut body), Ok(Some(_))) {}
            });
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
fn worker(criterion: &mut Criterion) {
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
    criterion.bench_function("a kernel's enqueue, both sides' work", |bencher| {
        bencher.iter(|| {
            client.send(&kernel, nothing);
            client.serve();
        });
    });
    criterion.bench_function("finish, both sides' work", |bencher| {
        bencher.iter(|| {
            client.send(&finish, Flags::ANSWER);
            client.serve();
            client.answer();
        });
    });
}

criterion_group!(benches, codec, ring, worker);
criterion_main!(benches);
