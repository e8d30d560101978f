//! OpenCL as a session's backend: the application's objects, and the method that executes each
//! request.

use std::{
    collections::HashMap,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use base::gpus::Choice;
use ref_cast::RefCast;
use remoting_proto::{
    apis::opencl::{
        OpenCl,
        calls::{ContextId, QueueId, Request},
        codes,
    },
    wire::{
        Api as _, Flags, Header, Wire,
        api::Cost,
        messages::{EventId, StageId},
    },
};
use remoting_session::{
    backend::Backend,
    checkpoint::Busy,
    image::{Contents, Immovable, Writer},
    postcopy::Remaining,
    precopy::Copying,
    server::{Error, Nudge, Session, Tuning},
    table::Table,
};
use remoting_transport::{
    endpoint::Receiver,
    port_bell::Waker,
    window::{Slice, Window},
};

use super::{
    callbacks::{DriverNotice, Reporter},
    cover::Cover,
    driver::{Api, api::Handle, cl},
    freed,
    missing::Missing,
    objects::{Context, Device, Event, Home, Kernel, Mem, Program, Queue, Sampler},
    platform::Platform,
    programs::MOST_BUILDS,
    provenance::MemRecord,
    state::{self, Precopied},
    svm::Allocations,
    told::Told,
    written::Written,
};

/// Maximum number of contexts at a time: on a GPU each takes device memory that no quota accounts
/// for.
const MOST_CONTEXTS: u32 = 256;

/// The OpenCL objects of one application, and the driver that owns them.
#[derive(Debug)]
pub struct OpenClBackend {
    pub(crate) api: Arc<Api>,
    pub(crate) platforms: Vec<Platform>,
    pub(crate) devices: Table<Device>,
    pub(crate) contexts: Table<Context>,
    pub(crate) queues: Table<Queue>,
    pub(crate) mems: Table<Mem>,
    pub(crate) svm: Allocations,
    pub(crate) samplers: Table<Sampler>,
    pub(crate) programs: Table<Program>,
    pub(crate) kernels: Table<Kernel>,
    pub(crate) events: Table<Event>,
    pub(crate) cover: Cover,
    /// The callback data that the driver holds for each context.
    pub(crate) reporters: HashMap<ContextId, Box<Reporter>>,
    /// Released buffers and images whose destruction has not been reported yet, by callback number.
    pub(crate) destructors: HashMap<u64, Weak<MemRecord>>,
    /// The number of builds in progress, each in a thread of its own.
    pub(crate) building: usize,
    /// Records what commands may write, while anybody needs to know.
    pub(super) written: Weak<Mutex<Written>>,
    /// What the application has been told about its devices.
    pub(super) told: Told,
    /// Contents that have not arrived yet from where the application was.
    pub(super) missing: Option<Missing>,
    /// The folder for files for the driver's compiler, if any.
    pub(crate) files: Option<PathBuf>,
    /// Stages of failed commands of which the driver has a part, behind which it accepts no marker.
    pub(super) unmarked: Vec<(StageId, QueueId)>,
}

/// Serves an application that calls OpenCL: its session, with what executes its requests.
#[derive(Debug, RefCast)]
#[repr(transparent)]
pub struct Server {
    pub(crate) session: Session<OpenClBackend>,
}

impl Server {
    /// A server of the application at the other end of `window`, and the calls that it gets.
    pub fn new(
        backend: OpenClBackend,
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
    type Target = Session<OpenClBackend>;

    fn deref(&self) -> &Self::Target {
        &self.session
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.session
    }
}

impl OpenClBackend {
    /// Whether the application has created anything.
    pub(super) fn has_objects(&self) -> bool {
        fn any<T>(table: &Table<T>) -> bool {
            table.entries().next().is_some()
        }
        let offered: usize = self.platforms.iter().map(|one| one.devices.len()).sum();
        self.devices.entries().count() > offered
            || any(&self.contexts)
            || any(&self.queues)
            || any(&self.mems)
            || any(&self.samplers)
            || any(&self.programs)
            || any(&self.kernels)
            || any(&self.events)
            || !self.svm.is_empty()
            || self.building > 0
    }

    /// Offers these devices of the driver. Where the choice does not fit, none, and the log says why.
    pub fn new(api: Arc<Api>, choice: &Choice) -> Self {
        let mut devices = Table::new(codes::INVALID_DEVICE);
        let platforms = Platform::all(&api, choice, &mut devices).unwrap_or_else(|error| {
            base::note!("gantry-accel: an application is offered no device: {error}");
            Vec::new()
        });
        Self {
            devices,
            contexts: Table::new(codes::INVALID_CONTEXT).up_to(MOST_CONTEXTS),
            queues: Table::new(codes::INVALID_COMMAND_QUEUE),
            mems: Table::new(codes::INVALID_MEM_OBJECT),
            svm: Allocations::default(),
            samplers: Table::new(codes::INVALID_SAMPLER),
            programs: Table::new(codes::INVALID_PROGRAM),
            kernels: Table::new(codes::INVALID_KERNEL),
            events: Table::new(codes::INVALID_EVENT),
            cover: Cover::new(platforms.len()),
            reporters: HashMap::new(),
            destructors: HashMap::new(),
            building: 0,
            written: Weak::new(),
            told: Told::default(),
            missing: None,
            files: None,
            unmarked: Vec::new(),
            api,
            platforms,
        }
    }

    /// Whether all commands have completed, including those of released queues.
    pub(crate) fn ended(&mut self) -> bool {
        let mut ended = self.svm.freed.parted_ended(&self.api);
        for queue in self.queues.iter_mut() {
            match freed::end(&self.api, queue) {
                Ok(None) => {}
                Ok(Some(event)) => {
                    cl!(self.api, clReleaseEvent(event));
                    cl!(self.api, clFlush(queue.raw));
                    ended = false;
                }
                Err(_) => ended = false,
            }
        }
        ended
    }

    /// The number of callbacks that cannot become due before the client acts.
    pub(crate) fn pending_callbacks(&self) -> usize {
        let undecided = self.events.iter().filter(|event| event.is_undecided());
        let of_events: usize = undecided.map(|event| event.callbacks.len()).sum();
        of_events + self.destructors.len()
    }

    /// The released buffers and images, as far as something made from them still exists, with the
    /// numbers of the callbacks that report their destruction.
    pub(crate) fn destructors(&self) -> Vec<(Option<Arc<MemRecord>>, u64)> {
        let all = self.destructors.iter();
        let mut all: Vec<_> = all.map(|(number, of)| (of.upgrade(), *number)).collect();
        all.sort_by_key(|(_, number)| *number);
        all
    }

    /// Lets the driver's compiler use the application's headers, which are written to files in this
    /// folder. The compiler options given to the driver name it by this path.
    pub fn keep_files_in(&mut self, folder: &Path) {
        self.files = Some(folder.to_owned());
    }
}

impl Backend for OpenClBackend {
    type Api = OpenCl;
    type Driver = Api;
    type Notice = DriverNotice;

    const FENCE_FAILED: i32 = codes::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
    const ANSWER_TOO_LONG: i32 = codes::OUT_OF_HOST_MEMORY;

    fn driver(&self) -> &Arc<Api> {
        &self.api
    }

    fn execute(session: &mut Session<Self>, header: Header, request: Request) -> Result<(), Error> {
        Server::ref_cast_mut(session).carry_out(header, request)
    }

    fn notice(session: &mut Session<Self>, notice: DriverNotice) -> Result<(), Error> {
        let server = Server::ref_cast_mut(session);
        match notice {
            DriverNotice::Built(header, rebuilt, code) => server.built(header, &rebuilt, code)?,
            DriverNotice::Linked(header, linked, code) => server.linked(header, linked, code)?,
            DriverNotice::Report(context, text) => server.report(context.0, text)?,
        }
        Ok(())
    }

    fn resume(session: &mut Session<Self>) -> Result<bool, Error> {
        let server = Server::ref_cast_mut(session);
        for (stage, queue) in std::mem::take(&mut server.backend.unmarked) {
            server.stage_behind(stage, queue);
        }
        Ok(false)
    }

    fn has_come(
        session: &mut Session<Self>,
        opcode: u16,
        request: &Request,
    ) -> Result<bool, Error> {
        Server::ref_cast_mut(session).contents_have_come(opcode, request)
    }

    fn is_busy(&self) -> bool {
        self.building >= MOST_BUILDS
    }

    fn has_event(&self, id: EventId) -> bool {
        self.events.get(id.0).is_ok()
    }

    fn flush(&self, queue: u32) {
        if let Ok(queue) = self.queues.get(queue) {
            cl!(self.api, clFlush(queue.raw));
        }
    }

    fn flush_all(&self) {
        for queue in self.queues.iter() {
            cl!(self.api, clFlush(queue.raw));
        }
    }

    fn sweep(&mut self) -> bool {
        !self.svm.freed.is_empty() && self.svm.freed.sweep(&self.api)
    }

    fn sweep_after(&mut self, fences: &mut Vec<Handle>) {
        self.svm.freed.arm(fences);
    }

    const STATE_SHAPE: u64 = state::SHAPE;

    fn called(&mut self, number: u64) -> bool {
        self.destructors.remove(&number);
        true
    }

    fn busy(session: &mut Session<Self>) -> Option<Busy> {
        Server::ref_cast_mut(session).driver_busy()
    }

    fn check_movable(session: &Session<Self>) -> Result<(), Immovable> {
        Server::ref_cast(session).check_objects()
    }

    fn is_undecided(&self, fence: Handle) -> bool {
        let mut events = self.events.iter();
        events.any(|event| event.raw == fence && event.is_undecided())
    }

    fn event_of(&self, fence: Handle) -> Option<EventId> {
        let mut events = self.events.entries();
        events.find_map(|(id, event)| (event.ok()?.raw == fence).then_some(EventId(id)))
    }

    fn fence_of(&self, id: EventId) -> Option<Handle> {
        Some(self.events.get(id.0).ok()?.raw)
    }

    type Precopied = Precopied;

    fn precopy(
        session: &mut Session<Self>,
        known: Option<Precopied>,
        image: Writer,
    ) -> Result<(Precopied, Copying), Immovable> {
        Server::ref_cast_mut(session).precopy_objects(known, image)
    }

    fn made_since(session: &Session<Self>, known: Option<&Precopied>) -> u64 {
        Server::ref_cast(session).made_since(known)
    }

    fn prepare(
        session: &mut Session<Self>,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        Server::ref_cast_mut(session).prepare_objects(state, contents)
    }

    fn checkpoint(
        session: &mut Session<Self>,
        known: Option<Precopied>,
        image: &mut Writer,
        postcopy: bool,
    ) -> Result<(Vec<u8>, Option<Remaining>), Immovable> {
        let (objects, remaining) =
            Server::ref_cast_mut(session).save_objects(known, image, postcopy)?;
        let mut bytes = Vec::new();
        objects.put(&mut bytes);
        Ok((bytes, remaining))
    }

    fn restore(
        session: &mut Session<Self>,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        Server::ref_cast_mut(session).restore_objects(state, contents)
    }
}

impl Server {
    /// Registers a range of the window with the driver of a context's platform.
    pub(crate) fn reach(&mut self, home: Home, offset: u64, length: u64) {
        let of = (home.platform, home.raw);
        let backend = &mut self.session.backend;
        backend
            .cover
            .reach(&backend.api, &self.session.window, of, offset, length);
    }

    fn carry_out(&mut self, header: Header, request: Request) -> Result<(), Error> {
        let is_of_state = |request: &Request| {
            matches!(
                request,
                Request::WriteState(_) | Request::PrepareState(_) | Request::RestoreState(_)
            )
        };
        if self.is_prepared && !is_of_state(&request) {
            return Err(Error::Unfinished);
        }
        /// Calls a method and answers with its result.
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
            Request::CompareDevices(call) => answered!(&call.told, compare_devices),
            Request::CreateSubDevices(call) => answered!(&call, create_sub_devices),
            Request::ReleaseDevice(call) => answered!(call.id, release_device),
            Request::Timers(call) => answered!(call.device, timers),
            Request::CreateContext(call) => answered!(call, create_context),
            Request::ReleaseContext(call) => answered!(call.id, release_context),
            Request::ImageFormats(call) => answered!(&call, image_formats),
            Request::CreateQueue(call) => answered!(call, create_queue),
            Request::ReleaseQueue(call) => answered!(call.id, release_queue),
            Request::CreateBuffer(call) => {
                let start = self.metered_since();
                answered!(call, create_buffer);
                self.meter_request(start);
            }
            Request::CreateSubBuffer(call) => answered!(call, create_sub_buffer),
            Request::CreateImage(call) => {
                let start = self.metered_since();
                answered!(call, create_image);
                self.meter_request(start);
            }
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
            Request::SaveState(call) => {
                self.save_state(header, (call.patience, call.rounds, call.most))?;
            }
            Request::ReadState(call) => self.read_state(header, call.at, &call.to)?,
            Request::WriteState(call) => self.write_state(header, call.at, &call.from)?,
            Request::RestoreState(_) => {
                self.restore_state(header)?;
                // A client brings all contents itself.
                if self.backend.missing.is_some() {
                    return Err(Error::Elsewhere);
                }
            }
            Request::PrecopyState(call) => self.precopy_state(header, call.round)?,
            Request::PrepareState(_) => self.prepare_state(header)?,
            command => {
                debug_assert!(
                    matches!(
                        command,
                        Request::Marker(_) | Request::Barrier(_) | Request::Unstage(_)
                    ) || matches!(OpenCl::cost(header.opcode, &command), Cost::Work(_)),
                    "a command without a cost gives the device work"
                );
                self.command(header, command)?;
                self.end_overwriting();
            }
        }
        Ok(())
    }
}
