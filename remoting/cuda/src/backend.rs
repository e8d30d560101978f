//! CUDA as a session's backend: the application's objects, and the method that executes each request.

use std::{
    collections::{HashMap, HashSet},
    ops::{ControlFlow, Deref, DerefMut},
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use base::gpus::Choice;
use cuda_definition::driver::types::CUstream;
use ref_cast::RefCast;
use remoting_proto::{
    apis::cuda::{
        Cuda, Kind, LEGACY,
        calls::{Request, Source},
        codes,
    },
    wire::{
        Api as _, Flags, Header,
        api::Cost,
        messages::{EventId, StageId},
    },
};
use remoting_session::{
    backend::{Backend, Fences, QueueKey},
    limit,
    server::{Error, Nudge, Session, Tuning},
};
use remoting_transport::{
    endpoint::{Gone, Receiver},
    port_bell::Waker,
    window::{Slice, Window},
};

use super::{
    backlog::Backlog,
    captures::Captures,
    charges::Kept,
    cover::Cover,
    driver::{Api, cu},
    fences::Fence,
    holds::Holds,
    host_functions::{self, News, Pending},
    instances::Instances,
    light::Algorithm,
    linear,
    memory::Memory,
    modules::UNCHARGED_CODE,
    objects::Objects,
    passages::{Passages, Use},
    printed::Printed,
    reserves::Reserve,
    textures::Texture,
    user_objects::UserObjects,
    waiting::{PutOff, Rounds, Until},
};

/// The CUDA objects of one application, and the driver that owns them.
#[derive(Debug)]
pub struct CudaBackend {
    pub(super) api: Arc<Api>,
    /// The devices offered to the client: the driver's devices, indexed by the client's ordinals.
    pub(super) devices: Vec<i32>,
    pub(super) objects: Objects,
    pub(super) memory: Memory,
    /// Charges for memory that the client has freed but that is still in use.
    pub(super) kept: Kept,
    /// Charges for what contexts reserve for their kernels, by context and limit.
    pub(super) limits: HashMap<(u32, u64), Reserve>,
    /// Charges for variables of libraries.
    pub(super) instances: Instances,
    /// How many more bytes of machine code may be loaded without being charged.
    pub(super) uncharged_code: u64,
    pub(super) cover: Cover,
    /// Work of contexts that passes through what others have registered.
    pub(super) passages: Passages,
    /// Retain count of each device's primary context.
    pub(super) primary: HashMap<i32, u32>,
    /// Captures in progress. Fences must not become part of them.
    pub(super) captures: Captures,
    /// cuBLAS and cuBLASLt handles, by number.
    pub(super) linear: HashMap<u32, linear::State>,
    /// Algorithms that have been returned to the client.
    pub(super) algorithms: HashSet<Algorithm>,
    /// Texture and surface objects.
    pub(super) textures: HashSet<Texture>,
    /// Errors of calls whose result nobody waited for, by context.
    pub(super) deferred: HashMap<u32, i32>,
    /// Client functions that have been passed to the driver and have not returned yet.
    pub(super) pending: Pending,
    /// Functions that the driver has not called yet: the driver's context of each, by the client's number.
    pub(super) uncalled: HashMap<u64, usize>,
    /// Copies of the client that streams wait for and that are not due yet.
    pub(super) holds: Holds,
    /// How much work each stream has that is not done.
    pub(super) backlog: Backlog,
    /// The output of kernels, if it can be captured.
    pub(super) printed: Option<Printed>,
    /// The contexts whose legacy stream has been given work since it was last synchronized.
    pub(super) legacy: LegacyWork,
    /// Contexts of which a stream was destroyed before its work completed. Only a wait for the whole context tells when
    /// that work is done.
    pub(super) left: HashSet<u32>,
    /// The driver's stream on which the last request launched a kernel.
    pub(super) launched: Option<usize>,
    /// Whether the current request may submit anything.
    #[cfg(debug_assertions)]
    pub(super) may_submit: bool,
    /// Whether a kernel that may print has been launched or added to a graph.
    pub(super) prints: bool,
    /// The number of client functions that graphs may hold.
    pub(super) lasting: Arc<AtomicUsize>,
    /// Launches of graphs that may call client functions.
    pub(super) calling: Vec<Fence>,
    /// At this number of them, those that are over are looked for.
    pub(super) most_calling: usize,
    /// Graphs' handles for conditional nodes, with the graph of each.
    pub(super) conditionals: HashMap<u64, u32>,
    /// User objects that the client has attached to graphs.
    pub(super) user_objects: UserObjects,
    /// Requests that wait for a context's work or for client functions, as the driver itself would.
    pub(super) put_off: Vec<PutOff>,
    /// Commands behind which the driver could record no event.
    pub(super) unfenced: Vec<Unfenced>,
    /// A request that waits and must execute before all requests that follow.
    pub(super) parked: Option<PutOff>,
    /// The sequence number of the copy that was last parked until the work before it was done. Each message has another.
    pub(super) parked_copy: Option<u64>,
}

/// Serves an application that calls CUDA: its session, with what executes its requests.
#[derive(Debug, RefCast)]
#[repr(transparent)]
pub struct Server {
    pub(crate) session: Session<CudaBackend>,
}

impl Server {
    /// A server of the application at the other end of `window`, and the calls that it gets.
    pub fn new(
        backend: CudaBackend,
        window: Arc<Window>,
        tuning: Tuning,
        nudge: Nudge,
    ) -> (Self, Receiver<Slice, Waker>) {
        let (session, calls) = Session::new(backend, window, tuning, nudge);
        (Self { session }, calls)
    }

    /// Serves until the application's rings become unusable.
    ///
    /// # Errors
    /// The session has ended, and why.
    pub fn run(self, calls: Receiver<Slice, Waker>, spin: Duration) -> Result<(), Error> {
        self.session.run(calls, spin)
    }
}

impl Deref for Server {
    type Target = Session<CudaBackend>;

    fn deref(&self) -> &Self::Target {
        &self.session
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.session
    }
}

impl CudaBackend {
    /// Offers these devices of the driver, in the choice's order. Where it does not fit, none, and the log says why.
    pub fn new(api: Arc<Api>, choice: &Choice) -> Self {
        let devices = super::start::devices(&api, choice).unwrap_or_else(|error| {
            base::note!("gantry-accel: an application is offered no device: {error}");
            Vec::new()
        });
        Self {
            devices,
            objects: Objects::default(),
            memory: Memory::default(),
            kept: Kept::default(),
            limits: HashMap::new(),
            instances: Instances::default(),
            uncharged_code: UNCHARGED_CODE,
            cover: Cover::default(),
            passages: Passages::default(),
            primary: HashMap::new(),
            captures: Captures::default(),
            linear: HashMap::new(),
            algorithms: HashSet::new(),
            textures: HashSet::new(),
            deferred: HashMap::new(),
            pending: Pending::default(),
            uncalled: HashMap::new(),
            holds: Holds::default(),
            backlog: Backlog::default(),
            printed: None,
            legacy: LegacyWork::default(),
            left: HashSet::new(),
            launched: None,
            #[cfg(debug_assertions)]
            may_submit: false,
            prints: false,
            lasting: Arc::default(),
            calling: Vec::new(),
            most_calling: host_functions::FEW,
            conditionals: HashMap::new(),
            user_objects: UserObjects::default(),
            put_off: Vec::new(),
            unfenced: Vec::new(),
            parked: None,
            parked_copy: None,
            api,
        }
    }

    /// Reports to the client what kernels print. The driver writes it to this process's standard output, which this
    /// redirects to memory.
    ///
    /// # Errors
    /// Standard output cannot be redirected: kernels keep printing to this process's output.
    pub fn tell_printed(&mut self) -> std::io::Result<()> {
        self.printed = Some(Printed::replace_output()?);
        Ok(())
    }

    /// Whether client functions or copies are known to be pending.
    pub(super) fn has_pending(&mut self) -> bool {
        let before = self.api.current();
        self.forget_called();
        let any = self.holds.is_any()
            || !self.calling.is_empty()
            || self.pending.any(&self.api, self.captures.is_any());
        // Polling fences and contexts makes their contexts current; the caller continues in its own.
        self.api.enter(before);
        any
    }

    /// Forgets launches of graphs that are over. May change the current context.
    pub(super) fn forget_called(&mut self) {
        let api = &self.api;
        let over = |fence: &mut Fence| api.poll(*fence).is_over();
        for fence in self.calling.extract_if(.., over) {
            api.release(fence);
        }
    }
}

impl Backend for CudaBackend {
    type Api = Cuda;
    type Driver = Api;
    type Notice = News;
    type Precopied = ();

    const FENCE_FAILED: i32 = codes::ASK_AGAIN;
    const ANSWER_TOO_LONG: i32 = codes::OUT_OF_MEMORY;

    fn driver(&self) -> &Arc<Api> {
        &self.api
    }

    fn execute(session: &mut Session<Self>, header: Header, request: Request) -> Result<(), Error> {
        Server::ref_cast_mut(session).begin(header, request, Rounds::default())
    }

    fn notice(session: &mut Session<Self>, news: News) -> Result<(), Error> {
        let server = Server::ref_cast_mut(session);
        match news {
            News::Returned => {}
            News::Due(number) => server.call_back(number, 0)?,
            News::Gone(number) => {
                server.backend.user_objects.forget(number);
                server.call_back(number, codes::FUNCTION_GONE)?;
            }
        }
        Ok(())
    }

    fn resume(session: &mut Session<Self>) -> Result<bool, Error> {
        let server = Server::ref_cast_mut(session);
        let told = server.tell_due_holds()?;
        if !server.backend.unfenced.is_empty() {
            server.free_unfenced();
        }
        if let Some(parked) = server.backend.parked.take() {
            let waits = match parked.until() {
                Until::NoFunctions(_) => {
                    server.backend.has_pending() || !parked.is_ready(&server.backend.api)
                }
                Until::Work(_) => !parked.is_ready(&server.backend.api),
                Until::Room(_) => server.has_untold() && !parked.is_ready(&server.backend.api),
            };
            if waits {
                server.backend.parked = Some(parked);
                return Ok(told);
            }
            let (header, request, rounds) = parked.take(&server.backend.api);
            server.go_on(header, request, rounds)?;
            return Ok(true);
        }
        if server.backend.put_off.is_empty() {
            return Ok(told);
        }
        let untold = server.has_untold();
        let backend = &mut server.backend;
        let pending = backend.has_pending();
        let ready = |one: &PutOff| match one.until() {
            Until::Room(_) => !untold || one.is_ready(&backend.api),
            _ => !pending && one.is_ready(&backend.api),
        };
        let Some(place) = backend.put_off.iter().position(ready) else {
            return Ok(told);
        };
        let (header, request, rounds) = backend.put_off.remove(place).take(&backend.api);
        server.go_on(header, request, rounds)?;
        Ok(true)
    }

    fn is_busy(&self) -> bool {
        self.parked.is_some()
    }

    fn called(&mut self, number: u64) -> bool {
        self.uncalled.remove(&number).is_some()
    }

    fn has_event(&self, _: EventId) -> bool {
        false
    }

    fn waited(&mut self, fences: &[Fence]) {
        // The driver flushes what kernels have printed when it waits, not when it is polled.
        if self.printed.is_some() {
            for fence in fences {
                self.api.wait_over(*fence);
            }
        }
    }

    fn printed(&mut self) -> Option<Vec<u8>> {
        self.printed.as_mut()?.take()
    }

    // The driver holds nothing back.
    fn flush(&self, _: u32) {}

    fn flush_all(&self) {}

    fn sweep(&mut self) -> bool {
        false
    }

    fn sweep_after(&mut self, _: &mut Vec<Fence>) {}
}

/// Whether the driver may wait for outstanding work before it returns from this call.
fn may_block(request: &Request) -> bool {
    match request {
        Request::Write(_)
        | Request::Read(_)
        | Request::Copy(_)
        | Request::CopyRows(_)
        | Request::CopyVolume(_)
        | Request::Fill(_)
        | Request::Launch(_)
        | Request::LaunchGraph(_)
        | Request::HostFunction(_)
        | Request::AddHostNode(_)
        | Request::SetHostNode(_)
        | Request::CreateUserObject(_)
        | Request::RetainUserObject(_)
        | Request::ReleaseUserObject(_)
        | Request::StreamSynchronize(_)
        | Request::ContextSynchronize(_)
        | Request::EventSynchronize(_)
        | Request::Signal(_)
        | Request::Await(_)
        | Request::PointerDevice(_)
        | Request::Describe(_) => false,
        // In the order of a stream: with its work, not before the call returns.
        Request::Free(call) => call.stream.is_none(),
        Request::Allocate(call) => matches!(call.source, Source::Device()),
        Request::Forward(call) => !super::forwarding::returns_at_once(call.function),
        Request::Post(call) => !super::forwarding::returns_at_once(call.function),
        _ => true,
    }
}

/// Whether a request may submit anything to a stream: work, or what only orders it or waits for it.
#[cfg(debug_assertions)]
fn may_submit(opcode: u16, request: &Request) -> bool {
    matches!(
        request,
        Request::HostFunction(_) | Request::Signal(_) | Request::StreamSynchronize(_)
    ) || matches!(Cuda::cost(opcode, request), Cost::Work(_))
}

/// A command with a stage behind which the driver could record no event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unfenced {
    pub(super) stage: StageId,
    /// The client's number of the context.
    pub(super) context: u32,
    /// The client's number of the stream; `None` when it has been destroyed, since another one may get the number.
    pub(super) stream: Option<u32>,
}

