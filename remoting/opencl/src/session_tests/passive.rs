//! A passive worker before an OpenCL that does nothing, and an application that lends its CPU.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use remoting_proto::{
    apis::opencl::{
        OpenCl,
        calls::{
            self, BuildProgram, Call, ContextId, CreateBuffer, CreateContext, CreateKernel,
            CreateProgram, CreateQueue, DeviceId, Finish, Grid, KernelId, MemId, NdRange, Order,
            ProgramId, ProgramOrigin, QueueId, ReadBuffer, SetArgument, SvmAlloc, SvmFree, SvmRead,
            SvmWrite, Value, WindowRange,
        },
        codes,
    },
    wire::{
        Blob, Flags, Header, Wire,
        api::Spoken,
        hello::{Form, Hello},
    },
};
use remoting_session::{
    drain::{self, Cpu, Drained},
    passive::{Offer, Passive},
    quota::Quota,
};
use remoting_transport::{
    endpoint::{Receiver, Sender},
    gate::{self, Delegate, Failed, Gate},
    port_bell::{Doorbell, Waker},
    ring::{Consumer, Producer},
    window::{Slice, Window},
};

use crate::{
    OpenClBackend,
    driver::{Api, adder},
    handlers,
};

const SIZE: usize = 1 << 20;

/// Memory of whole pages.
#[derive(Debug)]
struct Pages(NonNull<u8>);

impl Pages {
    fn layout() -> Layout {
        Layout::from_size_align(SIZE, 4096).unwrap()
    }

    fn new() -> Self {
        // SAFETY: the size is not 0.
        Self(NonNull::new(unsafe { alloc_zeroed(Self::layout()) }).unwrap())
    }

    fn bytes(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.0, SIZE)
    }

    /// A window over them.
    ///
    /// # Safety
    /// The memory is dropped after the window.
    unsafe fn window(&self) -> Arc<Window> {
        let (start, size) = (self.0.as_ptr(), SIZE as u64);
        // SAFETY: the caller's promise.
        unsafe { Window::over(start, size, gate::ring(size), false) }.unwrap()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.0.as_ptr(), Self::layout()) };
    }
}

// SAFETY: the memory goes where the value does.
unsafe impl Send for Pages {}

/// A gate whose other side is in this process.
#[derive(Debug)]
struct Here {
    passive: Arc<Mutex<Passive<OpenClBackend>>>,
    memory: Pages,
    /// How often the server is found busy first.
    busy: Mutex<usize>,
    /// How many delegations there were.
    delegations: Arc<Mutex<usize>>,
}

impl Delegate for Here {
    fn delegate(&self, handler: usize, _: u64, _: u64) -> Result<u64, Failed> {
        let mut busy = self.busy.lock().unwrap();
        if *busy > 0 {
            *busy -= 1;
            return Err(Failed::Busy);
        }
        *self.delegations.lock().unwrap() += 1;
        let mut passive = self.passive.lock().unwrap();
        // SAFETY: the memory lives as long as the gate, which the client keeps.
        Ok(unsafe { passive.delegated(handler, self.memory.bytes()) })
    }

    fn shared(&self) -> NonNull<[u8]> {
        self.memory.bytes()
    }
}

fn offer() -> Offer<OpenClBackend> {
    Offer {
        backend: OpenClBackend::new(Arc::new(Api::null()), &Default::default()),
        quota: Quota::new(1 << 20),
        own: false,
    }
}

/// An application behind a gate.
struct Client {
    calls: Sender<Slice, Doorbell>,
    answers: Receiver<Slice, Doorbell>,
    gate: Arc<Gate>,
    window: Arc<Window>,
    passive: Arc<Mutex<Passive<OpenClBackend>>>,
    delegations: Arc<Mutex<usize>>,
    sequence: u64,
    body: Vec<u8>,
}

impl Client {
    fn new() -> Self {
        let passive = Arc::new(Mutex::new(Passive::new(offer())));
        let here = Here {
            passive: Arc::clone(&passive),
            memory: Pages::new(),
            busy: Mutex::new(2),
            delegations: Arc::default(),
        };
        let delegations = Arc::clone(&here.delegations);
        Self {
            passive,
            delegations,
            ..Self::through(Box::new(here))
        }
    }

