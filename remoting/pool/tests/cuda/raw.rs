//! Requests that no library of ours would send so: a client that talks to a worker by itself.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use remoting_proto::{
    apis::cuda::{
        Cuda, NEVER,
        calls::{
            AddAllocNode, AddConditionalNode, AddCopyNode, AddFreeNode, AddHostNode, Allocate,
            CaptureInfo, ContextSynchronize, CopyVolume, CreateUserObject, Forward, Free,
            FunctionTurn, HostFunction, Launch, LaunchGraph, Load, Post, Read, ReleaseUserObject,
            RetainUserObject, SetCopyNode, SetHostNode, Shape, Side, Signal, Source, Start,
            StreamSynchronize,
        },
        codes,
        forwarded::number,
        plan::{Outgoing, Plan, Scalars},
    },
    wire::{
        Blob, Flags, Header, Wire,
        hello::Hello,
        messages::{ANSWER, Call, WindowRange},
    },
};
use remoting_transport::{
    bell::Futex,
    endpoint::{Receiver, Sender},
    ring::{Consumer, Producer},
    socket,
    window::{Slice, Window},
};

mod charges;
mod devices;
mod leases;
mod shared_pool;

/// How long an answer or a word is waited for.
const LONG: Duration = Duration::from_secs(60);
const PRINT: &str =
    include_str!("../../../../tests/cuda-driver/tests/kernels/print.compute_75.ptx");
const ORDER: &str =
    include_str!("../../../../tests/cuda-driver/tests/kernels/order.compute_75.ptx");

/// A connection with a worker, and a context in it.
struct Client {
    /// Closed, the worker ends.
    _stream: UnixStream,
    window: Arc<Window>,
    calls: Sender<Slice, Futex>,
    answers: Receiver<Slice, Futex>,
    sequence: u64,
    context: u32,
    /// Where the device has the window.
    window_at: u64,
}

impl Client {
    fn new() -> Self {
        crate::library::library();
        Self::at(std::env::var("GANTRY_CUDA").unwrap())
    }