/// Where a command has been submitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Submitted {
    /// The driver's context.
    pub(super) context: usize,
    /// The client's number of it.
    pub(super) owner: u32,
    /// The client's stream number.
    pub(super) stream: u32,
    /// The driver's stream.
    pub(super) raw: usize,
    /// The code with which the driver has refused a part of the command, after it had accepted an earlier part; 0
    /// otherwise.
    pub(super) refused: i32,
}

impl Submitted {
    /// The queue that the command is in. The legacy stream has the same handle in all contexts.
    pub(super) fn queue(&self) -> QueueKey {
        QueueKey {
            raw: if self.raw <= 2 {
                self.context
            } else {
                self.raw
            },
            in_order: true,
        }
    }

    /// Decides about the result of the command's next part: the command has failed if it is the first one, and
    /// has been submitted in part if it is a later one. `any` tells whether a part has been accepted.
    pub(super) fn part(self, any: &mut bool, code: i32) -> ControlFlow<Result<Self, i32>> {
        match code {
            0 => {
                *any = true;
                ControlFlow::Continue(())
            }
            refused if *any => ControlFlow::Break(Ok(Self { refused, ..self })),
            refused => ControlFlow::Break(Err(refused)),
        }
    }
}

/// The contexts whose legacy stream may have outstanding work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LegacyWork {
    #[default]
    Nobodys,
    /// This driver context.
    Of(usize),
    /// Several contexts. This state is final.
    Several,
}

