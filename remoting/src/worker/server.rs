//! The serving thread: takes calls, gives answers, and waits for the driver's events.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    cover::Cover,
    lent::Lent,
    limit::Limit,
    notice::{Board, Notice, Reporter},
    objects::{Context, Device, Event, Home, Kernel, Mem, Program, Queue, Sampler},
    platform::Platform,
    quota::Quota,
    sharing::Sharing,
    svm::Allocations,
    table::Table,
    watch::Watch,
};
use crate::{
    opencl::{
        api::{Api, Handle},
        codes,
    },
    protocol::{
        Blob, Flags, Header, Malformed, Request, Wire,
        calls::{self, ContextId, StageId},
        frame,
    },
    transport::{
        bell::Bell,
        link::{Gone, Receiver, STAY, Sender, Spin},
        port_bell::Waker,
        ring::{Consumer, Lines, Producer},
        window::{Slice, Window},
    },
    turns::message::OtherArbiter,
};

/// Calls a function of the driver. The one place where the worker's promises to it are stated.
macro_rules! cl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let api = &$api;
        // SAFETY: handles come from the tables, each of whose entries owns a reference; pointers
        // are to locals that outlive the call, of the sizes that are passed beside them, or into
        // the window, checked against its bounds, which stays mapped while the worker lives. One
        // thing is left to the driver: plain bytes of a client for a kernel's argument of which it
        // does not say whether that is a handle, which it has to check; who deceives it has nobody's
        // worker but its own.
        unsafe { api.$name($($arg),*) }
    }};
}
pub(super) use cl;

/// After a wait of this length, the serving thread is no longer held up by the driver's waits: it
/// can sleep until an event wakes it, and costs its host nothing meanwhile. The end is seen as late
/// then as `watch` looks: by 1 % of the wait.
const LONG: Duration = STAY;
/// The same where others share the device, to whom it may have to be given meanwhile.
pub(super) const LONG_FOR_OTHERS: Duration = Duration::from_millis(2);
/// The most contexts at a time: on a GPU each has memory of the device that no quota sees.
const MOST_CONTEXTS: u32 = 256;
/// The most calls of an application that wait at a time: each is one of its threads.
const MOST_WAITS: usize = 64 << 10;
/// A stage has so many bytes of the window, at least, which it shares with one other at most: what is
/// mapped has one, and what ends the mapping another.
const STAGE: u64 = 4096;
/// How many calls are taken before notices and waits are looked at.
const BATCH: usize = 64;

/// Why a worker ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The rings cannot be used any more.
    #[error("the application's rings are unusable")]
    Gone(#[from] Gone),
    /// The application's driver sent something else than calls.
    #[error("the application sent what is no call")]
    Malformed(#[from] Malformed),
    /// It would wait for the device for ever.
    #[error("the device cannot be shared")]
    Apart(#[from] OtherArbiter),
    /// The application's driver sent more calls of a kind than it has memory or threads for.
    #[error(
        "the application has {stages} stages under way and {waits} waiting calls: more than there \
         can be"
    )]
    Crowded {
        /// Stages that have not been released, or that it has not been told of.
        stages: usize,
        /// Calls without an answer.
        waits: usize,
    },
}

/// What an application waits for: its answer is due when these events have completed.
#[derive(Debug)]
struct Wait {
    /// None without threads: how long it takes changes nothing then.
    since: Option<Instant>,
    sequence: u64,
    events: Vec<Handle>,
    /// Whether an event's failure is the answer.
    failures: bool,
    /// A code that is to be reported in any case.
    code: i32,
    /// Whether this thread is going to be woken.
    armed: bool,
}

/// A stretch of the window in use.
#[derive(Debug)]
struct Use {
    stage: StageId,
    /// Of the command that uses it.
    event: Handle,
    /// Whether this thread is going to be woken.
    armed: bool,
}

