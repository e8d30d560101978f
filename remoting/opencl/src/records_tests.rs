//! Tests of what a worker records about programs, kernels and events.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use remoting_proto::{
    apis::opencl::{
        calls::{
            CloneKernel, ContextId, CreateContext, CreateKernel, CreateSampler, CreateUserEvent,
            DeviceId, EventId, KernelId, ProgramId, ReleaseMem, SamplerId, SetArgument,
            SetUserEventStatus, Specialize,
        },
        codes,
    },
    wire::Header,
};

use super::*;
use crate::{
    Server,
    driver::Api,
    testing::{self, Parameter, Parameters, UNTOLD, with_parameters},
};

/// A server with a context, and a buffer of the same number.
fn server() -> Server {
    server_of(Api::null())
}

fn server_of(api: Api) -> Server {
    let (mut server, ..) = testing::server_before(api);
    server
        .create_context(CreateContext {
            id: ContextId(0),
            devices: vec![DeviceId(0)],
            platform: None,
        })
        .unwrap();
    buffer(&mut server);
    server
}

fn buffer(server: &mut Server) {
    server
        .create_buffer(remoting_proto::apis::opencl::calls::CreateBuffer {
            id: MemId(0),
            context: ContextId(0),
            flags: 0,
            size: 64,
            contents: None,
            lives: None,
            svm: None,
        })
        .unwrap();
}

fn source(text: &[u8]) -> CreateProgram {
    CreateProgram {
        id: ProgramId(0),
        context: ContextId(0),
        origin: ProgramOrigin::Source(Blob(text.to_vec())),
    }
}

fn program(server: &mut Server, id: u32, text: &[u8]) {
    let call = CreateProgram {
        id: ProgramId(id),
        ..source(text)
    };
    server.create_program(call).unwrap();
}

fn context() -> Arc<ContextRecord> {
    Arc::new(ContextRecord {
        call: CreateContext {
            id: ContextId(0),
            devices: Vec::new(),
            platform: None,
        },
        devices: Vec::new(),
    })
}

fn created(call: CreateProgram) -> Arc<ProgramRecord> {
    ProgramRecord::new(context(), Origin::Created(call, Vec::new()))
}

fn linked(call: LinkProgram, inputs: Vec<Arc<ProgramRecord>>) -> Arc<ProgramRecord> {
    let linked = Linked::new(call, Vec::new(), Some(inputs));
    ProgramRecord::new(context(), Origin::Linked(linked))
}

/// The source text that a program was made from.
fn text(origin: &Origin) -> Option<&[u8]> {
    match origin {
        Origin::Created(
            CreateProgram {
                origin: ProgramOrigin::Source(text),
                ..
            },
            _,
        ) => Some(&text.0),
        _ => None,
    }
}

fn record(server: &Server, id: u32) -> &ProgramRecord {
    &server.backend.programs.get(id).unwrap().record
}

fn header() -> Header {
    Header {
        length: 0,
        opcode: 0,
        flags: Default::default(),
        sequence: 0,
    }
}

fn kernel(server: &mut Server, id: u32, program: u32) {
    server
        .create_kernel(&CreateKernel {
            id: KernelId(id),
            program: ProgramId(program),
            name: Blob(b"k".to_vec()),
        })
        .unwrap();
}

fn set(server: &mut Server, kernel: u32, index: u32, value: Value) {
    server
        .set_argument(&SetArgument {
            kernel: KernelId(kernel),
            index,
            value,
        })
        .unwrap();
}

fn bytes(length: usize) -> Value {
    Value::Bytes(Blob(vec![7; length]))
}

fn sampler(server: &mut Server) {
    let sampler = CreateSampler {
        id: SamplerId(0),
        context: ContextId(0),
        normalized: false,
        addressing: 0,
        filter: 0,
    };
    server.create_sampler(sampler).unwrap();
}

struct Described;

impl Parameters for Described {
    const TABLE: &[Parameter] = &[
        (codes::KERNEL_ARG_ADDRESS_GLOBAL, b"image_t*\0", 0),
        (codes::KERNEL_ARG_ADDRESS_GLOBAL, b"image2d_array_t\0", 0),
        (codes::KERNEL_ARG_ADDRESS_PRIVATE, b"sampler_t\0", 0),
        (codes::KERNEL_ARG_ADDRESS_PRIVATE, b"ulong\0", 0),
        (codes::KERNEL_ARG_ADDRESS_LOCAL, b"float*\0", 0),
        (codes::KERNEL_ARG_ADDRESS_PRIVATE, b"queue_t\0", 0),
    ];
}