impl LegacyWork {
    /// Records that a context's legacy stream has been given work.
    pub(super) fn given(&mut self, context: usize) {
        *self = match *self {
            Self::Nobodys => Self::Of(context),
            Self::Of(other) if other == context => Self::Of(context),
            Self::Of(_) | Self::Several => Self::Several,
        };
    }

    /// Records that all work of the context's legacy stream has completed.
    pub(super) fn done(&mut self, context: usize) {
        if *self == Self::Of(context) {
            *self = Self::Nobodys;
        }
    }
}

/// Whether the client's stream number denotes the legacy stream.
pub(super) fn is_legacy(stream: u32) -> bool {
    matches!(stream, 0 | LEGACY)
}

impl Server {
    /// Makes the client's context current and returns the driver's handle; 0 for no context.
    pub(super) fn enter(&mut self, context: u32) -> Result<usize, i32> {
        let raw = self.backend.objects.raw(Kind::Context, context)?;
        self.backend.api.enter(raw);
        Ok(raw)
    }

    /// Makes the client's context current and looks up one of its streams.
    pub(super) fn submit_to(&mut self, context: u32, stream: u32) -> Result<Submitted, i32> {
        #[cfg(debug_assertions)]
        assert!(
            self.backend.may_submit,
            "a request without a cost gives the device work"
        );
        let raw_context = self.enter(context)?;
        if raw_context == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        let raw = self.backend.objects.raw(Kind::Stream, stream)?;
        if is_legacy(stream) {
            self.backend.legacy.given(raw_context);
        }
        self.backend.backlog.submits(raw_context, raw);
        Ok(Submitted {
            context: raw_context,
            owner: context,
            stream,
            raw,
            refused: 0,
        })
    }