/// Serves one application.
#[derive(Debug)]
pub struct Server {
    pub(super) api: Arc<Api>,
    pub(super) window: Arc<Window>,
    pub(super) platforms: Vec<Platform>,
    pub(super) devices: Table<Device>,
    pub(super) contexts: Table<Context>,
    pub(super) queues: Table<Queue>,
    pub(super) mems: Table<Mem>,
    pub(super) svm: Allocations,
    pub(super) samplers: Table<Sampler>,
    pub(super) programs: Table<Program>,
    pub(super) kernels: Table<Kernel>,
    pub(super) events: Table<Event>,
    pub(super) board: Arc<Board>,
    pub(super) cover: Cover,
    /// What the driver has been given for the callback of each context.
    pub(super) reporters: HashMap<ContextId, Box<Reporter>>,
    /// User events that have no status yet: commands may wait for what the client does next.
    pub(super) undecided: usize,
    /// Callbacks of the client that the driver has not called yet.
    pub(super) expected: usize,
    /// Builds that are under way, in threads of their own.
    pub(super) building: usize,
    /// Where files for the driver's compiler go, if anywhere.
    pub(super) files: Option<PathBuf>,
    /// How long the last wait took.
    pub(super) last_wait: Duration,
    pub(super) quota: Arc<Quota>,
    /// Stages whose commands have not been seen to complete.
    stages: VecDeque<Use>,
    /// Stages whose release the client has not been told; whether their data is good.
    released: Vec<(StageId, bool)>,
    waits: Vec<Wait>,
    pub(super) sender: Sender<Slice, Waker>,
    /// The last wait after which this thread is no longer held up by the driver's.
    pub(super) patience: Duration,
    /// On a CPU that the application lends: there is no other thread then, and nothing is waited
    /// for.
    pub(super) lent: Option<Lent>,
    /// Wakes who waits for an answer.
    waker: Waker,
    /// Wakes the client's listener.
    pub(super) nudge: Nudge,
    pub(super) sharing: Sharing,
    /// Since the first sleep with commands under way.
    watch: Option<Watch>,
    /// Looks after the time that commands run, if that is limited.
    pub(super) limit: Option<Limit>,
    scratch: Vec<u8>,
}

/// Wakes the client's listener.
pub struct Nudge(pub Box<dyn Fn() + Send>);

impl std::fmt::Debug for Nudge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Nudge")
    }
}

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// How long to poll before sleeping.
    pub spin: Duration,
    /// How to sleep, and to wake the application.
    pub waker: Waker,
    /// Part of the names of the devices that are offered; all if empty.
    pub device: String,
    /// How much device memory the application may have.
    pub quota: Arc<Quota>,
}

impl Server {
    /// A server for the application at the other end of `window`.
    pub fn new(
        api: Arc<Api>,
        window: Arc<Window>,
        tuning: Tuning,
        nudge: Nudge,
    ) -> (Self, Receiver<Slice, Waker>) {
        let bell = tuning.waker;
        let lent = matches!(bell, Waker::Lent);
        let mut devices = Table::new(codes::INVALID_DEVICE);
        let platforms = Platform::all(&api, &tuning.device, &mut devices);
        let server = Self {
            devices,
            contexts: Table::new(codes::INVALID_CONTEXT).up_to(MOST_CONTEXTS),
            queues: Table::new(codes::INVALID_COMMAND_QUEUE),
            mems: Table::new(codes::INVALID_MEM_OBJECT),
            svm: Allocations::default(),
            samplers: Table::new(codes::INVALID_SAMPLER),
            programs: Table::new(codes::INVALID_PROGRAM),
            kernels: Table::new(codes::INVALID_KERNEL),
            events: Table::new(codes::INVALID_EVENT),
            board: Board::new(window.calls(), bell.own()),
            quota: tuning.quota,
            cover: Cover::new(platforms.len()),
            reporters: HashMap::new(),
            undecided: 0,
            expected: 0,
            building: 0,
            files: None,
            last_wait: Duration::ZERO,
            stages: VecDeque::new(),
            released: Vec::new(),
            waits: Vec::new(),
            sender: Sender::new(Producer::new(window.answers(), bell.clone()), tuning.spin),
            patience: if lent { Duration::ZERO } else { LONG },
            lent: lent.then(Lent::default),
            waker: bell.clone(),
            nudge,
            sharing: Sharing::default(),
            watch: None,
            limit: None,
            scratch: Vec::new(),
            api,
            window,
            platforms,
        };
        let receiver = Receiver::new(Consumer::new(server.window.calls(), bell));
        (server, receiver)
    }