#[test]
fn an_argument_gets_no_value_of_another_kind() {
    let mut server = server_of(with_parameters::<Described>(Api::null()));
    program(&mut server, 0, b"");
    kernel(&mut server, 0, 0);
    sampler(&mut server);
    let values = [
        bytes(size_of::<usize>()),
        Value::Mem(Some(MemId(0))),
        Value::Mem(None),
        Value::Sampler(SamplerId(0)),
        Value::Local(8),
        Value::Svm(None),
    ];
    let taken = |server: &mut Server, index| {
        let mut taken = values.clone().map(|value| {
            let call = SetArgument {
                kernel: KernelId(0),
                index,
                value,
            };
            let set = server.set_argument(&call);
            // One that the kernel takes may have no such device.
            set != Err(codes::INVALID_ARG_VALUE)
        });
        taken.reverse();
        taken
            .iter()
            .fold(0, |bits, taken| bits << 1 | u32::from(*taken))
    };
    // One bit per value, the first one lowest.
    let expected = [0b10_0110, 0b00_0110, 0b00_1000, 0b00_0001, 0b01_0000, 0];
    for (index, expected) in (0..).zip(expected) {
        assert_eq!(taken(&mut server, index), expected, "argument {index}");
    }
}

struct Untold;

impl Parameters for Untold {
    const TABLE: &[Parameter] = &[(UNTOLD, b"\0", 0), (UNTOLD, b"\0", 0), (UNTOLD, b"\0", 0)];
}

#[test]
fn an_argument_of_an_untold_kind_keeps_the_kind_of_its_first_value() {
    let mut server = server_of(with_parameters::<Untold>(Api::null()));
    program(&mut server, 0, b"");
    kernel(&mut server, 0, 0);
    sampler(&mut server);
    let mut set = |index, value| {
        let kernel = KernelId(0);
        server.set_argument(&SetArgument {
            kernel,
            index,
            value,
        })
    };
    let refused = Err(codes::INVALID_ARG_VALUE);
    // A buffer, or a null pointer.
    assert_eq!(set(0, bytes(size_of::<usize>())), Ok(()));
    assert_eq!(set(0, Value::Mem(None)), Ok(()));
    for value in [
        Value::Sampler(SamplerId(0)),
        bytes(size_of::<usize>()),
        Value::Local(8),
    ] {
        assert_eq!(set(0, value), refused);
    }
    assert_eq!(set(0, Value::Mem(None)), Ok(()));
    assert_eq!(set(1, Value::Sampler(SamplerId(0))), Ok(()));
    assert_eq!(set(1, Value::Mem(None)), refused);
    assert_eq!(set(2, bytes(4)), Ok(()));
    assert_eq!(set(2, Value::Sampler(SamplerId(0))), refused);
    assert_eq!(set(2, bytes(16)), Ok(()));
}

#[test]
fn binaries_are_not_asked_for_while_a_build_changes_them() {
    let mut server = server();
    program(&mut server, 0, b"");
    let build = server.backend.programs.get(0).unwrap().builds.clone();
    let refused = Err(codes::INVALID_PROGRAM_EXECUTABLE);
    assert_eq!(server.program_binaries(ProgramId(0)), refused);
    drop(build);
    assert_ne!(server.program_binaries(ProgramId(0)), refused);
}

#[test]
fn a_kernel_keeps_its_program_when_another_one_gets_the_number() {
    let mut server = server();
    program(&mut server, 0, b"first");
    kernel(&mut server, 0, 0);
    server.release_program(ProgramId(0)).unwrap();
    program(&mut server, 0, b"second");
    let clone = CloneKernel {
        id: KernelId(1),
        of: KernelId(0),
    };
    server.clone_kernel(&clone).unwrap();
    server.release_kernel(KernelId(0)).unwrap();
    let clone = server.backend.kernels.get(1).unwrap();
    assert_eq!(text(&clone.program.origin), Some(&b"first"[..]));
    assert_eq!(clone.name.0, b"k");
}