    /// Whether the whole address range is the client's own memory.
    pub(super) fn is_clients(&self, at: u64, size: u64) -> bool {
        self.backend.memory.holds(at, size)
            || self.window.offset_of(at as *const u8, size).is_some()
    }

    /// Whether this thread may be held up while it waits for work.
    pub(super) fn stays(&mut self, header: Header) -> bool {
        self.may_stay(header) && !self.backend.has_pending()
    }

    /// Finishes a command: releases its stage, meters its device time and answers it.
    pub(super) fn conclude(
        &mut self,
        header: Header,
        context: u32,
        stage: Option<StageId>,
        outcome: Result<Submitted, i32>,
    ) -> Result<(), Gone> {
        let metered = self.sharing.metered.take();
        let waits = header.flags.has(Flags::ANSWER);
        let passages = self.backend.passages.take();
        let submitted = match outcome {
            Ok(submitted) => submitted,
            Err(code) => {
                if let Some(stage) = stage {
                    self.free_refused(context, stage);
                }
                return self.fail(header, context, code);
            }
        };
        let whole = submitted.refused == 0;
        let captured = self.is_captured(submitted.raw);
        let watched = metered.is_some() || self.limit.is_some();
        let stays = waits && whole && !captured && !watched && self.stays(header);
        if captured {
            self.passes_in_graphs(passages);
            if let Some(stage) = stage {
                self.stage_free(stage, whole);
            }
            return match submitted.refused {
                0 => self.answer(header, &Ok(())),
                code => self.fail(header, context, code),
            };
        }
        let lenders: Vec<u32> = self.backend.cover.lenders(submitted.owner).collect();
        let is_used = !passages.is_empty() || !lenders.is_empty();
        let needs_fence = stage.is_some() || is_used || watched || (waits && whole);
        if !needs_fence {
            return match submitted.refused {
                0 => Ok(()),
                code => self.fail(header, context, code),
            };
        }
        let fence = match self.backend.api.fence(submitted.context, submitted.raw) {
            Ok(fence) => fence,
            Err(code) => {
                if let Some(stage) = stage {
                    self.backend.unfenced.push(Unfenced {
                        stage,
                        context,
                        stream: Some(submitted.stream),
                    });
                }
                return self.fail(header, context, code);
            }
        };
        let (place, backend) = ((submitted.context, submitted.raw), &mut self.backend);
        for (registrars, how) in [(&passages, Use::Passes), (&lenders, Use::MayAccess)] {
            let used = (&registrars[..], how);
            backend.passages.add(&backend.api, place, used, fence);
        }
        if let Some(kind) = metered {
            self.meter(kind, submitted.stream, fence);
        }
        if let Some(limit) = &self.limit {
            self.backend.api.retain(fence);
            limit.order(limit::Order {
                fence,
                queue: submitted.queue(),
            });
        }
        if let Some(stage) = stage {
            self.backend.api.retain(fence);
            self.stage_until(stage, fence, whole);
        }
        if waits && whole {
            let deferred = self.take_deferred(context);
            self.answer_later(header, vec![fence], true, deferred.unwrap_or(0));
            if stays && self.stay()? && is_legacy(submitted.stream) {
                self.backend.legacy.done(submitted.context);
            }
            return Ok(());
        }
        self.backend.api.release(fence);
        match submitted.refused {
            0 => Ok(()),
            code => self.fail(header, context, code),
        }
    }