    /// Lets the driver's compiler have headers of the application, in files in this folder. It is
    /// named so in the options that the driver gets.
    pub fn keep_files_in(&mut self, folder: &Path) {
        self.files = Some(folder.to_owned());
    }

    /// Limits the time that a command may run: `exceeded` gets the time of one that runs longer.
    pub fn limit(
        &mut self,
        limit: Duration,
        exceeded: impl Fn(Duration) + Send + 'static,
    ) -> std::io::Result<()> {
        let (api, board) = (Arc::clone(&self.api), Arc::clone(&self.board));
        self.limit = Some(Limit::start(api, board, limit, exceeded)?);
        Ok(())
    }

    /// Whether the driver has all the commands whose time can be looked after, and does not wait
    /// for the client with any of them.
    pub(super) fn has_all(&self) -> bool {
        self.undecided == 0 && self.limit.as_ref().is_some_and(Limit::is_full)
    }

    /// Whether calls are left in the ring for now.
    fn takes_nothing(&self) -> bool {
        self.is_full() || self.builds_enough() || self.has_all()
    }

    /// Serves until the application's rings become unusable.
    pub fn run(mut self, mut calls: Receiver<Slice, Waker>, spin: Duration) -> Result<(), Error> {
        let mut body = Vec::new();
        let mut spin = Spin::new(spin);
        loop {
            if self.turn(&mut calls, &mut body)? {
                spin.reset();
            } else if !spin.again() && !self.ends_soon() {
                self.arm();
                self.before_sleep();
                let board = Arc::clone(&self.board);
                if self.takes_nothing() {
                    calls.rest(|| board.any());
                } else {
                    calls.sleep(|| board.any());
                }
            }
        }
    }

    /// Does what there is to do, up to a bound. Whether there was something.
    pub fn turn(
        &mut self,
        calls: &mut Receiver<Slice, Waker>,
        body: &mut Vec<u8>,
    ) -> Result<bool, Error> {
        let mut busy = self.serve_held()?;
        for _ in 0..BATCH {
            if self.takes_nothing() {
                break;
            }
            let Some(header) = calls.poll(body)? else {
                break;
            };
            busy = true;
            let request = Request::decode(header.opcode, body)?;
            self.serve_in_turn(header, request, body.len())?;
        }
        if busy {
            self.give_way();
        }
        busy |= self.notices()?;
        busy |= self.poll_waits()?;
        Ok(busy || self.pass_on()?)
    }

    /// Wakes who sleeps until there is an answer, although there is none yet.
    pub(super) fn rouse_client(&self) {
        let answers = self.window.answers();
        self.waker.ring(&answers.control().items.0);
    }

    /// Whether there are threads beside the serving one.
    pub(super) fn has_threads(&self) -> bool {
        self.lent.is_none()
    }

    /// Sends a message to the client.
    fn send(&mut self, opcode: u16, sequence: u64, body: &[u8]) -> Result<(), Gone> {
        let header = Header {
            length: 0,
            opcode,
            flags: Flags::default(),
            sequence,
        };
        if let Some(lent) = &mut self.lent {
            return lent.unsent.add(&mut self.sender, header, body);
        }
        let (api, queues, undecided) = (&self.api, &self.queues, self.undecided);
        let sharing = RefCell::new(&mut self.sharing);
        // The client's end ends this process: it is not looked for while waiting for room.
        self.sender.send(header, body, || {
            sharing.borrow_mut().let_go(api, queues, undecided);
            true
        })
    }

    /// Tells the client which stages are its own again: before each answer, so that what a wait
    /// has waited for is in place when it ends.
    fn tell_released(&mut self) -> Result<(), Gone> {
        let mut pending = std::mem::take(&mut self.stages);
        pending.retain(|used| !self.is_over(used));
        self.stages = pending;
        for (stage, good) in std::mem::take(&mut self.released) {
            let mut body = Vec::with_capacity(8);
            stage.put(&mut body);
            good.put(&mut body);
            self.send(calls::RELEASED, 0, &body)?;
        }
        Ok(())
    }

