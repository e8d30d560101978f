//! Remoting by delegation: a worker on a device that adds, and an application that sends it calls
//! through rings in the shared memory, which are executed by the application's own vCPU.

use std::{arch::x86_64::_rdtsc, fmt, ptr::NonNull, rc::Rc, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use remoting_opencl::{
    OpenClBackend,
    driver::adder,
    handlers::{self, Handler, Surroundings},
};
use remoting_proto::{
    apis::opencl::{
        OpenCl,
        calls::{
            self, BuildProgram, Call, ContextId, CreateBuffer, CreateContext, CreateKernel,
            CreateProgram, CreateQueue, DeviceId, Finish, Grid, KernelId, MemId, NdRange, Order,
            ProgramId, ProgramOrigin, QueueId, ReadBuffer, SetArgument, StageId, SvmAlloc, SvmFree,
            SvmRead, SvmWrite, Value, WindowRange, WriteBuffer,
        },
    },
    wire::{Blob, Flags, Header, Wire},
};
use remoting_session::{
    passive::{Offer, Passive},
    quota::Quota,
};
use remoting_transport::{
    endpoint::{Receiver, Sender},
    gate::{Delegate, Failed, Gate},
    port_bell::Doorbell,
    ring::{Consumer, Producer},
    window::{Slice, Window},
};
use vmfunc_gate::guest::{self, Client, Failure};

/// The worker's handlers.
pub const HANDLERS: [Handler; 2] = handlers::HANDLERS;
/// The first argument of its slow work.
pub const SLOW: u64 = u64::MAX;
/// The size of the worker's memory, which is locked.
const HEAP: usize = 2 << 20;
/// The number of synchronous calls in the measurement.
const CALLS: u64 = 1000;
/// The number of words that the device adds to.
const WORDS: usize = 1000;

/// Creates a worker for one application.
pub fn prepare() -> Result<()> {
    let surroundings = Surroundings {
        shared: guest::shared,
        slow: |_, _| guest::slow(SLOW, 0),
    };
    let passive = Passive::new(Offer {
        backend: OpenClBackend::new(Arc::new(adder::open()), &Default::default()),
        quota: Quota::new(1 << 20),
        own: false,
    });
    handlers::install(passive, surroundings, HEAP).context("cannot keep memory ready")
}

/// The slow work for [`SLOW`].
pub fn slow_work() -> u64 {
    handlers::own(0, 0)
}

/// An application's side.
struct Application {
    calls: Sender<Slice, Doorbell>,
    answers: Receiver<Slice, Doorbell>,
    window: Arc<Window>,
    gate: Arc<Gate>,
    sequence: u64,
    call: Vec<u8>,
    body: Vec<u8>,
}

impl Application {
    fn send<C: Call>(&mut self, call: &C, flags: Flags) -> Result<()> {
        self.call.clear();
        call.put(&mut self.call);
        self.sequence += 1;
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: flags.with(Flags::ALONE),
            sequence: self.sequence,
        };
        let gate = &self.gate;
        self.calls
            .send(header, &self.call, || gate.ended().is_none())?;
        Ok(())
    }

    fn post<C: Call>(&mut self, call: &C) -> Result<()> {
        self.send(call, Flags::default())
    }

    fn ask<C: Call>(&mut self, call: &C) -> Result<C::Answer> {
        self.send(call, Flags::ANSWER)?;
        loop {
            match self.answers.poll(&mut self.body)? {
                Some(header) if header.opcode == calls::ANSWER => {
                    ensure!(header.sequence == self.sequence, "{header:?}");
                    let answer = Result::<C::Answer, i32>::from_bytes(&self.body)?;
                    return answer.map_err(|code| anyhow!("code {code}"));
                }
                Some(_) => {}
                None => {
                    if let Some(why) = self.gate.ended() {
                        return Err(anyhow!("{why}"));
                    }
                    self.answers.sleep(|| false);
                }
            }
        }
    }

    /// A stretch of the window.
    fn data(&self, offset: u64, length: u64) -> Result<*mut u8> {
        self.window.at(offset, length).context("a small window")
    }
}