    /// Releases the stage of the current request, which the driver has refused, once its stream comes there: until then the
    /// client may be about to fill the stage in the order of the stream.
    fn free_refused(&mut self, context: u32, stage: StageId) {
        let place = self.backend.backlog.place();
        let Some((raw, stream)) = place.filter(|(_, stream)| !self.is_captured(*stream)) else {
            return self.stage_free(stage, false);
        };
        self.backend.api.enter(raw);
        if let Ok(fence) = self.backend.api.fence(raw, stream) {
            return self.stage_until(stage, fence, false);
        }
        let objects = &self.backend.objects;
        let stream = match stream {
            0 => Some(0),
            stream => objects.known(Kind::Stream, stream),
        };
        self.backend.unfenced.push(Unfenced {
            stage,
            context,
            stream,
        });
    }

    /// Releases stages of [`unfenced`](CudaBackend::unfenced) commands that have ended.
    fn free_unfenced(&mut self) {
        // A query might invalidate a capture.
        if self.backend.captures.is_any() {
            return;
        }
        let before = self.backend.api.current();
        for one in std::mem::take(&mut self.backend.unfenced) {
            let is_over = match one.stream {
                // Only a wait for the context tells, or its end.
                None => !self.backend.left.contains(&one.context),
                // After an error the context runs nothing any more.
                Some(stream) => !self.is_running(one.context, stream),
            };
            if is_over {
                self.stage_free(one.stage, false);
            } else {
                self.backend.unfenced.push(one);
            }
        }
        self.backend.api.enter(before);
    }