#[test]
fn arguments_are_kept_and_of_objects_which_one_of_their_number_it_was() {
    let mut server = server();
    program(&mut server, 0, b"");
    kernel(&mut server, 0, 0);
    set(&mut server, 0, 0, Value::Mem(Some(MemId(0))));
    set(&mut server, 0, 2, bytes(4));
    set(&mut server, 0, 3, Value::Local(64));
    let first = server.backend.mems.birth(0);
    let release = ReleaseMem {
        id: MemId(0),
        callback: None,
    };
    server.release_mem(&release).unwrap();
    buffer(&mut server);
    assert_ne!(server.backend.mems.birth(0), first);
    let clone = CloneKernel {
        id: KernelId(1),
        of: KernelId(0),
    };
    server.clone_kernel(&clone).unwrap();
    set(&mut server, 0, 2, bytes(8));
    let there = Named {
        id: MemId(0),
        birth: first,
    };
    for (kernel, length) in [(0, 8), (1, 4)] {
        let arguments = &server.backend.kernels.get(kernel).unwrap().arguments;
        assert_eq!(arguments.get(0), Some(&Argument::Mem(Some(there))));
        assert_eq!(arguments.get(1), None);
        assert_eq!(arguments.get(2), Some(&Argument::Bytes(vec![7; length])));
        assert_eq!(arguments.get(3), Some(&Argument::Local(64)));
    }
}

#[test]
fn arguments_take_no_more_memory_than_they_may() {
    let mut arguments = Arguments::default();
    arguments.set(u32::MAX, &bytes(1), 0);
    assert!(arguments.values.is_empty());
    arguments.set(0, &bytes(MOST_PLAIN), 0);
    arguments.set(1, &bytes(1), 0);
    assert_eq!(arguments.get(1), Some(&Argument::Lost));
    // A replaced value frees its room.
    arguments.set(0, &bytes(1), 0);
    arguments.set(1, &bytes(MOST_PLAIN - 1), 0);
    assert!(matches!(arguments.get(1), Some(Argument::Bytes(_))));
    assert_eq!(arguments.plain, MOST_PLAIN);
}

#[test]
fn constants_and_how_a_program_was_compiled_are_kept_for_it_and_not_for_its_kernels() {
    let mut server = server();
    program(&mut server, 0, b"text");
    program(&mut server, 1, b"header");
    kernel(&mut server, 0, 0);
    let specialize = Specialize {
        id: ProgramId(0),
        constant: 3,
        value: Blob(vec![5; 4]),
    };
    server.specialize(&specialize).unwrap();
    let call = CompileProgram {
        id: ProgramId(0),
        devices: Vec::new(),
        options: Blob(b"-DX".to_vec()),
        folders: 0,
        included: Vec::new(),
        headers: vec![(ProgramId(1), Blob(b"h".to_vec()))],
    };
    server.compile_program(header(), &call).unwrap();
    while server.backend.building > 0 {
        server.notices().unwrap();
    }
    server.release_program(ProgramId(1)).unwrap();
    // It counts from the next build on.
    let later = Specialize {
        value: Blob(vec![6; 4]),
        ..specialize.clone()
    };
    server.specialize(&later).unwrap();
    let now = record(&server, 0);
    assert_eq!(now.constants.get(&3), Some(&later.value));
    let of_build = now.built.as_deref().map(|built| &built.constants);
    assert_eq!(of_build, Some(&BTreeMap::from([(3, specialize.value)])));
    let built = now.built.as_deref().map(|built| &built.call);
    let Some(Build::Compiled(compiled, Some(headers))) = built else {
        panic!("it was built otherwise: {:?}", now.built);
    };
    assert_eq!(*compiled, call);
    assert_eq!(text(&headers[0]), Some(&b"header"[..]));
    let before = &server.backend.kernels.get(0).unwrap().program;
    assert!(before.constants.is_empty() && before.built.is_none());
}

#[test]
fn so_many_constants_are_kept_and_no_more() {
    let mut record = Arc::unwrap_or_clone(created(source(b"")));
    for constant in 0..MOST_CONSTANTS as u32 {
        record.specialize(constant, &Blob(vec![1; 4]));
    }
    record.specialize(0, &Blob(vec![2; 8]));
    assert!(!record.has_lost);
    record.specialize(u32::MAX, &Blob(vec![1; 4]));
    record.specialize(1, &Blob(vec![1; 9]));
    assert!(record.has_lost);
    assert_eq!(record.constants.len(), MOST_CONSTANTS - 1);
}

fn link(id: u32, inputs: &[u32]) -> LinkProgram {
    LinkProgram {
        id: ProgramId(id),
        context: ContextId(0),
        devices: Vec::new(),
        options: Blob(Vec::new()),
        inputs: inputs.iter().copied().map(ProgramId).collect(),
    }
}