    /// Without a way to look at the other side.
    fn through(way: Box<dyn Delegate>) -> Self {
        let (gate, window) = Gate::open::<OpenCl>(way, Duration::from_millis(10)).unwrap();
        let bell = Doorbell::Gate(Arc::clone(&gate));
        let producer = Producer::new(window.calls(), bell.clone());
        Self {
            calls: Sender::new(producer, Duration::ZERO),
            answers: Receiver::new(Consumer::new(window.answers(), bell)),
            gate,
            window,
            passive: Arc::new(Mutex::new(Passive::new(offer()))),
            delegations: Arc::default(),
            sequence: 0,
            body: Vec::new(),
        }
    }

    fn send<C: Call>(
        &mut self,
        call: &C,
        flags: Flags,
    ) -> Result<(), remoting_transport::endpoint::Gone> {
        let mut bytes = Vec::new();
        call.put(&mut bytes);
        self.sequence += 1;
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: flags.with(Flags::ALONE),
            sequence: self.sequence,
        };
        let gate = Arc::clone(&self.gate);
        self.calls.send(header, &bytes, || gate.ended().is_none())
    }

    fn post<C: Call>(&mut self, call: &C) {
        self.send(call, Flags::default()).unwrap();
    }

    fn ask<C: Call>(&mut self, call: &C) -> Result<C::Answer, i32> {
        self.send(call, Flags::ANSWER).unwrap();
        loop {
            match self.answers.poll(&mut self.body).unwrap() {
                Some(header) if header.opcode == calls::ANSWER => {
                    assert_eq!(header.sequence, self.sequence);
                    return Result::from_bytes(&self.body).unwrap();
                }
                Some(_) => {}
                None => self.answers.sleep(|| false),
            }
        }
    }

    fn set_up(&mut self) {
        self.post(&CreateContext {
            id: ContextId(0),
            devices: vec![DeviceId(0)],
            platform: None,
        });
        self.post(&CreateQueue {
            id: QueueId(0),
            context: ContextId(0),
            device: DeviceId(0),
            properties: 0,
            further: Vec::new(),
        });
    }
}

#[test]
fn calls_are_carried_out_and_answered_within_the_delegation_that_rings_for_them() {
    let mut client = Client::new();
    client.set_up();
    let before = *client.delegations.lock().unwrap();
    for _ in 0..100 {
        assert_eq!(client.ask(&Finish { queue: QueueId(0) }), Ok(()));
    }
    // The answer is there when the bell has been rung.
    assert_eq!(*client.delegations.lock().unwrap() - before, 100);
    let refused = client.ask(&Finish { queue: QueueId(9) });
    assert_eq!(refused, Err(codes::INVALID_COMMAND_QUEUE));
}

#[test]
fn programs_are_built_on_the_own_cpu_and_without_a_thread() {
    let mut client = Client::new();
    client.set_up();
    let id = ProgramId(0);
    client.post(&CreateProgram {
        id,
        context: ContextId(0),
        // More than a ring holds.
        origin: ProgramOrigin::Source(Blob(vec![b' '; 300_000])),
    });
    let before = *client.delegations.lock().unwrap();
    let built = client.ask(&BuildProgram {
        id,
        devices: vec![DeviceId(0)],
        options: Blob(Vec::new()),
        folders: 0,
        included: Vec::new(),
    });
    assert_eq!(built, Ok(()));
    let delegations = *client.delegations.lock().unwrap() - before;
    assert!(delegations <= 2, "{delegations}: the answer was late");
}

#[test]
fn what_does_not_fit_into_the_ring_of_answers_is_sent_when_there_is_room() {
    let pages = Pages::new();
    // SAFETY: the memory is dropped after the window.
    let window = unsafe { pages.window() };
    let producer = Producer::new(window.answers(), Waker::Passive);
    let mut sender = Sender::new(producer, Duration::ZERO);
    let mut receiver = Receiver::new(Consumer::new(window.answers(), Waker::Passive));
    let mut unsent = drain::Unsent::default();
    let header = |sequence| Header {
        length: 0,
        opcode: calls::ANSWER,
        flags: Flags::default(),
        sequence,
    };
    let bodies = [vec![1; 10], vec![2; 300_000], Vec::new(), vec![4; 70_000]];
    for (sequence, body) in (0..).zip(&bodies) {
        unsent.add(&mut sender, header(sequence), body).unwrap();
    }
    let mut got = Vec::new();
    let mut body = Vec::new();
    for _ in 0..20 {
        while let Some(header) = receiver.poll(&mut body).unwrap() {
            assert_eq!(header.sequence, got.len() as u64);
            got.push(body.clone());
        }
        if unsent.send(&mut sender).unwrap() && got.len() == bodies.len() {
            break;
        }
    }
    assert!(got == bodies);
}