    /// One of the pool that listens at this path.
    fn at(path: impl AsRef<std::path::Path>) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        socket::send_hello(&stream, Hello::client::<Cuda>(), &[]).unwrap();
        let (bytes, files) = socket::receive_hello(&stream).unwrap();
        let hello = Hello::check_for::<Cuda>(&bytes).unwrap();
        let window = Window::map(&files[0], hello.window, hello.ring).unwrap();
        let bell = Futex {
            patience: Duration::from_millis(20),
        };
        let (calls, answers) = (window.calls(), window.answers());
        let mut client = Self {
            _stream: stream,
            calls: Sender::new(Producer::new(calls, bell), Duration::ZERO),
            answers: Receiver::new(Consumer::new(answers, bell)),
            window,
            sequence: 0,
            context: 0,
            window_at: 0,
        };
        let started = client.ask(&Start {}).unwrap();
        assert_eq!(started.devices.len(), 1);
        client.window_at = started.window;
        client.context = client.made("cuCtxCreate_v2", &[0, 0, 0]);
        client
    }

    fn send<C: Call>(&mut self, call: &C, flags: Flags) {
        let mut body = Vec::new();
        call.put(&mut body);
        self.sequence += 1;
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: flags.with(Flags::ALONE),
            sequence: self.sequence,
        };
        let until = Instant::now() + LONG;
        let alive = || Instant::now() < until;
        self.calls.send(header, &body, alive).unwrap();
    }

    fn post<C: Call>(&mut self, call: &C) {
        self.send(call, Flags::default());
    }

    fn ask<C: Call>(&mut self, call: &C) -> Result<C::Answer, i32> {
        self.send(call, Flags::ANSWER);
        let (sequence, start, mut body) = (self.sequence, Instant::now(), Vec::new());
        while start.elapsed() < LONG {
            match self.answers.poll(&mut body).expect("the worker is there") {
                Some(header) if header.opcode == ANSWER && header.sequence == sequence => {
                    return Wire::from_bytes(&body).unwrap();
                }
                Some(_) => {}
                None => self.answers.sleep(|| false),
            }
        }
        panic!("no answer");
    }

    /// A call of the list of forwarded ones, with objects by their numbers.
    fn arguments(symbol: &str, words: &[u64]) -> (u16, Blob) {
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

    fn forward(&mut self, symbol: &str, words: &[u64]) -> Result<Blob, i32> {
        let (function, arguments) = Self::arguments(symbol, words);
        let context = self.context;
        self.ask(&Forward {
            context,
            function,
            arguments,
        })
    }

    /// The number of what a call makes, whose first parameter says so.
    fn made(&mut self, symbol: &str, words: &[u64]) -> u32 {
        let mut place = 0u64;
        let mut words = words.to_vec();
        words[0] = &raw mut place as u64;
        let Blob(answer) = self.forward(symbol, &words).unwrap();
        // How many there are, then each.
        <(u32, u32)>::from_bytes(&answer).unwrap().1
    }

    fn stream(&mut self) -> u32 {
        self.made("cuStreamCreate", &[0, 1])
    }

    fn kernel(&mut self, ptx: &str, name: &std::ffi::CStr) -> u32 {
        let loaded = self
            .ask(&Load {
                context: self.context,
                image: Blob([ptx.as_bytes(), b"\0"].concat()),
                library: false,
                options: Vec::new(),
                room: (0, 0),
            })
            .unwrap();
        assert_eq!(loaded.code, 0);
        let words = [0, u64::from(loaded.id), name.as_ptr() as u64];
        self.made("cuModuleGetFunction", &words)
    }

    fn launch(&mut self, stream: u32, function: u32, parameters: &[u8]) {
        let call = Launch {
            context: self.context,
            stream,
            function,
            shape: Shape {
                grid: [1; 3],
                block: [1; 3],
                shared: 0,
            },
            cooperative: false,
            attributes: Blob::default(),
            parameters: Blob(parameters.to_vec()),
        };
        self.post(&call);
    }

    /// A stream, and a kernel that ends once a word of the window is one: the word, and the kernel's
    /// parameters.
    fn spin(&mut self) -> (u32, u32, &'static AtomicU32, Vec<u8>) {
        let (stream, spin) = (self.stream(), self.kernel(ORDER, c"spin"));
        let offset = self.window.data() + 8192;
        let until = self.window.at(offset, 4).unwrap();
        // SAFETY: of the window, which a test keeps; aligned.
        let until = unsafe { &*until.cast::<AtomicU32>() };
        until.store(0, Ordering::SeqCst);
        // Where the kernel looks.
        let at = self.window_at + offset;
        let parameters = [&at.to_le_bytes()[..], &1u32.to_le_bytes()].concat();
        (stream, spin, until, parameters)
    }

    /// Two words of the window that nothing else is said of, from its start.
    fn words(&self) -> (u64, &'static [AtomicU32]) {
        let offset = self.window.data() + 4096;
        let words = self.window.at(offset, 8).unwrap().cast::<AtomicU32>();
        // SAFETY: of the window, which a test keeps; aligned.
        (offset, unsafe { std::slice::from_raw_parts(words, 2) })
    }

    /// What becomes of a signal: the first word and the second, once one of them is not zero.
    fn signal(&mut self, stream: Option<u32>, value: u32) -> (u32, u32) {
        let (words, both) = self.words();
        both[0].store(0, Ordering::SeqCst);
        both[1].store(0, Ordering::SeqCst);
        self.post(&Signal {
            context: self.context,
            stream,
            words,
            value,
        });
        let start = Instant::now();
        while start.elapsed() < LONG {
            let now = (
                both[0].load(Ordering::SeqCst),
                both[1].load(Ordering::SeqCst),
            );
            if now != (0, 0) {
                return now;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("neither word is written");
    }
}

#[test]
fn the_device_writes_a_word_behind_a_stream_s_work_and_not_before() {
    let mut client = Client::new();
    assert_eq!(client.signal(Some(0), 5), (5, 0));
    assert_eq!(client.signal(None, 6), (6, 0));
    let (stream, spin, until, parameters) = client.spin();
    client.signal(Some(stream), 7);
    client.launch(stream, spin, &parameters);
    let (words, both) = client.words();
    both[0].store(0, Ordering::SeqCst);
    client.post(&Signal {
        context: client.context,
        stream: Some(stream),
        words,
        value: 8,
    });
    // A call behind both has been answered: the device has them.
    let queried = client.forward("cuStreamQuery", &[stream.into()]);
    assert_eq!(queried, Err(codes::NOT_READY));
    assert_eq!(both[0].load(Ordering::SeqCst), 0);
    until.store(1, Ordering::SeqCst);
    let start = Instant::now();
    while both[0].load(Ordering::SeqCst) != 8 {
        assert!(start.elapsed() < LONG, "{both:?}");
        thread::sleep(Duration::from_millis(1));
    }
    // The legacy stream would wait for the other one.
    assert_eq!(client.signal(None, 9), (0, 9));
    assert_eq!(client.signal(Some(1), 10), (0, 10));
}

#[test]
fn a_word_is_refused_while_the_legacy_stream_has_work_and_not_once_that_is_done() {
    let mut client = Client::new();
    let (stream, spin, until, parameters) = client.spin();
    client.launch(0, spin, &parameters);
    assert_eq!(client.signal(Some(stream), 1), (0, 1));
    until.store(1, Ordering::SeqCst);
    // Nobody waits for it in the driver.
    let start = Instant::now();
    while client.forward("cuStreamQuery", &[0]) == Err(codes::NOT_READY) {
        assert!(start.elapsed() < LONG);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(client.signal(Some(stream), 2), (2, 0));
}

#[test]
fn a_context_is_waited_for_with_the_work_of_streams_that_are_gone() {
    let mut client = Client::new();
    let (stream, spin, until, parameters) = client.spin();
    // The device knows the window from then on.
    assert_eq!(client.signal(Some(stream), 3), (3, 0));
    client.launch(stream, spin, &parameters);
    client
        .forward("cuStreamDestroy_v2", &[stream.into()])
        .unwrap();
    assert_eq!(client.signal(None, 1), (0, 1), "the kernel has not ended");
    let ends = thread::spawn(|| {
        thread::sleep(Duration::from_millis(100));
        until.store(1, Ordering::SeqCst);
    });
    let context = client.context;
    client
        .ask(&ContextSynchronize {
            context,
            spares_captures: false,
        })
        .unwrap();
    assert_eq!(until.load(Ordering::SeqCst), 1);
    ends.join().unwrap();
    assert_eq!(client.signal(None, 2), (2, 0));
}

#[test]
fn the_worker_refuses_a_word_while_a_wait_would_say_more() {
    let mut client = Client::new();
    let stream = client.stream();
    assert_eq!(client.signal(Some(stream), 1), (1, 0));
    // An error that nobody has been told.
    let (function, arguments) = Client::arguments("cuEventRecord", &[0x1234, u64::from(stream)]);
    client.post(&Post {
        context: client.context,
        function,
        arguments,
    });
    assert_eq!(client.signal(Some(stream), 2), (0, 2));
    let context = client.context;
    let waited = client.ask(&StreamSynchronize { context, stream });
    assert_eq!(waited, Err(codes::INVALID_HANDLE));
    assert_eq!(client.signal(Some(stream), 3), (3, 0));
    // A function of the client that has not returned.
    let done = client.words().0 + 64;
    let pending = HostFunction {
        context,
        stream,
        number: 1,
        done,
        lasting: false,
        turn: FunctionTurn::Intact(),
    };
    client.ask(&pending).unwrap();
    assert_eq!(client.signal(Some(stream), 4), (0, 4));
    let word = client.window.at(done, 4).unwrap().cast::<AtomicU32>();
    // SAFETY: of the window, aligned.
    unsafe { &*word }.store(1, Ordering::SeqCst);
    client.ask(&StreamSynchronize { context, stream }).unwrap();
    // What is no stream, and no context.
    assert_eq!(client.signal(Some(0x4_0000), 5), (0, 5));
    client.context = 0x4_0000;
    assert_eq!(client.signal(Some(stream), 6), (0, 6));
    client.context = context;
    // Places that are none: the error is told by the next wait, and nothing is written.
    let (start, size) = (client.window.data(), client.window.size());
    for words in [0, start - 8, start + 4, size - 4, size, u64::MAX - 7] {
        let (stream, value) = (Some(stream), 7);
        let signal = Signal {
            context,
            stream,
            words,
            value,
        };
        assert_eq!(client.ask(&signal), Err(codes::INVALID_VALUE), "{words:x}");
    }
    // A kernel that may print: from now on.
    let print = client.kernel(PRINT, c"print");
    client.launch(stream, print, &[0; 16]);
    assert_eq!(client.signal(Some(stream), 8), (0, NEVER));
}

/// Sides of copies that are nobody's, and sizes that do not fit into what is.
fn wild(client: &mut Client) -> Vec<(Side, Side, [u64; 3])> {
    let context = client.context;
    let own = client
        .ask(&Allocate {
            context,
            size: 4096,
            source: Source::Device(),
        })
        .unwrap();
    let (start, size) = (client.window.data(), client.window.size());
    let memory = |at: u64, pitch: u64, height: u64| Side::Memory(at, pitch, height);
    let window = |offset: u64, length: u64| {
        Side::Window(WindowRange {
            offset,
            length,
            stage: None,
        })
    };
    let local = [0u32; 4];
    let here = local.as_ptr() as u64;
    let ours = memory(own, 64, 4);
    let all = [64, 4, 1];
    let mut wild = Vec::new();
    for at in [
        0,
        1,
        here,
        own - 1,
        own + 4096,
        own + 4000,
        u64::MAX,
        u64::MAX - 255,
    ] {
        wild.push((memory(at, 64, 4), ours.clone(), all));
        wild.push((ours.clone(), memory(at, 64, 4), all));
    }
    // Rows and planes further apart than there is memory, or that overlap by wrapping around.
    for (pitch, height) in [
        (u64::MAX, 4),
        (1 << 63, 4),
        (8192, 4),
        (64, u64::MAX),
        (63, 4),
    ] {
        wild.push((memory(own, pitch, height), ours.clone(), [64, 4, 2]));
        wild.push((ours.clone(), memory(own, pitch, height), [64, 4, 2]));
    }
    for size in [
        [0, 1, 1],
        [1, 0, 1],
        [1, 1, 0],
        [u64::MAX; 3],
        [1 << 32; 3],
        [8192, 1, 1],
    ] {
        wild.push((ours.clone(), ours.clone(), size));
    }
    // Of the window: outside, not as long as the copy, and twice.
    for (offset, length) in [
        (0, 256),
        (start - 1, 256),
        (size - 255, 256),
        (size, 256),
        (u64::MAX, 256),
        (start, 255),
        (start, 257),
        (start, u64::MAX),
    ] {
        wild.push((window(offset, length), ours.clone(), all));
        wild.push((ours.clone(), window(offset, length), all));
    }
    // What is no array.
    for array in [0, 1, context, 0x4_0000, u32::MAX] {
        wild.push((Side::Array(array, 0, 0, 0), ours.clone(), all));
        wild.push((ours.clone(), Side::Array(array, 0, 0, 0), all));
    }
    wild
}

/// Behind the worker is a driver that takes any address, so that what is refused has been refused by the
/// worker: see `GANTRY_STAND_IN_TRUSTS`.
#[test]
fn copies_of_rows_and_planes_that_are_nobodys_are_refused_by_the_worker() {
    let mut client = Client::new();
    let context = client.context;
    let graph = client.made("cuGraphCreate", &[0, 0]);
    let empty = {
        let words = [0, u64::from(graph), 0, 0];
        client.made("cuGraphAddEmptyNode", &words)
    };
    for (to, from, size) in wild(&mut client) {
        let told = format!("{to:?} {from:?} {size:?}");
        let copy = CopyVolume {
            context,
            stream: 0,
            to: to.clone(),
            from: from.clone(),
            size,
        };
        assert!(client.ask(&copy).is_err(), "copied: {told}");
        let add = AddCopyNode {
            context,
            graph,
            after: Vec::new(),
            to: to.clone(),
            from: from.clone(),
            size,
        };
        assert!(client.ask(&add).is_err(), "added: {told}");
        let set = SetCopyNode {
            context,
            executable: 0,
            node: empty,
            to,
            from,
            size,
        };
        assert!(client.ask(&set).is_err(), "set: {told}");
    }
    // Graphs, nodes and streams that are none.
    let side = || Side::Memory(0, 64, 4);
    for forged in [0, 1, 15, context, 0x4_0000, u32::MAX] {
        let (to, from, size) = (side(), side(), [64, 4, 1]);
        let add = AddCopyNode {
            context,
            graph: forged,
            after: vec![forged; 4],
            to: to.clone(),
            from: from.clone(),
            size,
        };
        assert!(client.ask(&add).is_err());
        let set = SetCopyNode {
            context,
            executable: forged,
            node: forged,
            to,
            from,
            size,
        };
        assert!(client.ask(&set).is_err());
    }
    // The worker is still there, and copies what is the client's.
    let own = client
        .ask(&Allocate {
            context,
            size: 4096,
            source: Source::Device(),
        })
        .unwrap();
    let start = client.window.data();
    let (to, from) = (
        Side::Memory(own, 64, 4),
        Side::Window(WindowRange {
            offset: start,
            length: 256,
            stage: None,
        }),
    );
    let (stream, size) = (0, [64, 4, 1]);
    let copy = CopyVolume {
        context,
        stream,
        to,
        from,
        size,
    };
    assert_eq!(client.ask(&copy), Ok(()));
}

#[test]
fn nodes_that_call_allocate_or_decide_are_the_client_s_own_or_refused() {
    let mut client = Client::new();
    let context = client.context;
    let graph = client.made("cuGraphCreate", &[0, 0]);
    let (start, size) = (client.window.data(), client.window.size());
    let none = Vec::new;
    // Functions whose words are not in the window, and of graphs and nodes that are none.
    for done in [0, start - 4, start + 2, size - 2, size, u64::MAX - 3] {
        let (after, number) = (none(), 1);
        let add = AddHostNode {
            context,
            graph,
            after,
            number,
            done,
        };
        assert_eq!(client.ask(&add), Err(codes::INVALID_VALUE), "{done:x}");
    }
    let done = start + 64;
    let node = {
        let (after, number) = (none(), 1);
        let add = AddHostNode {
            context,
            graph,
            after,
            number,
            done,
        };
        client.ask(&add).unwrap()
    };
    for forged in [0, 1, context, node, 0x4_0000, u32::MAX] {
        let (after, number) = (vec![forged], 2);
        let add = AddHostNode {
            context,
            graph: forged,
            after: after.clone(),
            number,
            done,
        };
        assert!(client.ask(&add).is_err());
        let (executable, node) = (forged.max(1), forged);
        let set = SetHostNode {
            context,
            executable,
            node,
            number,
            done,
        };
        assert!(client.ask(&set).is_err());
        let (graph, size) = (forged, 4096);
        let allocate = AddAllocNode {
            context,
            graph,
            after: after.clone(),
            size,
        };
        assert!(client.ask(&allocate).is_err());
        let conditional = AddConditionalNode {
            context,
            graph,
            after,
            handle: 1,
            kind: 0,
            size: 1,
        };
        assert!(client.ask(&conditional).is_err());
    }
    // More than there may be, at once and by executable graphs.
    let allocate = |size| AddAllocNode {
        context,
        graph,
        after: Vec::new(),
        size,
    };
    assert_eq!(client.ask(&allocate(u64::MAX)), Err(codes::OUT_OF_MEMORY));
    let most = crate::library::MEMORY << 20;
    let (_, at) = client.ask(&allocate(most / 2)).unwrap();
    let instance = |client: &mut Client| {
        let mut place = 0u64;
        let words = [&raw mut place as u64, u64::from(graph), 0];
        client.forward("cuGraphInstantiateWithFlags", &words)
    };
    let number =
        |answer: Result<Blob, i32>| <(u32, u32)>::from_bytes(&answer.unwrap().0).unwrap().1;
    let first = number(instance(&mut client));
    let second = number(instance(&mut client));
    assert_eq!(instance(&mut client), Err(codes::OUT_OF_MEMORY));
    // Its end where no graph allocates, and of what is the client's by itself.
    let own = client
        .ask(&Allocate {
            context,
            size: 4096,
            source: Source::Device(),
        })
        .map_err(|code| assert_eq!(code, codes::OUT_OF_MEMORY));
    let wild = [0, 1, at + 1, at - 1, u64::MAX];
    for address in wild.into_iter().chain(own) {
        let after = Vec::new();
        let free = AddFreeNode {
            context,
            graph,
            after,
            address,
        };
        assert_eq!(client.ask(&free), Err(codes::INVALID_VALUE), "{address:x}");
    }
    // With the last graph that allocates it, it is nobody's.
    let read = Read {
        context,
        stream: 0,
        from: at,
        to: WindowRange {
            offset: start,
            length: 64,
            stage: None,
        },
    };
    assert_eq!(client.ask(&read), Ok(()));
    for (symbol, object) in [
        ("cuGraphExecDestroy", first),
        ("cuGraphExecDestroy", second),
        ("cuGraphDestroy", graph),
    ] {
        client.forward(symbol, &[object.into()]).unwrap();
    }
    assert_eq!(client.ask(&read), Err(codes::INVALID_VALUE));
    let (address, stream) = (at, None);
    let free = Free {
        context,
        address,
        stream,
    };
    assert_eq!(client.ask(&free), Err(codes::INVALID_VALUE));
}

#[test]
fn graphs_of_nodes_go_with_these_and_not_before() {
    let mut client = Client::new();
    let context = client.context;
    let graph = client.made("cuGraphCreate", &[0, 0]);
    let mut handle = 0u64;
    let words = [&raw mut handle as u64, graph.into(), context.into(), 1, 1];
    let made = client.forward("cuGraphConditionalHandleCreate", &words);
    let (_, handle) = <(u32, u64)>::from_bytes(&made.unwrap().0).unwrap();
    let conditional = AddConditionalNode {
        context,
        graph,
        after: Vec::new(),
        handle,
        kind: 0,
        size: 1,
    };
    let (_, bodies) = client.ask(&conditional).unwrap();
    let body = bodies[0];
    let destroyed = client.forward("cuGraphDestroy", &[body.into()]);
    assert_eq!(destroyed, Err(codes::INVALID_VALUE));
    client.forward("cuGraphDestroy", &[graph.into()]).unwrap();
    // Nor do they outlive them.
    let (after, number) = (Vec::new(), 1);
    let add = AddHostNode {
        context,
        graph: body,
        after,
        number,
        done: client.window.data() + 64,
    };
    assert_eq!(client.ask(&add), Err(codes::INVALID_HANDLE));
}

#[test]
fn user_objects_are_counted_whatever_a_client_says_and_are_not_without_number() {
    let mut client = Client::new();
    let (context, graph) = (client.context, client.made("cuGraphCreate", &[0, 0]));
    let retain = |graph, number, count, moves| RetainUserObject {
        graph,
        number,
        count,
        moves,
    };
    let release = |graph, number, count| ReleaseUserObject {
        graph,
        number,
        count,
    };
    let create = |number| CreateUserObject { number, count: 1 };
    let invalid = Err(codes::INVALID_VALUE);
    assert_eq!(client.ask(&create(1)), Ok(()));
    assert_eq!(client.ask(&create(1)), invalid);
    for number in [0, 2, u64::MAX] {
        assert_eq!(client.ask(&retain(graph, number, 1, false)), invalid);
        assert_eq!(client.ask(&release(graph, number, 1)), invalid);
        assert_eq!(client.ask(&release(0, number, 1)), invalid);
    }
    for forged in [1, context, graph + 1, u32::MAX] {
        assert!(client.ask(&retain(forged, 1, 1, true)).is_err());
        assert!(client.ask(&release(forged, 1, 1)).is_err());
    }
    // Nobody gives up or hands on what it does not have.
    assert_eq!(client.ask(&retain(graph, 1, 2, true)), invalid);
    assert_eq!(client.ask(&release(graph, 1, 1)), invalid);
    assert_eq!(client.ask(&retain(graph, 1, 1, true)), Ok(()));
    assert_eq!(client.ask(&retain(graph, 1, 1, true)), invalid);
    assert_eq!(client.ask(&release(0, 1, 1)), invalid);
    client.forward("cuGraphDestroy", &[graph.into()]).unwrap();
    assert!(client.ask(&release(graph, 1, 1)).is_err());
    assert_eq!(client.ask(&retain(0, 1, 1, false)), invalid);
    // Others are there until there are too many.
    let mut numbers = 2..=65_600;
    let refused = numbers.find_map(|number| client.ask(&create(number)).err());
    assert_eq!(refused, Some(codes::OUT_OF_MEMORY));
    assert_eq!(client.ask(&release(0, 2, 1)), Ok(()));
    assert_eq!(client.ask(&create(100_000)), Ok(()));
}

#[test]
fn what_a_capture_depends_on_is_told_of_the_client_s_own_streams_and_goes_with_them() {
    let mut client = Client::new();
    let (context, stream) = (client.context, client.stream());
    let look = |client: &mut Client, stream| client.ask(&CaptureInfo { context, stream });
    for forged in [stream + 1, context, u32::MAX] {
        assert_eq!(look(&mut client, forged), Err(codes::INVALID_HANDLE));
    }
    let idle = look(&mut client, stream).unwrap();
    assert_eq!((idle.status, idle.graph, idle.after), (0, 0, Vec::new()));
    let begin = [stream.into(), 2];
    client.forward("cuStreamBeginCapture_v2", &begin).unwrap();
    let first = look(&mut client, stream).unwrap();
    assert_eq!((first.status, first.after), (1, Vec::new()));
    let graph = [first.graph.into()];
    // The driver goes on with it and its nodes.
    let node = client.made("cuGraphAddEmptyNode", &[0, graph[0], 0, 0]);
    for (function, one) in [
        ("cuGraphDestroy", first.graph),
        ("cuGraphDestroyNode", node),
    ] {
        let destroyed = client.forward(function, &[one.into()]);
        assert_eq!(
            destroyed,
            Err(codes::STREAM_CAPTURE_UNSUPPORTED),
            "{function}"
        );
    }
    assert_eq!(look(&mut client, stream).unwrap().after, [node]);
    // Of one that has become invalid nothing is left, before its end and behind it.
    let other = client.stream();
    client
        .forward("cuStreamBeginCapture_v2", &[other.into(), 2])
        .unwrap();
    let invalid = look(&mut client, other).unwrap().graph;
    let node = client.made("cuGraphAddEmptyNode", &[0, invalid.into(), 0, 0]);
    let queried = client.forward("cuStreamQuery", &[other.into()]);
    assert_eq!(queried, Err(codes::STREAM_CAPTURE_UNSUPPORTED));
    for _ in 0..2 {
        for (function, one) in [("cuGraphDestroy", invalid), ("cuGraphDestroyNode", node)] {
            let destroyed = client.forward(function, &[one.into()]);
            assert_eq!(destroyed, Err(codes::INVALID_HANDLE), "{function}");
        }
        let mut place = 0u64;
        let end = [other.into(), &raw mut place as u64];
        assert!(client.forward("cuStreamEndCapture", &end).is_err());
    }
    // No graph comes of a capture whose stream goes.
    client
        .forward("cuStreamDestroy_v2", &[stream.into()])
        .unwrap();
    assert_eq!(look(&mut client, stream), Err(codes::INVALID_HANDLE));
    let destroyed = client.forward("cuGraphDestroy", &graph);
    assert_eq!(destroyed, Err(codes::INVALID_HANDLE));
}