#[test]
fn a_linked_program_keeps_its_inputs_when_others_get_their_numbers() {
    let mut server = server();
    program(&mut server, 0, b"first");
    server.link_program(header(), link(1, &[0])).unwrap();
    server.release_program(ProgramId(0)).unwrap();
    program(&mut server, 0, b"second");
    let until = Instant::now() + Duration::from_secs(60);
    while server.backend.programs.get(1).is_err() && Instant::now() < until {
        server.notices().unwrap();
    }
    let Origin::Linked(Linked {
        inputs: Some(inputs),
        ..
    }) = &*record(&server, 1).origin
    else {
        panic!("it is {:?}", record(&server, 1));
    };
    assert_eq!(text(&inputs[0].origin), Some(&b"first"[..]));
}

#[test]
fn what_is_linked_over_and_over_keeps_what_it_may_and_no_more() {
    let mut last = created(source(b"text"));
    let lost = |record: &ProgramRecord| match &*record.origin {
        Origin::Linked(linked) => linked.inputs.is_none(),
        Origin::Created(..) => false,
    };
    for _ in 0..DEEPEST {
        last = linked(link(0, &[0]), vec![last]);
        assert!(!lost(&last));
    }
    last = linked(link(0, &[0]), vec![last]);
    assert!(lost(&last));
    // Each level links its input many times. The size counted is what there would be if these were
    // not the same.
    let mut last = created(source(b""));
    for _ in 0..2 {
        let many = vec![last; 1000];
        last = linked(link(0, &[0]), many);
    }
    assert!(lost(&last));
    let large = created(source(&vec![0; MOST_KEPT / 2 + 1]));
    let both = vec![Arc::clone(&large), Arc::clone(&large)];
    let both = linked(link(0, &[0, 0]), both);
    assert!(lost(&both));
    let headers = vec![Arc::clone(&large.origin), Arc::clone(&large.origin)];
    let call = CompileProgram {
        id: ProgramId(0),
        devices: Vec::new(),
        options: Blob(Vec::new()),
        folders: 0,
        included: Vec::new(),
        headers: Vec::new(),
    };
    assert!(matches!(
        Build::compiled(call, headers),
        Build::Compiled(_, None)
    ));
}

#[test]
fn what_a_user_event_was_set_to_is_kept() {
    let mut server = server();
    let id = EventId(0);
    let context = ContextId(0);
    server
        .create_user_event(&CreateUserEvent { id, context })
        .unwrap();
    assert_eq!(server.backend.events.get(0).unwrap().decided, None);
    let status = -7;
    server
        .set_user_event_status(&SetUserEventStatus { id, status })
        .unwrap();
    let event = server.backend.events.get(0).unwrap();
    assert_eq!(event.decided, Some(-7));
    assert_eq!(event.context.call.id, context);
}

#[test]
fn a_kernel_that_is_made_before_a_build_is_told_is_of_that_build() {
    let mut server = server();
    program(&mut server, 0, b"text");
    program(&mut server, 1, b"other");
    let call = BuildProgram {
        id: ProgramId(0),
        devices: Vec::new(),
        options: Blob(b"-DX".to_vec()),
        folders: 0,
        included: Vec::new(),
    };
    // A kernel of an earlier build, which this driver lets be.
    kernel(&mut server, 0, 0);
    server.build_program(header(), &call).unwrap();
    // The driver has ended the build once its thread has let go of the program; the thread tells then.
    while server.backend.programs.get(0).unwrap().builds.any() {
        std::thread::yield_now();
    }
    kernel(&mut server, 1, 0);
    kernel(&mut server, 2, 1);
    let clone = CloneKernel {
        id: KernelId(3),
        of: KernelId(1),
    };
    server.clone_kernel(&clone).unwrap();
    let link = LinkProgram {
        id: ProgramId(2),
        context: ContextId(0),
        devices: Vec::new(),
        options: Blob::default(),
        inputs: vec![ProgramId(0)],
    };
    server.link_program(header(), link).unwrap();
    while server.backend.building > 0 {
        server.notices().unwrap();
    }
    kernel(&mut server, 4, 0);
    for (id, is_of_it) in [(0, false), (1, true), (2, false), (3, true), (4, true)] {
        let kernel = server.backend.kernels.get(id).unwrap();
        assert_eq!(kernel.program.built.is_some(), is_of_it, "{id}");
        assert!(!kernel.is_untold, "{id}");
    }
    let Origin::Linked(linked) = &*record(&server, 2).origin else {
        panic!("it is linked");
    };
    assert!(linked.inputs.is_none(), "of which build is not known");
}