    /// Whether a stage's command has completed; the stage is released then.
    fn is_over(&mut self, used: &Use) -> bool {
        let status = self.status(used.event);
        if status > 0 {
            return false;
        }
        cl!(self.api, clReleaseEvent(used.event));
        self.released.push((used.stage, status == 0));
        true
    }

    /// Passes on the oldest stages as soon as they are released, if somebody waits: a large
    /// read's first pieces reach their place while the last are on their way. (Who does not wait
    /// does not read, and the ring of answers would fill up.) Whether there was one.
    pub(super) fn pass_on(&mut self) -> Result<bool, Gone> {
        if self.waits.is_empty() {
            return Ok(false);
        }
        while let Some(used) = self.stages.pop_front() {
            if !self.is_over(&used) {
                self.stages.push_front(used);
                break;
            }
        }
        if self.released.is_empty() {
            return Ok(false);
        }
        self.tell_released()?;
        Ok(true)
    }

    /// Whether this thread may be held up until commands have completed: if the client has one
    /// thread, and that one waits; if nothing that commands wait for is up to the client; and if
    /// nobody else is to be told of anything meanwhile.
    pub(super) fn may_stay(&self, header: Header) -> bool {
        header.flags.has(Flags::ANSWER)
            && header.flags.has(Flags::ALONE)
            && self.undecided == 0
            && self.expected == 0
            && self.stages.is_empty()
            && self.last_wait < self.patience
    }

    /// Has the driver of a context's platform know a stretch of the window.
    pub(super) fn reach(&mut self, home: Home, offset: u64, length: u64) {
        let of = (home.platform, home.raw);
        self.cover
            .reach(&self.api, &self.window, of, offset, length);
    }

    /// Answers a call that wants an answer.
    pub(super) fn answer<T: Wire>(
        &mut self,
        header: Header,
        outcome: &Result<T, i32>,
    ) -> Result<(), Gone> {
        if !header.flags.has(Flags::ANSWER) {
            return Ok(());
        }
        self.tell_released()?;
        let mut body = std::mem::take(&mut self.scratch);
        body.clear();
        outcome.put(&mut body);
        if body.len() > frame::LARGEST {
            body.clear();
            Err::<(), i32>(codes::OUT_OF_HOST_MEMORY).put(&mut body);
        }
        let sent = self.send(calls::ANSWER, header.sequence, &body);
        self.scratch = body;
        sent
    }

    /// Answers once these events, of each of which this takes over a reference, have completed.
    pub(super) fn answer_later(
        &mut self,
        header: Header,
        events: Vec<Handle>,
        failures: bool,
        code: i32,
    ) {
        self.waits.push(Wait {
            since: self.has_threads().then(Instant::now),
            sequence: header.sequence,
            events,
            failures,
            code,
            armed: false,
        });
    }

    /// Remembers that a command uses a stage until `event`, a reference to which this takes over.
    pub(super) fn stage_until(&mut self, stage: StageId, event: Handle) {
        let armed = false;
        self.stages.push_back(Use {
            stage,
            event,
            armed,
        });
    }

    /// A stage that no command uses.
    pub(super) fn stage_free(&mut self, stage: StageId, good: bool) {
        self.released.push((stage, good));
    }

    /// The event of a command that uses a stage, if it has not completed as far as is known.
    pub(super) fn stage_event(&self, stage: StageId) -> Option<Handle> {
        self.stages
            .iter()
            .find_map(|used| (used.stage == stage).then_some(used.event))
    }

    pub(super) fn status(&self, event: Handle) -> i32 {
        status(&self.api, event)
    }