#[test]
fn a_message_that_never_ends_ends_the_worker() {
    let mut client = Client::new();
    let header = Header {
        length: 0,
        opcode: 1,
        flags: Flags::MORE,
        sequence: 1,
    };
    let mut producer = Producer::new(client.window.calls(), Waker::Passive);
    producer.push(&header.to_bytes(), &[]).unwrap();
    client.gate.drain();
    assert!(client.gate.ended().is_some());
    // Nobody waits for ever, and nothing is called any more.
    let before = *client.delegations.lock().unwrap();
    let sent = client.send(&Finish { queue: QueueId(0) }, Flags::ANSWER);
    assert_eq!(sent, Ok(()));
    client.answers.sleep(|| false);
    assert_eq!(*client.delegations.lock().unwrap(), before);
}

#[test]
fn a_second_hello_and_calls_before_the_first_end_the_worker() {
    let pages = Pages::new();
    let mut passive = Passive::new(offer());
    assert_eq!(passive.drain(Cpu::Caller), None);
    // SAFETY: the memory is dropped last.
    assert!(!unsafe { passive.handshake(pages.bytes()) });
    let client = Client::new();
    let mut passive = client.passive.lock().unwrap();
    assert_eq!(passive.drain(Cpu::Caller), Some(Drained::Empty));
    // SAFETY: as above.
    assert!(!unsafe { passive.handshake(pages.bytes()) });
    assert_eq!(passive.drain(Cpu::Caller), None);
}

#[test]
fn an_application_of_another_version_learns_both() {
    let pages = Pages::new();
    let mut passive = Passive::new(offer());
    let ours = Hello::answer(
        Spoken::of::<OpenCl>(),
        Form::File,
        (SIZE as u64, gate::ring(SIZE as u64)),
    );
    let mut theirs = Hello::client::<OpenCl>();
    theirs.version.number += 1;
    // SAFETY: the memory is dropped last.
    let window = unsafe { pages.window() };
    window.write_client_hello(&theirs.to_bytes());
    // SAFETY: as above.
    assert!(unsafe { passive.handshake(pages.bytes()) });
    assert_eq!(Hello::check_for::<OpenCl>(&window.answer()).unwrap(), ours);
    assert_eq!(passive.drain(Cpu::Caller), None);
}

#[test]
fn memory_that_is_too_small_for_rings_is_refused() {
    let pages = Pages::new();
    let small = NonNull::slice_from_raw_parts(pages.0, 128 << 10);
    // SAFETY: the memory is dropped last.
    assert!(!unsafe { Passive::new(offer()).handshake(small) });
}

#[test]
fn a_ring_that_makes_no_sense_ends_the_worker_for_its_application_only() {
    let client = Client::new();
    let header = Header {
        length: gate::ring(SIZE as u64) as u32,
        opcode: 1,
        flags: Flags::default(),
        sequence: 1,
    };
    let mut producer = Producer::new(client.window.calls(), Waker::Passive);
    producer.push(&header.to_bytes(), &[]).unwrap();
    client.gate.drain();
    assert!(client.gate.ended().is_some());
}

/// The handlers as a gate calls them.
#[derive(Debug)]
struct Handled;

impl Delegate for Handled {
    fn delegate(&self, handler: usize, first: u64, second: u64) -> Result<u64, Failed> {
        Ok(handlers::HANDLERS[handler](first, second))
    }

    fn shared(&self) -> NonNull<[u8]> {
        shared()
    }
}

fn shared() -> NonNull<[u8]> {
    static MEMORY: OnceLock<Pages> = OnceLock::new();
    MEMORY.get_or_init(Pages::new).bytes()
}

// SAFETY: the memory is only handed out as raw pointers.
unsafe impl Sync for Pages {}

/// From here on, whatever this process asks its kernel for but to end kills it.
fn forbid_system_calls() {
    let step = |code: u32, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf,
        k,
    };
    let mut steps = [
        // The call's number is first in what is looked at.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            1,
            libc::SYS_exit as u32,
        ),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
        step(
            libc::BPF_RET | libc::BPF_K,
            0,
            libc::SECCOMP_RET_KILL_PROCESS,
        ),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: the program and its steps outlive the calls.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let filter = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program),
            0
        );
    }
}