    /// Whether a stream has outstanding work.
    fn is_running(&mut self, context: u32, stream: u32) -> bool {
        self.enter(context).is_ok()
            && self
                .backend
                .objects
                .raw(Kind::Stream, stream)
                .is_ok_and(|raw| {
                    cu!(self.backend.api, cuStreamQuery(raw as CUstream)) == codes::NOT_READY
                })
    }

    /// Records that a stream is about to be destroyed, and its work is over or not: releases the stages of its
    /// [`unfenced`](CudaBackend::unfenced) commands, or keeps them until the context is waited for. Returns whether there
    /// are any to keep.
    pub(super) fn leave_unfenced(&mut self, stream: u32, is_over: bool) -> bool {
        let mut free = Vec::new();
        let mut keeps = false;
        self.backend.unfenced.retain_mut(|one| {
            if one.stream != Some(stream) {
                return true;
            }
            one.stream = None;
            keeps |= !is_over;
            if is_over {
                free.push(one.stage);
            }
            !is_over
        });
        free.into_iter()
            .for_each(|stage| self.stage_free(stage, false));
        keeps
    }

    /// Records that a context has been destroyed: releases the stages of its [`unfenced`](CudaBackend::unfenced)
    /// commands.
    pub(super) fn forget_unfenced(&mut self, context: u32) {
        let mut free = Vec::new();
        self.backend.unfenced.retain(|one| {
            if one.context == context {
                free.push(one.stage);
            }
            one.context != context
        });
        free.into_iter()
            .for_each(|stage| self.stage_free(stage, false));
    }

    /// Answers with an error, or keeps the error for the context's next call that waits.
    pub(super) fn fail(&mut self, header: Header, context: u32, code: i32) -> Result<(), Gone> {
        if header.flags.has(Flags::ANSWER) {
            return self.answer(header, &Err::<(), i32>(code));
        }
        self.backend.deferred.entry(context).or_insert(code);
        Ok(())
    }

    /// Takes the deferred error of a call whose result nobody waited for.
    pub(super) fn take_deferred(&mut self, context: u32) -> Option<i32> {
        if self.backend.deferred.is_empty() {
            return None;
        }
        self.backend.deferred.remove(&context)
    }

    /// Executes a request that was deferred. If it gives the device work, it waits for its turn first: it may have
    /// had one, which is over.
    fn go_on(&mut self, header: Header, request: Request, rounds: Rounds) -> Result<(), Error> {
        match Cuda::cost(header.opcode, &request) {
            Cost::Work(_) => self.serve_again(header, request),
            // Other threads may have submitted more work to the driver meanwhile.
            Cost::Nothing(_) => self.begin(header, request, rounds),
        }
    }

    /// Executes a request, or defers it until the driver does not need to wait in it.
    fn begin(&mut self, header: Header, request: Request, rounds: Rounds) -> Result<(), Error> {
        let waits = may_block(&request)
            || self.synchronizes_here(&request)
            || self.copies_many_rows(&request);
        if waits && self.backend.has_pending() {
            self.wait_for_functions(header, request, rounds);
            return Ok(());
        }
        if let Some(mark) = self.awaits_room(&request) {
            self.wait_for_room(header, request, mark);
            return Ok(());
        }
        let Some((header, request)) = self.park_unregistered(header, request) else {
            return Ok(());
        };
        let Some((header, request)) = self.wait_for_passages(header, request, rounds) else {
            return Ok(());
        };
        match self.put_off(header, request, rounds) {
            Some((header, request)) => self.carry_out(header, request),
            None => Ok(()),
        }
    }