    /// Answers waits that are over, and gives back what was freed and is not used any more. Whether
    /// there was something.
    pub(super) fn poll_waits(&mut self) -> Result<bool, Gone> {
        let mut progress = !self.svm.freed.is_empty() && self.svm.freed.sweep(&self.api);
        let mut index = 0;
        while index < self.waits.len() {
            let mut failed = false;
            let over = self.waits[index].events.iter().all(|&event| {
                let status = self.status(event);
                failed |= status < 0;
                status <= 0
            });
            if !over {
                index += 1;
                continue;
            }
            progress = true;
            let wait = self.waits.swap_remove(index);
            self.last_wait = wait.since.map_or(Duration::ZERO, |since| since.elapsed());
            for event in wait.events {
                cl!(self.api, clReleaseEvent(event));
            }
            let code = match wait.code {
                0 if failed && wait.failures => codes::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST,
                code => code,
            };
            let header = Header {
                length: 0,
                opcode: 0,
                flags: Flags::ANSWER,
                sequence: wait.sequence,
            };
            let outcome = if code == 0 { Ok(()) } else { Err(code) };
            self.answer(header, &outcome)?;
        }
        Ok(progress)
    }

    /// Has this thread woken when what is waited for changes.
    fn arm(&mut self) {
        if self.has_all() {
            // What the driver keeps back would never end.
            for queue in self.queues.iter() {
                cl!(self.api, clFlush(queue.raw));
            }
        }
        let mut events = Vec::new();
        for wait in self.waits.iter_mut().filter(|wait| !wait.armed) {
            wait.armed = true;
            events.extend_from_slice(&wait.events);
        }
        self.svm.freed.arm(&mut events);
        if !self.waits.is_empty()
            && let Some(oldest) = self.stages.front_mut().filter(|used| !used.armed)
        {
            oldest.armed = true;
            events.push(oldest.event);
        }
        events.into_iter().for_each(|event| self.watch(event, None));
    }

    /// Has this thread woken when an event's command completes, and after some time if it has not.
    pub(super) fn watch(&mut self, event: Handle, after: Option<Duration>) {
        if self.watch.is_none() {
            let started = Watch::start(Arc::clone(&self.api), Arc::clone(&self.board));
            self.watch = started
                .inspect_err(|error| {
                    // The bell's patience bounds the wait.
                    crate::note!(
                        "gantry-accel: cannot start a thread that waits for commands ({error}): \
                         their ends are noticed late"
                    );
                })
                .ok();
        }
        if let Some(watch) = &self.watch {
            cl!(self.api, clRetainEvent(event));
            watch.order(event, after);
        }
    }

    /// Passes on what happened in other threads. Whether there was something.
    pub(super) fn notices(&mut self) -> Result<bool, Error> {
        if !self.board.any() {
            return Ok(false);
        }
        for notice in self.board.take() {
            match notice {
                Notice::Wake => {}
                Notice::Callback(number, status) => {
                    self.expected -= 1;
                    self.tell_released()?;
                    let mut body = Vec::with_capacity(12);
                    number.put(&mut body);
                    status.put(&mut body);
                    self.send(calls::CALLBACK, 0, &body)?;
                    (self.nudge.0)();
                }
                Notice::Built(header, code) => self.built(header, code)?,
                Notice::Linked(header, linked, code) => self.linked(header, linked, code)?,
                Notice::Report(context, text) => self.report(context, text)?,
                Notice::Apart(other) => return Err(other.into()),
            }
        }
        Ok(true)
    }

    /// Tells the callback of a context, if it has one, of something that went wrong.
    pub(super) fn report(&mut self, context: ContextId, text: Vec<u8>) -> Result<(), Gone> {
        let mut body = Vec::with_capacity(8 + text.len());
        (context, Blob(text)).put(&mut body);
        self.send(calls::REPORT, 0, &body)?;
        (self.nudge.0)();
        Ok(())
    }

    /// Carries out one call. Afterwards no more is kept than an application can have need of.
    pub(super) fn serve(&mut self, header: Header, request: Request) -> Result<(), Error> {
        self.carry_out(header, request)?;
        let (stages, waits) = (self.stages.len() + self.released.len(), self.waits.len());
        if stages as u64 > 2 * self.window.size() / STAGE || waits > MOST_WAITS {
            return Err(Error::Crowded { stages, waits });
        }
        Ok(())
    }