/// What an application does before it ends, in a process of its own.
fn compute_without_a_kernel() {
    const WORDS: u32 = 1000;
    let surroundings = handlers::Surroundings {
        shared,
        slow: |first, second| handlers::own(first, second),
    };
    let passive = Passive::new(Offer {
        backend: OpenClBackend::new(Arc::new(adder::open()), &Default::default()),
        ..offer()
    });
    handlers::install(passive, surroundings, 4 << 20).unwrap();
    let _ = shared();
    forbid_system_calls();
    let mut client = Client::through(Box::new(Handled));
    client.set_up();
    client.post(&CreateBuffer {
        id: MemId(0),
        context: ContextId(0),
        flags: 1,
        size: 4 * u64::from(WORDS),
        contents: None,
        lives: None,
        svm: None,
    });
    client.post(&CreateProgram {
        id: ProgramId(0),
        context: ContextId(0),
        origin: ProgramOrigin::Source(Blob(b"add".to_vec())),
    });
    client.post(&CreateKernel {
        id: KernelId(0),
        program: ProgramId(0),
        name: Blob(b"add".to_vec()),
    });
    for (index, value) in [
        (0, Value::Mem(Some(MemId(0)))),
        (1, Value::Bytes(Blob(7u32.to_le_bytes().to_vec()))),
    ] {
        client.post(&SetArgument {
            kernel: KernelId(0),
            index,
            value,
        });
    }
    let order = || Order {
        queue: QueueId(0),
        wait: Vec::new(),
        event: None,
    };
    for _ in 0..3 {
        client.post(&NdRange {
            order: order(),
            kernel: KernelId(0),
            grid: Grid::line(u64::from(WORDS)),
        });
    }
    let to = WindowRange {
        offset: client.window.data(),
        length: 4 * u64::from(WORDS),
        stage: None,
    };
    let at = client.window.at(to.offset, to.length).unwrap();
    let read = ReadBuffer {
        order: order(),
        mem: MemId(0),
        offset: 0,
        to,
    };
    assert_eq!(client.ask(&read), Ok(()));
    for word in 0..WORDS as usize {
        // SAFETY: within the stretch.
        assert_eq!(unsafe { at.cast::<u32>().add(word).read_volatile() }, 21);
    }
    compute_in_shared_memory(&mut client);
    assert_eq!(client.ask(&Finish { queue: QueueId(0) }), Ok(()));
    // The memory is a static's.
    std::mem::forget(client);
}

/// What is in the window goes to where the device has the same addresses, is added to and comes
/// back.
fn compute_in_shared_memory(client: &mut Client) {
    let alloc = SvmAlloc {
        context: ContextId(0),
        flags: 0,
        size: 4096,
        retries: 0,
    };
    let address = client.ask(&alloc).unwrap();
    let place = WindowRange {
        offset: client.window.data(),
        length: 4096,
        stage: None,
    };
    let order = || Order {
        queue: QueueId(0),
        wait: Vec::new(),
        event: None,
    };
    let at = client.window.at(place.offset, place.length).unwrap();
    // SAFETY: within the stretch.
    let before = unsafe { at.cast::<u32>().add(9).read_volatile() };
    client.post(&SvmWrite {
        order: order(),
        address,
        from: place.clone(),
    });
    client.post(&SetArgument {
        kernel: KernelId(0),
        index: 0,
        value: Value::Svm(Some(address + 4)),
    });
    client.post(&NdRange {
        order: order(),
        kernel: KernelId(0),
        grid: Grid::line(10),
    });
    let read = SvmRead {
        order: order(),
        address,
        to: place,
    };
    assert_eq!(client.ask(&read), Ok(()));
    // SAFETY: as above.
    let after = unsafe { at.cast::<u32>().add(9).read_volatile() };
    assert_eq!(after, before + 7);
    assert_eq!(client.ask(&SvmFree { address }), Ok(()));
}

#[test]
fn an_application_computes_while_no_system_call_is_possible() {
    // In a process of its own: what other tests have in theirs, such as drivers, decides what the allocator has at hand.
    const ALONE: &str = "GANTRY_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name =
            "session::passive::tests::an_application_computes_while_no_system_call_is_possible";
        let program = std::env::current_exe().unwrap();
        let mut alone = std::process::Command::new(program);
        let status = alone.args(["--exact", name]).env(ALONE, "1").status();
        assert!(status.unwrap().success());
        return;
    }
    // SAFETY: the child uses nothing that another thread may hold but the allocator, which the C
    // library puts in order.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        compute_without_a_kernel();
        // SAFETY: the only way to end that is allowed.
        unsafe { libc::syscall(libc::SYS_exit, 77) };
    }
    let mut status = 0;
    // SAFETY: of a child of this process.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(
        libc::WIFEXITED(status),
        "it made a system call: {status:#x}"
    );
    assert_eq!(libc::WEXITSTATUS(status), 77);
}