    fn carry_out(&mut self, header: Header, request: Request) -> Result<(), Error> {
        /// Calls a method and answers with its result.
        macro_rules! answered {
            ($call:expr, $method:ident) => {{
                let outcome = self.$method($call);
                self.answer(header, &outcome)?;
            }};
        }
        if !matches!(request, Request::Signal(_)) {
            self.backend.launched = None;
        }
        #[cfg(debug_assertions)]
        {
            self.backend.may_submit = may_submit(header.opcode, &request);
        }
        if self.backend.captures.is_any() {
            self.forget_invalid_captures();
        }
        let entries = self.entries(&request);
        match request {
            Request::Start(_) => {
                let started = self.started();
                self.answer(header, &Ok(started))?;
            }
            Request::Describe(call) => answered!(call.error, describe),
            Request::Forward(call) => {
                let outcome = self.forward(call.context, call.function, &call.arguments.0);
                self.answer(header, &outcome)?;
            }
            Request::Post(call) => {
                match self.forward(call.context, call.function, &call.arguments.0) {
                    Ok(_) => self.answer(header, &Ok(()))?,
                    Err(code) => self.fail(header, call.context, code)?,
                }
            }
            Request::Allocate(call) => answered!(&call, allocate),
            Request::AllocatePitch(call) => answered!(&call, allocate_pitch),
            Request::Free(call) => match self.free(&call) {
                Ok(()) => self.answer(header, &Ok(()))?,
                Err(code) => self.fail(header, call.context, code)?,
            },
            Request::MemoryInfo(call) => answered!(call.context, memory_info),
            Request::Select(call) => answered!(&call.devices, select),
            Request::PointerDevice(call) => answered!(call.address, pointer_device),
            Request::Pin(call) => answered!(&call, pin),
            Request::Write(call) => self.write(header, &call)?,
            Request::Read(call) => self.read(header, &call)?,
            Request::Copy(call) => self.copy(header, &call)?,
            Request::CopyRows(call) => self.copy_rows(header, &call)?,
            Request::Fill(call) => self.fill(header, &call)?,
            Request::Load(call) => answered!(call, load),
            Request::Link(call) => answered!(call, link),
            Request::Enumerate(call) => answered!(&call, enumerate),
            Request::Examine(call) => answered!(&call, examine),
            Request::Launch(call) => self.launch(header, &call)?,
            Request::LaunchGraph(call) => self.launch_graph(header, &call)?,
            Request::AddKernelNode(call) => answered!(&call, add_kernel_node),
            Request::SetKernelNode(call) => answered!(&call, set_kernel_node),
            Request::CopyVolume(call) => self.copy_volume(header, &call)?,
            Request::AddCopyNode(call) => answered!(&call, add_copy_node),
            Request::SetCopyNode(call) => answered!(&call, set_copy_node),
            Request::AddHostNode(call) => answered!(&call, add_host_node),
            Request::SetHostNode(call) => answered!(&call, set_host_node),
            Request::AddAllocNode(call) => answered!(&call, add_alloc_node),
            Request::AddFreeNode(call) => answered!(&call, add_free_node),
            Request::AddConditionalNode(call) => answered!(&call, add_conditional_node),
            Request::CaptureInfo(call) => answered!(&call, capture_info),
            Request::CreateUserObject(call) => answered!(&call, create_user_object),
            Request::RetainUserObject(call) => answered!(&call, retain_user_object),
            Request::ReleaseUserObject(call) => answered!(&call, release_user_object),
            Request::Clusters(call) => answered!(&call, clusters),
            Request::HostFunction(call) => answered!(&call, host_function),
            Request::StreamSynchronize(call) => self.stream_synchronize(header, &call)?,
            Request::ContextSynchronize(call) => self.context_synchronize(header, &call)?,
            Request::EventSynchronize(call) => self.event_synchronize(header, &call)?,
            Request::Signal(call) => match self.signal(&call) {
                Ok(()) => self.answer(header, &Ok(()))?,
                Err(code) => self.fail(header, call.context, code)?,
            },
            Request::Library(call) => self.library(header, &call)?,
            Request::PostLibrary(call) => self.post_library(header, &call)?,
            Request::Await(call) => self.await_stage(header, call.stage)?,
        }
        // Of what has submitted nothing: nodes.
        let passages = self.backend.passages.take();
        self.passes_in_graphs(passages);
        self.count_submitted(entries);
        Ok(())
    }
}