    fn carry_out(&mut self, header: Header, request: Request) -> Result<(), Error> {
        /// Calls a method and answers with what it returns.
        macro_rules! answered {
            ($call:expr, $method:ident) => {{
                let outcome = self.$method($call);
                self.answer(header, &outcome)?;
            }};
        }
        match request {
            Request::Platforms(_) => {
                let offered = self.offered();
                self.answer(header, &Ok(offered))?;
            }
            Request::Info(call) => answered!(&call, info),
            Request::CreateSubDevices(call) => answered!(&call, create_sub_devices),
            Request::ReleaseDevice(call) => answered!(call.id, release_device),
            Request::Timers(call) => answered!(call.device, timers),
            Request::CreateContext(call) => answered!(call, create_context),
            Request::ReleaseContext(call) => answered!(call.id, release_context),
            Request::ImageFormats(call) => answered!(&call, image_formats),
            Request::CreateQueue(call) => answered!(call, create_queue),
            Request::ReleaseQueue(call) => answered!(call.id, release_queue),
            Request::CreateBuffer(call) => answered!(call, create_buffer),
            Request::CreateSubBuffer(call) => answered!(call, create_sub_buffer),
            Request::CreateImage(call) => answered!(call, create_image),
            Request::ReleaseMem(call) => answered!(&call, release_mem),
            Request::CreateSampler(call) => answered!(call, create_sampler),
            Request::ReleaseSampler(call) => answered!(call.id, release_sampler),
            Request::SvmAlloc(call) => answered!(&call, svm_alloc),
            Request::SvmFree(call) => answered!(call.address, svm_free),
            Request::CreateProgram(call) => answered!(call, create_program),
            Request::ReleaseProgram(call) => answered!(call.id, release_program),
            Request::BuildProgram(call) => self.build_program(header, &call)?,
            Request::CompileProgram(call) => self.compile_program(header, &call)?,
            Request::LinkProgram(call) => self.link_program(header, call)?,
            Request::ProgramBinaries(call) => answered!(call.id, program_binaries),
            Request::Specialize(call) => answered!(&call, specialize),
            Request::CreateKernel(call) => answered!(&call, create_kernel),
            Request::CloneKernel(call) => answered!(&call, clone_kernel),
            Request::ReleaseKernel(call) => answered!(call.id, release_kernel),
            Request::SetArgument(call) => {
                let outcome = self.set_argument(&call);
                self.note_argument(&call, outcome, header.flags.has(Flags::ANSWER));
                self.answer(header, &outcome)?;
            }
            Request::SvmPointers(call) => answered!(&call, svm_pointers),
            Request::CreateUserEvent(call) => answered!(&call, create_user_event),
            Request::SetUserEventStatus(call) => answered!(&call, set_user_event_status),
            Request::ReleaseEvent(call) => answered!(call.id, release_event),
            Request::WaitForEvents(call) => self.wait_for_events(header, &call)?,
            Request::SetEventCallback(call) => answered!(&call, set_event_callback),
            Request::Flush(call) => answered!(call.queue, flush),
            Request::Finish(call) => self.finish(header, call.queue)?,
            Request::Await(call) => self.await_stage(header, call.stage)?,
            command => self.command(header, command)?,
        }
        Ok(())
    }
}

/// `CL_EVENT_COMMAND_EXECUTION_STATUS`.
pub(super) fn status(api: &Api, event: Handle) -> i32 {
    let mut status = 0i32;
    let code = cl!(
        api,
        clGetEventInfo(
            event,
            codes::EVENT_COMMAND_EXECUTION_STATUS,
            size_of::<i32>(),
            (&raw mut status).cast(),
            std::ptr::null_mut(),
        )
    );
    if code == 0 { status } else { code }
}

/// Bytes as a C string: up to the first zero.
pub(super) fn c_string(bytes: &Blob) -> std::ffi::CString {
    let text = bytes.0.split(|&byte| byte == 0).next().unwrap_or_default();
    // `text` has no zero, so that this cannot fail.
    std::ffi::CString::new(text).unwrap_or_default()
}

/// A code as an outcome.
pub(super) fn outcome(code: i32) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}