fn order() -> Order {
    Order {
        queue: QueueId(0),
        wait: Vec::new(),
        event: None,
    }
}

/// Computes by delegations, checks the results, and measures calls. The worker's handlers start at
/// the index `first`. Returns the figures as text.
pub fn compute(client: Client, first: usize) -> Result<Vec<String>> {
    let client = Rc::new(client);
    let way = Box::new(Way {
        client: Rc::clone(&client),
        first,
    });
    // The host's interrupts are not counted.
    let exits = || client.exits();
    let (gate, window) = Gate::open::<OpenCl>(way, Duration::from_millis(100))?;
    let bell = Doorbell::Gate(Arc::clone(&gate));
    let mut app = Application {
        calls: Sender::new(Producer::new(window.calls(), bell.clone()), Duration::ZERO),
        answers: Receiver::new(Consumer::new(window.answers(), bell)),
        window,
        gate,
        sequence: 0,
        call: Vec::with_capacity(4096),
        body: Vec::with_capacity(4096),
    };
    let (context, queue, mem, kernel) = (ContextId(0), QueueId(0), MemId(0), KernelId(0));
    let length = 4 * WORDS as u64;
    create(&mut app, (context, queue, mem, kernel), length)?;
    let rounds = sums(&mut app, (mem, kernel), length)?;
    shared(&mut app, context, (mem, kernel))?;
    // Pages that are only mapped on first use are mapped now.
    for _ in 0..10 {
        app.ask(&Finish { queue })?;
    }
    let before = exits();
    let mut least = u64::MAX;
    // SAFETY: every processor supports it.
    let start = unsafe { _rdtsc() };
    for _ in 0..CALLS {
        // SAFETY: as above.
        let start = unsafe { _rdtsc() };
        app.ask(&Finish { queue })?;
        // SAFETY: as above.
        least = least.min(unsafe { _rdtsc() } - start);
    }
    // SAFETY: as above.
    let mean = (unsafe { _rdtsc() } - start) / CALLS;
    let found = exits().wrapping_sub(before);
    let refused = app.ask(&Finish { queue: QueueId(7) });
    ensure!(refused.is_err(), "a queue that does not exist");
    let mut least_enqueue = u64::MAX;
    let command = NdRange {
        order: order(),
        kernel,
        grid: Grid::line(1),
    };
    for _ in 0..CALLS {
        // SAFETY: as above.
        let start = unsafe { _rdtsc() };
        app.post(&command)?;
        // SAFETY: as above.
        least_enqueue = least_enqueue.min(unsafe { _rdtsc() } - start);
    }
    ensure!(found == 0, "{found} exits in the server");
    Ok(vec![
        format!("sums by delegations that are right: {rounds}"),
        format!(
            "instructions of a synchronous call by delegation (finish, both sides' work): \
             {least}, mean of {CALLS} with interrupts {mean}"
        ),
        format!("instructions of an enqueue by delegation, both sides' work: {least_enqueue}"),
        format!(
            "exits in the server of {CALLS} synchronous calls, interrupts not counted: {found}"
        ),
    ])
}

/// Creates the objects that the calls use.
fn create(
    app: &mut Application,
    (context, queue, mem, kernel): (ContextId, QueueId, MemId, KernelId),
    length: u64,
) -> Result<()> {
    app.post(&CreateContext {
        id: context,
        devices: vec![DeviceId(0)],
        platform: None,
    })?;
    app.post(&CreateQueue {
        id: queue,
        context,
        device: DeviceId(0),
        properties: 0,
        further: Vec::new(),
    })?;
    app.post(&CreateBuffer {
        id: mem,
        context,
        flags: 1,
        size: length,
        contents: None,
        lives: None,
        svm: None,
    })?;
    let program = ProgramId(0);
    app.post(&CreateProgram {
        id: program,
        context,
        origin: ProgramOrigin::Source(Blob(b"kernel void add()".to_vec())),
    })?;
    // Executed as slow work.
    app.ask(&BuildProgram {
        id: program,
        devices: vec![DeviceId(0)],
        options: Blob(Vec::new()),
        folders: 0,
        included: Vec::new(),
    })?;
    app.post(&CreateKernel {
        id: kernel,
        program,
        name: Blob(b"add".to_vec()),
    })?;
    app.ask(&Finish { queue })
}

