use std::{
    fs::File,
    os::{fd::AsRawFd, unix::fs::FileExt},
    sync::Arc,
    time::{Duration, Instant},
};

use base::memory::{Spare, Steps};
use proptest::prelude::*;
use remoting_proto::{
    apis::opencl::{
        calls::{self, *},
        codes,
    },
    wire::{Flags, Header},
};
use remoting_session::{
    carry::Carried,
    checkpoint::{self, Outcome, Phase, Whose},
    image::{self, Contents, Immovable, Writer},
    precopy::Asker,
};
use remoting_transport::{
    bell::Futex,
    endpoint::Receiver,
    port_bell::Waker,
    ring::Consumer,
    window::{self, Slice, Window},
};

use super::*;
use crate::{OpenClBackend, driver::Api, testing};

mod rounds;

fn file() -> File {
    image::create().unwrap()
}

/// The state of a server without outstanding work. The null driver has profiling times for all
/// events, at any time.
fn state(server: &mut Server) -> Result<Objects, String> {
    server.notices().unwrap();
    let saved = server.save_objects(None, &mut Writer::new(file()), false);
    let (mut objects, _) = saved.map_err(|error| error.to_string())?;
    for event in &mut objects.events {
        if let Status::Over(_, times) = &mut event.status {
            times.clear();
        }
    }
    Ok(objects)
}

/// A state without contents. A buffer that was an argument of a kernel which did not run counts as
/// written in the place that the application left, and need not be copied.
fn objects(state: Result<Objects, String>) -> Result<Objects, String> {
    state.map(|state| Objects {
        contents: Vec::new(),
        ..state
    })
}

/// A new server with the state of another one.
fn moved(server: &mut Server) -> Server {
    let (new, ..) = testing::server();
    with_rest(server, None, new)
}

/// A round whose contents are made by another server. Returns what the next round needs; `None` if
/// something cannot be recreated.
fn round(from: &mut Server, known: Option<Precopied>, to: &mut Server) -> Option<Precopied> {
    from.notices().unwrap();
    let image = file();
    let writer = Writer::new(image.try_clone().unwrap());
    let (known, copying) = from.precopy_objects(known, writer).ok()?;
    copying().unwrap();
    to.prepare(image, false).unwrap();
    Some(known)
}

/// A server that has what rounds have copied, completed with the rest.
fn with_rest(server: &mut Server, known: Option<Precopied>, mut new: Server) -> Server {
    server.notices().unwrap();
    let image = file();
    let mut writer = Writer::new(image.try_clone().unwrap());
    let (objects, _) = server.save_objects(known, &mut writer, false).unwrap();
    let mut bytes = Vec::new();
    objects.put(&mut bytes);
    writer
        .finish::<remoting_proto::apis::opencl::OpenCl, _>(SHAPE, &Blob(bytes))
        .unwrap();
    let (state, contents) =
        Contents::open::<remoting_proto::apis::opencl::OpenCl, Blob>(image, SHAPE).unwrap();
    new.restore_objects(&state.0, &contents).unwrap();
    // As in a session that has restored everything.
    new.is_prepared = false;
    new
}

fn carry_out(server: &mut Server, request: Request) {
    testing::carry_out(server, request);
    while server.backend.building > 0 {
        server.notices().unwrap();
    }
}

