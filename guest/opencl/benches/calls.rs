//! What calls cost before any driver sees them: encoding, decoding, the ring, and a round trip
//! between two threads (which needs a processor for each).

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use criterion::{Criterion, criterion_group, criterion_main};
use gantry_remoting::{
    protocol::{
        Blob, Call, Flags, Header, Request, Wire,
        calls::{Info, KernelId, NdRange, Order, QueueId, SetArgument, Target, Value},
    },
    transport::{
        bell::Futex,
        link::{Receiver, Sender},
        ring::{Consumer, Producer},
        window::{self, Slice, Window},
    },
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
        dimensions: 1,
        offset: None,
        global: [1 << 20, 1, 1],
        local: Some([256, 1, 1]),
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
        Sender::new(
            Producer::new(one, BELL),
            RING as u32,
            Duration::from_secs(1),
        ),
        Receiver::new(Consumer::new(other, BELL)),
    )
}

fn ring(criterion: &mut Criterion) {
    let file = window::create(window::SMALLEST).expect("there is memory");
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

    let file = window::create(window::SMALLEST).expect("there is memory");
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

criterion_group!(benches, codec, ring);
criterion_main!(benches);