/// Sends buffers through the window, has the device add to them, and reads them back.
fn sums(app: &mut Application, (mem, kernel): (MemId, KernelId), length: u64) -> Result<u32> {
    const ROUNDS: u32 = 20;
    let to = app.window.data();
    let from = to + length.next_multiple_of(4096);
    for round in 1..=ROUNDS {
        let input = app.data(to, length)?.cast::<u32>();
        for word in 0..WORDS {
            // SAFETY: within the stretch, which nobody else uses now.
            unsafe { input.add(word).write_volatile(round * word as u32) };
        }
        let place = |offset| WindowRange {
            offset,
            length,
            stage: None::<StageId>,
        };
        app.post(&WriteBuffer {
            order: order(),
            mem,
            offset: 0,
            from: place(to),
        })?;
        for (index, value) in [
            (0, Value::Mem(Some(mem))),
            (1, Value::Bytes(Blob(round.to_le_bytes().to_vec()))),
        ] {
            app.post(&SetArgument {
                kernel,
                index,
                value,
            })?;
        }
        app.post(&NdRange {
            order: order(),
            kernel,
            grid: Grid::line(WORDS as u64),
        })?;
        app.ask(&ReadBuffer {
            order: order(),
            mem,
            offset: 0,
            to: place(from),
        })?;
        let output = app.data(from, length)?.cast::<u32>();
        for word in 0..WORDS {
            // SAFETY: as above.
            let found = unsafe { output.add(word).read_volatile() };
            let right = round * word as u32 + round;
            ensure!(found == right, "word {word} is {found} instead of {right}");
        }
    }
    Ok(ROUNDS)
}

/// The same with memory that has the same addresses on both sides.
fn shared(
    app: &mut Application,
    context: ContextId,
    (mem, kernel): (MemId, KernelId),
) -> Result<()> {
    let length = 4096;
    let address = app.ask(&SvmAlloc {
        context,
        flags: 0,
        size: length,
        retries: 0,
    })?;
    let place = WindowRange {
        offset: app.window.data(),
        length,
        stage: None::<StageId>,
    };
    let word = app.data(place.offset, length)?.cast::<u32>();
    // SAFETY: within the stretch, which nobody else uses now.
    unsafe { word.write_volatile(40) };
    app.post(&SvmWrite {
        order: order(),
        address,
        from: place.clone(),
    })?;
    for (index, value) in [
        (0, Value::Svm(Some(address))),
        (1, Value::Bytes(Blob(2u32.to_le_bytes().to_vec()))),
    ] {
        app.post(&SetArgument {
            kernel,
            index,
            value,
        })?;
    }
    app.post(&NdRange {
        order: order(),
        kernel,
        grid: Grid::line(1),
    })?;
    app.ask(&SvmRead {
        order: order(),
        address,
        to: place,
    })?;
    // SAFETY: as above.
    let found = unsafe { word.read_volatile() };
    ensure!(found == 42, "the word at {address:#x} is {found}");
    // The kernel must not run with an address of freed memory.
    app.post(&SetArgument {
        kernel,
        index: 0,
        value: Value::Mem(Some(mem)),
    })?;
    app.ask(&SvmFree { address })
}

/// This process's gate.
struct Way {
    client: Rc<Client>,
    /// The index of the first of the worker's handlers.
    first: usize,
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Way")
    }
}

// SAFETY: this process has one thread.
unsafe impl Send for Way {}

impl Delegate for Way {
    fn delegate(
        &self,
        handler: usize,
        first: u64,
        second: u64,
    ) -> std::result::Result<u64, Failed> {
        self.client
            .delegate(self.first + handler, first, second)
            .map_err(|failure| match failure {
                Failure::Busy | Failure::Awake => Failed::Busy,
                other => Failed::Ended(other.to_string()),
            })
    }

    fn shared(&self) -> NonNull<[u8]> {
        self.client.shared()
    }
}