/// A call on objects with small numbers: many fail, and many reuse a number.
fn call(kind: u8, a: u32, b: u32, c: u32) -> Request {
    let order = |event: bool| Order {
        queue: QueueId(b),
        wait: Vec::new(),
        event: event.then_some(EventId(a)),
    };
    let blob = |text: &str| Blob(text.as_bytes().to_vec());
    match kind {
        0 => Request::CreateContext(CreateContext {
            id: ContextId(a),
            devices: vec![DeviceId(0)],
            platform: (c > 2).then_some(PlatformId(0)),
        }),
        1 => Request::CreateQueue(calls::CreateQueue {
            id: QueueId(a),
            context: ContextId(b),
            device: DeviceId(if c > 3 { c } else { 0 }),
            properties: codes::QUEUE_PROFILING_ENABLE * u64::from(c & 1),
            further: Vec::new(),
        }),
        2 => Request::CreateBuffer(CreateBuffer {
            id: MemId(a),
            context: ContextId(b),
            flags: 0,
            size: 1 << c,
            contents: None,
            lives: None,
            svm: None,
        }),
        3 => Request::CreateSubBuffer(CreateSubBuffer {
            id: MemId(a),
            of: MemId(b),
            flags: 0,
            origin: 0,
            size: u64::from(c) + 1,
        }),
        4 => Request::CreateImage(CreateImage {
            id: MemId(a),
            context: ContextId(b),
            flags: 0,
            shape: ImageShape {
                order: codes::RGBA,
                data: codes::UNSIGNED_INT8,
                kind: codes::MEM_OBJECT_IMAGE2D,
                extent: [4, 4, 1],
                layers: 0,
                of: (c > 3).then_some(MemId(c)),
            },
            contents: None,
        }),
        5 => Request::ReleaseMem(ReleaseMem {
            id: MemId(a),
            callback: (c > 3).then_some(u64::from(b)),
        }),
        6 => Request::CreateSampler(CreateSampler {
            id: SamplerId(a),
            context: ContextId(b),
            normalized: c > 1,
            addressing: c,
            filter: 0,
        }),
        7 => Request::CreateProgram(CreateProgram {
            id: ProgramId(a),
            context: ContextId(b),
            origin: match c {
                0 => ProgramOrigin::Binary(vec![(DeviceId(0), blob("binary"))]),
                1 => ProgramOrigin::BuiltIn(vec![DeviceId(0)], blob("names")),
                _ => ProgramOrigin::Source(blob("source")),
            },
        }),
        8 => Request::BuildProgram(BuildProgram {
            id: ProgramId(a),
            devices: Vec::new(),
            options: blob("-O"),
            folders: 0,
            included: Vec::new(),
        }),
        9 => Request::CompileProgram(CompileProgram {
            id: ProgramId(a),
            devices: Vec::new(),
            options: blob(""),
            folders: 0,
            included: Vec::new(),
            headers: vec![(ProgramId(b), blob("header.h"))],
        }),
        10 => Request::LinkProgram(LinkProgram {
            id: ProgramId(a),
            context: ContextId(c),
            devices: Vec::new(),
            options: blob(""),
            inputs: vec![ProgramId(b)],
        }),
        11 => Request::CreateKernel(CreateKernel {
            id: KernelId(a),
            program: ProgramId(b),
            name: blob("kernel"),
        }),
        12 => Request::CloneKernel(CloneKernel {
            id: KernelId(a),
            of: KernelId(b),
        }),
        13 => Request::SetArgument(SetArgument {
            kernel: KernelId(a),
            index: c,
            value: match b {
                0 => Value::Mem(None),
                1 => Value::Mem(Some(MemId(c))),
                2 => Value::Sampler(SamplerId(c)),
                3 => Value::Local(8),
                _ => Value::Bytes(blob("bytes")),
            },
        }),
        14 => Request::CreateUserEvent(CreateUserEvent {
            id: EventId(a),
            context: ContextId(b),
        }),
        15 => Request::SetUserEventStatus(SetUserEventStatus {
            id: EventId(a),
            status: -(c as i32),
        }),
        16 => Request::Marker(Marker { order: order(true) }),
        17 => Request::Barrier(Barrier {
            order: order(false),
        }),
        18 => Request::ReleaseEvent(ReleaseEvent { id: EventId(a) }),
        19 => Request::ReleaseContext(ReleaseContext { id: ContextId(a) }),
        20 => Request::ReleaseQueue(ReleaseQueue { id: QueueId(a) }),
        21 => Request::ReleaseProgram(ReleaseProgram { id: ProgramId(a) }),
        22 => Request::ReleaseKernel(ReleaseKernel { id: KernelId(a) }),
        23 => Request::ReleaseSampler(ReleaseSampler { id: SamplerId(a) }),
        24 => Request::CreateSubDevices(CreateSubDevices {
            device: DeviceId(if c > 3 { c } else { 0 }),
            properties: vec![u64::from(b)],
            ids: vec![DeviceId(a + 4)],
        }),
        25 => Request::ReleaseDevice(ReleaseDevice {
            id: DeviceId(a + 4),
        }),
        // An impossible command: its error is reported later.
        _ => Request::FillBuffer(FillBuffer {
            order: order(c > 2),
            mem: MemId(c),
            pattern: blob("pattern"),
            offset: 0,
            size: 4,
        }),
    }
}

fn some_calls() -> impl Strategy<Value = Vec<(u8, u32, u32, u32)>> {
    // Most others need contexts, queues and buffers.
    let kind = prop_oneof![1 => 0u8..3, 2 => 0u8..27];
    prop::collection::vec((kind, 0u32..3, 0u32..3, 0u32..6), 0..60)
}

proptest! {
    /// Wherever the move happens, the final state is the state without a move.
    #[test]
    fn an_application_that_moves_has_the_state_of_one_that_stays(
        before in some_calls(),
        after in some_calls(),
    ) {
        let (mut stays, ..) = testing::server();
        let (mut moves, ..) = testing::server();
        for (kind, a, b, c) in before {
            carry_out(&mut stays, call(kind, a, b, c));
            carry_out(&mut moves, call(kind, a, b, c));
        }
        // An application with something that cannot be recreated is told so, and stays.
        let now = state(&mut stays);
        prop_assert_eq!(&now, &state(&mut moves));
        prop_assume!(now.is_ok());
        let mut moves = moved(&mut moves);
        prop_assert_eq!(now, state(&mut moves));
        for (kind, a, b, c) in after {
            carry_out(&mut stays, call(kind, a, b, c));
            carry_out(&mut moves, call(kind, a, b, c));
        }
        prop_assert_eq!(state(&mut stays), state(&mut moves));
    }
}

proptest! {
    /// Also if a part of its state is copied while it runs.
    #[test]
    fn an_application_that_is_copied_while_it_goes_on_has_the_state_of_one_that_stays(
        parts in prop::collection::vec(some_calls(), 2..5),
        after in some_calls(),
    ) {
        let (mut stays, ..) = testing::server();
        let (mut moves, ..) = testing::server();
        let (mut new, ..) = testing::server();
        let mut known = None;
        for part in parts {
            for (kind, a, b, c) in part {
                carry_out(&mut stays, call(kind, a, b, c));
                carry_out(&mut moves, call(kind, a, b, c));
            }
            prop_assume!(state(&mut stays).is_ok());
            // The last round is the one before the remaining state.
            known = round(&mut moves, known, &mut new);
            prop_assert!(known.is_some());
        }
        for (kind, a, b, c) in &after {
            carry_out(&mut stays, call(*kind, *a, *b, *c));
            carry_out(&mut moves, call(*kind, *a, *b, *c));
        }
        let now = state(&mut stays);
        prop_assume!(now.is_ok());
        let mut moves = with_rest(&mut moves, known, new);
        prop_assert_eq!(objects(now), objects(state(&mut moves)));
        for (kind, a, b, c) in after {
            carry_out(&mut stays, call(kind, a, b, c));
            carry_out(&mut moves, call(kind, a, b, c));
        }
        prop_assert_eq!(objects(state(&mut stays)), objects(state(&mut moves)));
    }

    /// Whatever a round contains, and whatever follows it.
    #[test]
    fn a_damaged_round_is_made_or_refused(
        calls in some_calls(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (mut server, ..) = testing::server();
        for (kind, a, b, c) in calls {
            carry_out(&mut server, call(kind, a, b, c));
        }
        server.notices().unwrap();
        let image = file();
        let writer = Writer::new(image.try_clone().unwrap());
        let Ok((known, copying)) = server.precopy_objects(None, writer) else {
            return Ok(());
        };
        copying().unwrap();
        let mut bytes = std::fs::read(format!("/proc/self/fd/{}", image.as_raw_fd())).unwrap();
        for (at, value) in damage {
            // The writer's identification is left intact: another build's would be refused as such.
            let at = 16 + at.index(bytes.len() - 16);
            bytes[at] = value;
        }
        image.write_all_at(&bytes, 0).unwrap();
        let (mut again, ..) = testing::server_before(Api::typed());
        if again.prepare(image, true).is_ok() {
            let rest = file();
            let mut writer = Writer::new(rest.try_clone().unwrap());
            let saved = server.save_objects(Some(known), &mut writer, true);
            let (objects, _) = saved.unwrap();
            let mut bytes = Vec::new();
            objects.put(&mut bytes);
            checkpoint::write::<OpenClBackend>(rest.try_clone().unwrap(), &bytes).unwrap();
            let _ = again.restore(rest, true);
        }
    }
}

proptest! {
    /// Whatever a saved state contains: it is recreated or refused, and the driver gets no handle
    /// of the wrong kind.
    #[test]
    fn a_damaged_state_is_restored_or_refused(
        calls in some_calls(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (mut server, ..) = testing::server();
        for (kind, a, b, c) in calls {
            carry_out(&mut server, call(kind, a, b, c));
        }
        server.notices().unwrap();
        let image = file();
        let writer = &mut Writer::new(image.try_clone().unwrap());
        let Ok((objects, _)) = server.save_objects(None, writer, true) else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        objects.put(&mut bytes);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        checkpoint::write::<OpenClBackend>(image.try_clone().unwrap(), &bytes).unwrap();
        let (mut again, ..) = testing::server_before(Api::typed());
        let _ = again.restore(image, true);
    }
}

/// A server and its client's end of the answers.
struct Served {
    server: Server,
    calls: Receiver<Slice, Waker>,
    window: Arc<Window>,
    answers: Receiver<Slice, Futex>,
}

impl Served {
    fn new() -> Self {
        let (server, calls, window) = testing::server();
        let answers = Receiver::new(Consumer::new(window.answers(), testing::BELL));
        Self {
            server,
            calls,
            window,
            answers,
        }
    }

    /// The answer to a call, and whether the session continues.
    fn ask<C: Call>(&mut self, request: Request) -> (C::Answer, bool) {
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: Flags::ANSWER,
            sequence: 1,
        };
        let goes_on = self.server.serve(header, request).is_ok();
        let mut body = Vec::new();
        loop {
            self.server.notices().unwrap();
            self.server.obey(&mut self.calls).unwrap();
            if let Some(header) = self.answers.poll(&mut body).unwrap()
                && header.opcode == ANSWER
            {
                let answer = Result::<C::Answer, i32>::from_bytes(&body).unwrap();
                return (answer.unwrap(), goes_on);
            }
        }
    }

    fn save(&mut self, rounds: u32) -> (u64, Blob) {
        self.save_with(rounds, u64::MAX)
    }

    fn save_with(&mut self, rounds: u32, most: u64) -> (u64, Blob) {
        let call = SaveState {
            patience: u64::MAX,
            rounds,
            most,
        };
        self.ask::<SaveState>(Request::SaveState(call)).0
    }

    fn precopy(&mut self, round: u32) -> (u64, Blob) {
        let call = PrecopyState { round };
        self.ask::<PrecopyState>(Request::PrecopyState(call)).0
    }

    fn prepare(&mut self) -> (Blob, bool) {
        self.ask::<PrepareState>(Request::PrepareState(PrepareState {}))
    }

    /// Carries an image of this length to another worker.
    fn carry(&mut self, to: &mut Self, length: u64) {
        let mut at = 0;
        while at < length {
            let part = 1000.min(length - at);
            assert_eq!(self.read(at, part), DONE);
            let places = self.window.at(self.window.data(), part);
            let (from, there) = places.zip(to.window.at(to.window.data(), part)).unwrap();
            // SAFETY: both windows have that many bytes there.
            unsafe { std::ptr::copy_nonoverlapping(from, there, part as usize) };
            assert_eq!(to.write(at, part), DONE);
            at += part;
        }
    }

    fn read(&mut self, at: u64, length: u64) -> Blob {
        let to = self.place(length);
        let call = ReadState { at, to };
        self.ask::<ReadState>(Request::ReadState(call)).0
    }

    fn write(&mut self, at: u64, length: u64) -> Blob {
        let from = self.place(length);
        let call = WriteState { at, from };
        self.ask::<WriteState>(Request::WriteState(call)).0
    }

    fn restore(&mut self) -> (Blob, bool) {
        self.ask::<RestoreState>(Request::RestoreState(RestoreState {}))
    }

    fn place(&self, length: u64) -> WindowRange {
        WindowRange {
            offset: self.window.data(),
            length,
            stage: Some(StageId(7)),
        }
    }
}

const DONE: Blob = Blob(Vec::new());

/// Runs a round. Returns what the next one needs, and how many parts of contents it has copied.
fn copied(from: &mut Server, known: Option<Precopied>) -> (Precopied, usize) {
    from.notices().unwrap();
    let image = file();
    let writer = Writer::new(image.try_clone().unwrap());
    let (known, copying) = from.precopy_objects(known, writer).unwrap();
    copying().unwrap();
    let state = Contents::open::<remoting_proto::apis::opencl::OpenCl, Blob>(image, SHAPE).unwrap();
    let early = Early::from_bytes(&state.0.0).unwrap();
    (known, early.contents.len())
}

/// A server with an image, whose driver's markers complete when a test decides.
fn with_image() -> Server {
    let (mut server, ..) = testing::server_before(Api::null().with_ends(marker, ends, wait, free));
    for (kind, a, b, c) in [(0, 0, 0, 0), (1, 0, 0, 0), (4, 0, 0, 0)] {
        carry_out(&mut server, call(kind, a, b, c));
    }
    server
}

thread_local! {
    static ENDED: std::cell::Cell<bool> = const { std::cell::Cell::new(true) };
    static REFUSES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

unsafe extern "C" fn marker(_: usize, _: u32, _: *const usize, event: *mut usize) -> i32 {
    if REFUSES.get() {
        return codes::OUT_OF_HOST_MEMORY;
    }
    // SAFETY: the worker asks for the event.
    unsafe { event.write(1000) };
    0
}

unsafe extern "C" fn ends(
    _: usize,
    _: u32,
    _: usize,
    value: *mut std::ffi::c_void,
    _: *mut usize,
) -> i32 {
    // SAFETY: the worker asks for a status.
    unsafe { value.cast::<i32>().write(if ENDED.get() { 0 } else { 1 }) };
    0
}

unsafe extern "C" fn wait(_: u32, _: *const usize) -> i32 {
    0
}

unsafe extern "C" fn free(_: usize, _: *mut std::ffi::c_void) {}

/// Writes the first bytes of a buffer.
fn fill(mem: u32, size: u64) -> Request {
    Request::FillBuffer(FillBuffer {
        order: testing::order(),
        mem: MemId(mem),
        pattern: Blob(vec![7]),
        offset: 0,
        size,
    })
}

fn fill_image(server: &mut Server) {
    let fill = FillImage {
        order: Order {
            queue: QueueId(0),
            wait: Vec::new(),
            event: None,
        },
        mem: MemId(0),
        colour: [0; 4],
        origin: [0; 3],
        region: [1; 3],
    };
    carry_out(server, Request::FillImage(fill));
}

#[test]
fn a_round_copies_of_images_those_that_commands_have_written_since() {
    let mut server = with_image();
    let (known, first) = copied(&mut server, None);
    assert_eq!(first, 1);
    let (known, second) = copied(&mut server, Some(known));
    assert_eq!(second, 0);
    fill_image(&mut server);
    let (known, third) = copied(&mut server, Some(known));
    assert_eq!(third, 1);
    fill_image(&mut server);
    let writer = &mut Writer::new(file());
    let (rest, _) = server.save_objects(Some(known), writer, false).unwrap();
    assert_eq!(rest.contents.len(), 1);
}

unsafe extern "C" fn says_nothing(
    _: usize,
    _: u32,
    _: usize,
    _: *mut std::ffi::c_void,
    _: *mut usize,
) -> i32 {
    0
}

unsafe extern "C" fn describes_nothing(
    _: usize,
    _: u32,
    _: u32,
    _: usize,
    _: *mut std::ffi::c_void,
    _: *mut usize,
) -> i32 {
    0
}

thread_local! {
    static ARGUMENTS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

unsafe extern "C" fn counts(_: usize, _: u32, _: usize, _: *const std::ffi::c_void) -> i32 {
    ARGUMENTS.set(ARGUMENTS.get() + 1);
    0
}

#[test]
fn a_round_has_a_kernel_for_buffers_of_several_blocks_only() {
    let driver = Api::null()
        .with_ends(marker, ends, wait, free)
        .with_kernels(says_nothing, describes_nothing, counts);
    let (mut server, ..) = testing::server_before(driver);
    // Buffers of 64 KiB and less.
    for (kind, a, b, c) in [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 16), (2, 1, 0, 4)] {
        carry_out(&mut server, call(kind, a, b, c));
    }
    for mem in [0, 1] {
        carry_out(&mut server, fill(mem, 16));
    }
    let (known, first) = copied(&mut server, None);
    let (known, second) = copied(&mut server, Some(known));
    assert_eq!([first, second], [2, 0]);
    assert_eq!(ARGUMENTS.get(), 0);
    // A buffer of several blocks that nobody has written needs none, either.
    carry_out(&mut server, call(2, 2, 0, 17));
    let (known, third) = copied(&mut server, Some(known));
    assert_eq!((third, ARGUMENTS.get()), (0, 0));
    carry_out(&mut server, fill(2, 16));
    copied(&mut server, Some(known));
    assert_ne!(ARGUMENTS.get(), 0);
}

#[test]
fn what_commands_may_write_that_do_not_end_before_a_round_copies_is_copied_again() {
    let mut server = with_image();
    fill_image(&mut server);
    ENDED.set(false);
    let (known, first) = copied(&mut server, None);
    ENDED.set(true);
    let (known, second) = copied(&mut server, Some(known));
    let (_, third) = copied(&mut server, Some(known));
    assert_eq!([first, second, third], [1, 1, 0]);
}

#[test]
fn an_application_stays_whose_released_queues_end_the_driver_does_not_tell() {
    let mut server = with_image();
    let (known, _) = copied(&mut server, None);
    fill_image(&mut server);
    REFUSES.set(true);
    server.release_queue(QueueId(0)).unwrap();
    REFUSES.set(false);
    // What the command writes may arrive after any later round.
    let busy = server.driver_busy();
    assert!(matches!(busy, Some(Busy::Never(_))), "{busy:?}");
    for known in [Some(known), None] {
        let round = server.precopy_objects(known, Writer::new(file()));
        assert!(matches!(round, Err(Immovable::Has(_))));
    }
}

#[test]
fn an_application_stays_whose_programs_have_variables() {
    let (mut server, ..) = testing::server();
    for request in [
        call(0, 0, 0, 0),
        Request::CreateProgram(CreateProgram {
            id: ProgramId(0),
            context: ContextId(0),
            origin: ProgramOrigin::Source(Blob(b"kernel void k() {}".to_vec())),
        }),
    ] {
        carry_out(&mut server, request);
    }
    assert!(server.driver_busy().is_none());
    let record = &server.backend.programs.get(0).unwrap().record;
    record.has_variables.store(true, Ordering::Release);
    let busy = server.driver_busy();
    assert!(matches!(busy, Some(Busy::Never(_))), "{busy:?}");
    let round = server.precopy_objects(None, Writer::new(file()));
    let Err(Immovable::Has(why)) = round else {
        panic!("a round was copied");
    };
    assert!(why.contains("variables at program scope"), "{why}");
}

#[test]
fn a_program_is_built_again_with_the_constants_that_it_had_then() {
    let (mut server, ..) = testing::server();
    let set = |value: u8| {
        Request::Specialize(Specialize {
            id: ProgramId(0),
            constant: 3,
            value: Blob(vec![value; 4]),
        })
    };
    for request in [
        call(0, 0, 0, 0),
        Request::CreateProgram(CreateProgram {
            id: ProgramId(0),
            context: ContextId(0),
            origin: ProgramOrigin::Source(Blob(b"kernel void k() {}".to_vec())),
        }),
        set(1),
        Request::BuildProgram(BuildProgram {
            id: ProgramId(0),
            devices: Vec::new(),
            options: Blob::default(),
            folders: 0,
            included: Vec::new(),
        }),
        set(2),
    ] {
        carry_out(&mut server, request);
    }
    let before = state(&mut server).unwrap();
    let calls: Vec<_> = before.log.iter().map(|entry| entry.opcode).collect();
    let built = [Specialize::OPCODE, BuildProgram::OPCODE, Specialize::OPCODE];
    assert!(calls.ends_with(&built), "{calls:?}");
    let mut new = moved(&mut server);
    assert_eq!(state(&mut new).unwrap(), before);
}

#[test]
fn a_kernel_that_a_round_meets_before_its_build_is_told_is_of_that_build() {
    let (mut server, ..) = testing::server();
    let build = |options: &[u8]| {
        Request::BuildProgram(BuildProgram {
            id: ProgramId(0),
            devices: Vec::new(),
            options: Blob(options.to_vec()),
            folders: 0,
            included: Vec::new(),
        })
    };
    for request in [
        call(0, 0, 0, 0),
        Request::CreateProgram(CreateProgram {
            id: ProgramId(0),
            context: ContextId(0),
            origin: ProgramOrigin::Source(Blob(b"kernel void k() {}".to_vec())),
        }),
        build(b"-DA"),
    ] {
        carry_out(&mut server, request);
    }
    testing::carry_out(&mut server, build(b"-DB"));
    // The driver has ended the build once its thread has let go of the program; the thread tells then.
    while server.backend.programs.get(0).unwrap().builds.any() {
        std::thread::yield_now();
    }
    let create = CreateKernel {
        id: KernelId(0),
        program: ProgramId(0),
        name: Blob(b"k".to_vec()),
    };
    testing::carry_out(&mut server, Request::CreateKernel(create));
    assert!(server.backend.kernels.get(0).unwrap().is_untold);
    let (mut new, ..) = testing::server();
    let image = file();
    let writer = Writer::new(image.try_clone().unwrap());
    let (known, copying) = server.precopy_objects(None, writer).unwrap();
    copying().unwrap();
    new.prepare(image, false).unwrap();
    while server.backend.building > 0 {
        server.notices().unwrap();
    }
    let new = with_rest(&mut server, Some(known), new);
    let kernel = new.backend.kernels.get(0).unwrap();
    let built = kernel.program.built.as_ref().unwrap();
    let crate::records::Build::Whole(call) = &built.call else {
        panic!("it was built as a whole");
    };
    assert_eq!(call.options.0, b"-DB");
}

/// A server with a context, a user event without a status, and a buffer.
fn with_objects() -> Served {
    let mut served = Served::new();
    for (kind, a, b, c) in [(0, 0, 0, 0), (1, 0, 0, 0), (2, 1, 0, 5), (14, 2, 0, 0)] {
        carry_out(&mut served.server, call(kind, a, b, c));
    }
    served
}

#[test]
fn a_state_is_made_by_no_device_that_lacks_what_its_application_was_told() {
    let mut server = testing::server().0;
    let answered = Answered {
        device: DeviceId(0),
        parameter: codes::DEVICE_IMAGE_SUPPORT,
        answer: Blob(vec![1]),
    };
    // This device reports nothing about images.
    let offered = server.offered_kinds();
    let refused = server.make_objects((&offered, &[answered]), &[], &[]);
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("CL_DEVICE_IMAGE_SUPPORT"), "{why}");
    assert_eq!(server.told().all(), []);
}

#[test]
fn a_client_carries_its_state_to_another_worker_by_calls() {
    let (mut left, mut new) = (with_objects(), Served::new());
    let (length, why) = left.save(0);
    assert_eq!(why, DONE);
    left.carry(&mut new, length);
    assert_eq!(new.restore(), (DONE, true));
    // The old worker still serves, in case the client comes back.
    assert_eq!(state(&mut left.server), state(&mut new.server));
    assert_eq!(left.read(0, 0), DONE);
    assert_ne!(left.read(0, 8), DONE, "the image was given up");
    carry_out(&mut left.server, call(15, 2, 0, 0));
    assert_eq!(left.save(0).1, DONE);
}

#[test]
fn what_a_client_saves_is_no_more_than_a_worker_may_have_and_goes_with_its_last_part() {
    let mut served = with_objects();
    served.server.most_carried = 4096;
    let (length, why) = served.save(0);
    assert!(length == 0 && why != DONE);
    assert_ne!(served.read(0, 8), DONE, "nothing was saved");
    served.server.most_carried = 1 << 20;
    let (length, why) = served.save(0);
    assert_eq!(why, DONE);
    assert_eq!(served.read(0, length - 1), DONE);
    assert_eq!(served.read(length - 1, 1), DONE);
    assert_ne!(served.read(0, 1), DONE, "all was read");
}

#[test]
fn what_a_client_brings_is_no_more_than_a_new_session_takes() {
    let mut new = Served::new();
    assert_ne!(new.read(0, 8), DONE, "nothing was saved");
    new.server.most_carried = 4096;
    assert_eq!(new.write(4095, 1), DONE);
    for at in [4096, u64::MAX] {
        assert_ne!(new.write(at, 1), DONE);
    }
    for length in [window::SMALLEST, u64::MAX, 5 << 20] {
        assert_ne!(new.write(0, length), DONE);
        assert_ne!(new.read(0, length), DONE);
    }
    let (why, goes_on) = new.restore();
    assert!(why != DONE && !goes_on, "zeroes are no image");
    let (why, goes_on) = Served::new().restore();
    assert!(why != DONE && !goes_on, "nothing was written");
    // A session's own state, restored over itself.
    let mut full = with_objects();
    let (length, _) = full.save(0);
    assert_eq!(full.read(0, length), DONE);
    assert_eq!(full.write(0, length), DONE);
    let (why, goes_on) = full.restore();
    assert!(why != DONE && !goes_on, "it has objects");
}

#[test]
fn a_client_carries_rounds_of_its_state_while_it_makes_calls() {
    let (mut left, mut new) = (with_objects(), Served::new());
    for round in 0..3 {
        let (length, why) = left.precopy(round);
        assert_eq!(why, DONE);
        left.carry(&mut new, length);
        assert_eq!(new.prepare(), (DONE, true));
        let made = call(2, round + 2, 0, 5);
        carry_out(&mut left.server, made);
        carry_out(&mut left.server, call(5, round + 1, 0, 0));
    }
    let (length, why) = left.save(3);
    assert_eq!(why, DONE);
    left.carry(&mut new, length);
    assert_eq!(new.restore(), (DONE, true));
    assert_eq!(state(&mut left.server), state(&mut new.server));
    carry_out(&mut new.server, call(15, 2, 0, 0));
}

#[test]
fn rounds_of_a_client_are_its_own_and_go_when_it_gives_them_up() {
    let mut served = with_objects();
    assert_ne!(served.precopy(1).1, DONE, "there was none before");
    assert_ne!(served.precopy(u32::MAX).1, DONE);
    assert_eq!(served.precopy(0).1, DONE);
    assert_ne!(served.save(2).1, DONE, "there was one");
    assert_eq!(served.precopy(0).1, DONE);
    assert_eq!(served.read(0, 0), DONE);
    assert_ne!(served.precopy(1).1, DONE, "it was given up");
    served.server.most_carried = 4096;
    assert_ne!(served.precopy(0).1, DONE, "it is too long");
    assert_ne!(served.read(0, 8), DONE);
    assert_ne!(served.precopy(1).1, DONE, "none was copied");
}

#[test]
fn what_a_client_brings_is_written_only_while_the_worker_has_memory_for_it() {
    const PART: u64 = 1 << 20;
    let short = || {
        Some(Spare {
            bytes: 0,
            limit: Some("/group/memory.max".into()),
        })
    };
    let mut new = Served::new();
    new.server.carried = Carried::Image(file(), Steps::of(short));
    // The same part again and again: nobody checks for repeats.
    assert_eq!(new.write(0, PART), DONE);
    let mut written = (0..1 << 10).map(|_| new.write(0, PART));
    let Blob(why) = written.find(|why| *why != DONE).unwrap();
    let why = String::from_utf8(why).unwrap();
    assert!(why.contains("are left of /group/memory.max"), "{why}");
}

#[test]
fn a_client_does_not_end_the_rounds_of_the_pool_or_the_machine() {
    let mut served = with_objects();
    for asker in [Asker::Pool, Asker::Machine] {
        assert_eq!(served.precopy(0).1, DONE);
        for round in 0..3 {
            let (done, outcome) = std::sync::mpsc::channel();
            served.server.precopy(file(), asker, round, &done);
            assert_eq!(outcome.recv().unwrap(), Ok(Outcome::Done));
            for refused in [served.precopy(0), served.precopy(1), served.save(0)] {
                assert_ne!(refused.1, DONE);
            }
            assert!(served.server.phase.serves());
            assert_eq!(served.read(0, 0), DONE);
        }
        served.server.forget_rounds(asker);
    }
    assert_eq!(served.save(0).1, DONE);
}

#[test]
fn a_state_is_not_saved_and_no_second_round_begun_while_one_is_copied() {
    let mut served = with_objects();
    // Whether or not somebody waits for it.
    let copying = Arc::new(());
    served.server.copying = Arc::downgrade(&copying);
    assert_ne!(served.precopy(0).1, DONE);
    drop(copying);
    assert_eq!(served.precopy(0).1, DONE);
    served.server.carried = Carried::Due;
    assert_ne!(served.precopy(0).1, DONE);
    assert_ne!(served.write(0, 8), DONE);
    let busy = served.server.busy().unwrap();
    assert!(matches!(busy, Some(Busy::Still(_))), "{busy:?}");
}

#[test]
fn a_state_is_not_saved_while_somebody_else_waits_for_the_worker() {
    let mut served = with_objects();
    let first = Header {
        length: 0,
        opcode: SaveState::OPCODE,
        flags: Flags::ANSWER,
        sequence: 7,
    };
    served.server.phase = Phase::Draining {
        until: Instant::now() + Duration::from_hours(1),
        whose: Whose::Client(first, 0),
    };
    assert_ne!(served.save(0).1, DONE);
    assert_eq!(served.save(0).1, DONE, "the first has its answer");
}

#[test]
fn a_round_that_is_given_up_while_it_is_copied_leaves_no_image() {
    let mut served = with_objects();
    let header = Header {
        length: 0,
        opcode: PrecopyState::OPCODE,
        flags: Flags::ANSWER,
        sequence: 1,
    };
    let round = Request::PrecopyState(PrecopyState { round: 0 });
    served.server.serve(header, round).unwrap();
    let nothing = ReadState {
        at: 0,
        to: served.place(0),
    };
    let header = Header {
        opcode: ReadState::OPCODE,
        ..header
    };
    let given_up = Request::ReadState(nothing);
    served.server.serve(header, given_up).unwrap();
    while served.server.carried.is_due() {
        served.server.notices().unwrap();
    }
    let left = &served.server.carried;
    assert!(matches!(left, Carried::Nothing), "{left:?}");
}

#[test]
fn who_brings_a_round_makes_no_other_call_before_the_rest_and_brings_none_to_objects() {
    let (mut left, mut new) = (with_objects(), Served::new());
    let header = Header {
        length: 0,
        opcode: 70,
        flags: Flags::default(),
        sequence: 0,
    };
    let length = left.precopy(0).0;
    left.carry(&mut new, length);
    assert_eq!(new.prepare(), (DONE, true));
    assert!(new.server.serve(header, call(2, 1, 0, 5)).is_err());
    let length = left.precopy(0).0;
    let mut full = with_objects();
    left.carry(&mut full, length);
    let (why, goes_on) = full.prepare();
    assert!(why != DONE && !goes_on, "it has objects");
    let (why, goes_on) = Served::new().prepare();
    assert!(why != DONE && !goes_on, "nothing was written");
}
