//! Stages of copies of which the driver refuses a part, or behind which it records no event.

use std::{
    ffi::{c_uint, c_void},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use cuda_definition::driver::types::{CUDA_ARRAY_DESCRIPTOR, CUarray_format, CUresult, CUstream};
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{
            AddCopyNode, Allocate, ContextSynchronize, CopyVolume, Fill, Forward, FunctionTurn,
            HostFunction, Pin, Read, Request, Side, Source, Write,
        },
        codes,
    },
    wire::messages::{Call, StageId, WindowRange},
};
use remoting_session::backend::Backend;
use remoting_transport::window::Window;

use super::{
    Server,
    driver::{Api, cu},
    testing,
};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// The sizes of the two registrations.
const FIRST: u64 = 8 * MIB;
const SECOND: u64 = 2 * MIB;

/// A worker with two registrations of the window that meet. Nothing is registered behind the second.
struct Copier {
    server: Server,
    window: Arc<Window>,
    context: u32,
    stream: u32,
    stages: u32,
}

impl Drop for Copier {
    /// Ends the registrations: another test's window may get the same addresses.
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        let words = [self.context.into()];
        let (function, bytes) = testing::arguments("cuCtxDestroy_v2", &words);
        self.server.forward(0, function, &bytes.0).unwrap();
    }
}

impl Copier {
    fn new(driver: Api) -> Self {
        let (mut server, _, window) = testing::server_of(driver, 32 * MIB);
        let context = testing::made(&mut server, 0, "cuCtxCreate_v2", &[0, 0]);
        let stream = testing::made(&mut server, context, "cuStreamCreate", &[1]);
        // The first one comes with a context.
        let pin = Pin {
            context,
            offset: window.data() + FIRST,
            length: SECOND,
            whole: false,
        };
        server.pin(&pin).unwrap();
        Self {
            server,
            window,
            context,
            stream,
            stages: 0,
        }
    }

    /// A stage of two pages, each in one registration.
    fn stage(&mut self) -> WindowRange {
        self.stages += 1;
        WindowRange {
            offset: self.window.data() + FIRST - PAGE,
            length: 2 * PAGE,
            stage: Some(StageId(self.stages)),
        }
    }

    /// Two pages of the window as the device's memory, of which so many are registered.
    fn registered(&self, pages: u64) -> u64 {
        let offset = self.window.data() + FIRST + SECOND - pages * PAGE;
        self.window.at(offset, 2 * PAGE).unwrap() as u64
    }

    fn post<C: Call>(&mut self, call: C, request: impl Fn(C) -> Request) {
        let header = testing::posted(C::OPCODE);
        self.server.serve_in_turn(header, request(call), 0).unwrap();
    }

    /// Keeps the stream from going on until the word is one.
    fn hold(&mut self) -> &'static AtomicU32 {
        let done = self.window.data();
        let word = self.window.at(done, 4).unwrap().cast::<AtomicU32>();
        // SAFETY: an aligned word of the window, which lives as long as the test.
        let word = unsafe { &*word };
        word.store(0, Ordering::SeqCst);
        let call = HostFunction {
            context: self.context,
            stream: self.stream,
            number: 1,
            done,
            lasting: false,
            turn: FunctionTurn::Intact(),
        };
        self.post(call, Request::HostFunction);
        word
    }

    /// Posts a copy from a stage to a range that the driver knows so many pages of.
    fn write(&mut self, pages: u64) {
        let call = Write {
            context: self.context,
            stream: self.stream,
            to: self.registered(pages),
            from: self.stage(),
        };
        self.post(call, Request::Write);
    }

    /// The stages that are released.
    fn released(&mut self) -> Vec<(StageId, bool)> {
        Backend::resume(&mut self.server).unwrap();
        self.server.retire_stages();
        self.server.released_stages().to_vec()
    }

    /// Whether the newest stage is released only when the stream goes on; none was before. It is no good.
    fn is_held_by_the_stream(&mut self, word: &AtomicU32) -> bool {
        let before = self.released();
        word.store(1, Ordering::SeqCst);
        while self.released().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        let after = self.released();
        self.server.tell_released().unwrap();
        before.is_empty() && after == [(StageId(self.stages), false)]
    }
}

#[test]
fn a_stage_is_used_while_a_part_of_its_copy_is_in_progress() {
    let mut copier = Copier::new(testing::driver());
    let (context, stream) = (copier.context, copier.stream);
    let there = copier.registered(1);
    for reads in [false, true] {
        let word = copier.hold();
        let stage = copier.stage();
        if reads {
            let (from, to) = (there, stage);
            let call = Read {
                context,
                stream,
                from,
                to,
            };
            copier.post(call, Request::Read);
        } else {
            let (to, from) = (there, stage);
            let call = Write {
                context,
                stream,
                to,
                from,
            };
            copier.post(call, Request::Write);
        }
        assert!(copier.is_held_by_the_stream(word), "reads: {reads}");
        let deferred = copier.server.take_deferred(context);
        assert_eq!(deferred, Some(codes::INVALID_VALUE));
    }
}

#[test]
fn a_stage_of_rows_is_used_while_some_are_in_progress() {
    let mut copier = Copier::new(testing::driver());
    let (context, stream) = (copier.context, copier.stream);
    // It has the first row, but not the second.
    let array = CUDA_ARRAY_DESCRIPTOR {
        Width: PAGE as usize / 4,
        Height: 1,
        Format: CUarray_format::CU_AD_FORMAT_UNSIGNED_INT32,
        NumChannels: 1,
    };
    let words = [&raw const array as u64];
    let array = testing::made(&mut copier.server, context, "cuArrayCreate_v2", &words);
    let word = copier.hold();
    let call = CopyVolume {
        context,
        stream,
        to: Side::Array(array, 0, 0, 0),
        from: Side::Window(copier.stage()),
        size: [PAGE, 2, 1],
    };
    copier.post(call, Request::CopyVolume);
    assert!(copier.is_held_by_the_stream(word));
    assert!(copier.server.take_deferred(context).is_some());
}

#[test]
fn many_rows_in_two_registrations_wait_while_a_function_is_due() {
    const ROWS: u64 = 128;
    let mut copier = Copier::new(testing::driver());
    let array = CUDA_ARRAY_DESCRIPTOR {
        Width: (2 * PAGE / ROWS) as usize,
        Height: ROWS as usize,
        Format: CUarray_format::CU_AD_FORMAT_UNSIGNED_INT8,
        NumChannels: 1,
    };
    let (context, stream) = (copier.context, copier.stream);
    let words = [&raw const array as u64];
    let array = testing::made(&mut copier.server, context, "cuArrayCreate_v2", &words);
    let word = copier.hold();
    let call = CopyVolume {
        context,
        stream,
        to: Side::Array(array, 0, 0, 0),
        from: Side::Window(copier.stage()),
        size: [2 * PAGE / ROWS, ROWS, 1],
    };
    copier.post(call, Request::CopyVolume);
    assert!(copier.server.backend.parked.is_some());
    word.store(1, Ordering::SeqCst);
    while copier.released().is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(copier.released(), [(StageId(1), true)]);
}

/// As the driver's `cuMemHostRegister`, but it refuses.
unsafe extern "C" fn refuse(_: *mut c_void, _: usize, _: c_uint) -> CUresult {
    CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// The driver refuses to register more of the window.
fn refuses_more(copier: &mut Copier) {
    let api = Arc::get_mut(&mut copier.server.backend.api).unwrap();
    api.functions.cuMemHostRegister_v2 = Some(refuse);
}

impl Copier {
    /// Copies a stage that is filled when the stream comes to it: what arrives.
    fn filled_late(&mut self, offset: u64, rows: u64) -> u32 {
        let offset = self.window.data() + offset;
        let at = self.window.at(offset, PAGE).unwrap().cast::<AtomicU32>();
        // SAFETY: a word of the window, which lives as long as the test.
        let from = unsafe { &*at };
        from.store(1, Ordering::SeqCst);
        let (context, stream) = (self.context, self.stream);
        let there = self.allocate();
        let word = self.hold();
        self.stages += 1;
        let stage = WindowRange {
            offset,
            length: PAGE,
            stage: Some(StageId(self.stages)),
        };
        if rows == 1 {
            let (to, from) = (there, stage);
            let call = Write {
                context,
                stream,
                to,
                from,
            };
            self.post(call, Request::Write);
        } else {
            let call = CopyVolume {
                context,
                stream,
                to: Side::Memory(there, PAGE / rows, rows),
                from: Side::Window(stage),
                size: [PAGE / rows, rows, 1],
            };
            self.post(call, Request::CopyVolume);
        }
        from.store(2, Ordering::SeqCst);
        word.store(1, Ordering::SeqCst);
        while self.released().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.released(), [(StageId(self.stages), true)]);
        self.server.tell_released().unwrap();
        // SAFETY: the stand-in's devices have memory that this process can access, and nothing else does now.
        unsafe { (there as *const u32).read() }
    }

    /// A page of the device's memory.
    fn allocate(&mut self) -> u64 {
        let call = Allocate {
            context: self.context,
            size: PAGE,
            source: Source::Device(),
        };
        self.server.allocate(&call).unwrap()
    }
}

#[test]
fn a_stage_that_is_not_registered_is_read_in_the_streams_order() {
    let mut copier = Copier::new(testing::driver());
    refuses_more(&mut copier);
    for rows in [1, 4] {
        assert_eq!(copier.filled_late(FIRST + SECOND + MIB, rows), 2);
    }
}

#[test]
fn a_stage_is_read_in_order_though_its_registrar_has_ended() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let context = testing::made(&mut copier.server, 0, "cuCtxCreate_v2", &[0, 0]);
    let pin = Pin {
        context,
        offset: copier.window.data() + FIRST + SECOND,
        length: SECOND,
        whole: false,
    };
    copier.server.pin(&pin).unwrap();
    copier.context = context;
    copier.stream = testing::made(&mut copier.server, context, "cuStreamCreate", &[1]);
    let (function, bytes) = testing::arguments("cuCtxDestroy_v2", &[first.into()]);
    copier.server.forward(0, function, &bytes.0).unwrap();
    for rows in [1, 4] {
        assert_eq!(copier.filled_late(MIB, rows), 2);
    }
}

#[test]
fn a_node_of_a_stage_that_is_not_registered_is_refused() {
    let mut copier = Copier::new(testing::driver());
    refuses_more(&mut copier);
    let context = copier.context;
    let graph = testing::made(&mut copier.server, context, "cuGraphCreate", &[0]);
    let stage = WindowRange {
        offset: copier.window.data() + FIRST + SECOND + MIB,
        length: PAGE,
        stage: None,
    };
    let there = copier.allocate();
    let call = AddCopyNode {
        context,
        graph,
        after: Vec::new(),
        to: Side::Memory(there, PAGE, 1),
        from: Side::Window(stage),
        size: [PAGE, 1, 1],
    };
    assert_eq!(
        copier.server.add_copy_node(&call),
        Err(codes::OUT_OF_MEMORY)
    );
}

#[test]
fn a_context_does_not_end_before_copies_through_what_it_registered() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let gate = copier.goes_on_elsewhere();
    copier.write(2);
    assert!(!copier.destroys(first));
    gate.store(1, Ordering::SeqCst);
    copier.awaits_end(first);
}

impl Copier {
    /// Goes on in another context, in a stream that waits for the word that this returns.
    fn goes_on_elsewhere(&mut self) -> &'static AtomicU32 {
        self.context = testing::made(&mut self.server, 0, "cuCtxCreate_v2", &[0, 0]);
        self.stream = testing::made(&mut self.server, self.context, "cuStreamCreate", &[1]);
        let held = self.window.data() + 2 * PAGE;
        let gate = self.window.at(held, 4).unwrap().cast::<AtomicU32>();
        // SAFETY: an aligned word of the window, which lives as long as the test.
        let gate = unsafe { &*gate };
        gate.store(0, Ordering::SeqCst);
        let words = [self.stream.into(), gate.as_ptr() as u64, 1, 0];
        let (function, bytes) = testing::arguments("cuStreamWaitValue32_v2", &words);
        let context = self.context;
        self.server.forward(context, function, &bytes.0).unwrap();
        gate
    }

    /// Goes on in another context, of which a graph has a place in the first part. Returns that context.
    fn has_place_elsewhere(&mut self) -> u32 {
        let context = testing::made(&mut self.server, 0, "cuCtxCreate_v2", &[0, 0]);
        self.context = context;
        let graph = testing::made(&mut self.server, context, "cuGraphCreate", &[0]);
        let stage = WindowRange {
            offset: self.window.data() + MIB,
            length: PAGE,
            stage: None,
        };
        let call = AddCopyNode {
            context,
            graph,
            after: Vec::new(),
            to: Side::Memory(self.allocate(), PAGE, 1),
            from: Side::Window(stage),
            size: [PAGE, 1, 1],
        };
        self.post(call, Request::AddCopyNode);
        assert_eq!(self.server.take_deferred(context), None);
        context
    }

    /// Has a context destroyed. Whether it is, at once.
    fn destroys(&mut self, context: u32) -> bool {
        let (function, arguments) = testing::arguments("cuCtxDestroy_v2", &[context.into()]);
        let call = Forward {
            context: 0,
            function,
            arguments,
        };
        self.post(call, Request::Forward);
        self.released();
        !self.has(context)
    }

    fn has(&self, context: u32) -> bool {
        let objects = &self.server.backend.objects;
        objects.get(Kind::Context, context).is_ok()
    }

    fn awaits_end(&mut self, context: u32) {
        while self.has(context) {
            self.released();
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn pinned_memory_is_handed_over_when_the_context_ends_that_has_registered_it() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let gate = copier.goes_on_elsewhere();
    let context = copier.context;
    let pin = Pin {
        context,
        offset: copier.window.data() + FIRST,
        length: PAGE,
        whole: true,
    };
    let device = copier.server.pin(&pin).unwrap();
    // Work that may use it, in a stream that does not come there, and later in another one.
    let fill = |copier: &mut Copier, context| {
        let call = Fill {
            context,
            stream: copier.stream,
            at: device,
            value: 7,
            width: 1,
            count: PAGE,
            pitch: 0,
            rows: 1,
        };
        copier.post(call, Request::Fill);
    };
    // In a third context, of which kernels may use it, too, beside a function that is due.
    copier.context = testing::made(&mut copier.server, 0, "cuCtxCreate_v2", &[0, 0]);
    copier.stream = testing::made(&mut copier.server, copier.context, "cuStreamCreate", &[1]);
    let returned = copier.hold();
    copier.stream = testing::made(&mut copier.server, copier.context, "cuStreamCreate", &[1]);
    let words = [copier.stream.into(), gate.as_ptr() as u64, 1, 0];
    let (function, bytes) = testing::arguments("cuStreamWaitValue32_v2", &words);
    let third = copier.context;
    copier.server.forward(third, function, &bytes.0).unwrap();
    fill(&mut copier, third);
    assert!(!copier.destroys(first));
    returned.store(1, Ordering::SeqCst);
    while copier.server.backend.has_pending() {
        copier.released();
        thread::sleep(Duration::from_millis(1));
    }
    copier.released();
    assert!(copier.has(first), "it has waited for the function alone");
    gate.store(1, Ordering::SeqCst);
    copier.awaits_end(first);
    let cover = &copier.server.backend.cover;
    assert!(cover.holds(&copier.window, pin.offset, pin.length));
    copier.stream = testing::made(&mut copier.server, context, "cuStreamCreate", &[1]);
    let at = copier.window.at(pin.offset, pin.length).unwrap();
    // SAFETY: a page of the window, which the device has filled and fills again.
    let byte = || unsafe { at.add(9).read_volatile() };
    assert_eq!(byte(), 7);
    // SAFETY: as above.
    unsafe { at.add(9).write_volatile(0) };
    fill(&mut copier, context);
    copier.server.enter(context).unwrap();
    assert_eq!(cu!(copier.server.backend.api, cuCtxSynchronize()), 0);
    assert_eq!(byte(), 7);
    copier.context = context;
    assert_eq!(copier.server.take_deferred(context), None);
}

#[test]
fn a_nodes_place_is_handed_over_when_the_context_ends_that_has_registered_it() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    copier.has_place_elsewhere();
    assert!(copier.destroys(first));
    let cover = &copier.server.backend.cover;
    assert!(cover.holds(&copier.window, copier.window.data() + MIB, PAGE));
}

#[test]
fn launches_pass_through_places_that_another_context_has_taken_over() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let [second, third] = [copier.has_place_elsewhere(), copier.has_place_elsewhere()];
    assert!(copier.destroys(first));
    let passages = &mut copier.server.backend.passages;
    passages.launches(third);
    assert_eq!(passages.take(), [second]);
}

#[test]
fn a_context_ends_though_others_streams_wait_for_what_comes_later() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let gate = copier.goes_on_elsewhere();
    // A copy through what its own context has registered.
    let pin = Pin {
        context: copier.context,
        offset: copier.window.data() + FIRST + SECOND,
        length: SECOND,
        whole: false,
    };
    copier.server.pin(&pin).unwrap();
    copier.stages += 1;
    let call = Write {
        context: copier.context,
        stream: copier.stream,
        to: copier.allocate(),
        from: WindowRange {
            offset: pin.offset,
            length: PAGE,
            stage: Some(StageId(copier.stages)),
        },
    };
    copier.post(call, Request::Write);
    assert!(copier.destroys(first));
    gate.store(1, Ordering::SeqCst);
}

#[test]
fn a_context_whose_end_waits_for_a_function_does_not_wait_for_what_comes_meanwhile() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let gate = copier.goes_on_elsewhere();
    // Memory that another context has pinned there, so that its work may use it.
    let pin = Pin {
        context: copier.context,
        offset: copier.window.data() + FIRST,
        length: PAGE,
        whole: true,
    };
    let device = copier.server.pin(&pin).unwrap();
    copier.stream = testing::made(&mut copier.server, copier.context, "cuStreamCreate", &[1]);
    let returned = copier.hold();
    assert!(!copier.destroys(first), "a function is due");
    copier.context = testing::made(&mut copier.server, 0, "cuCtxCreate_v2", &[0, 0]);
    copier.stream = testing::made(&mut copier.server, copier.context, "cuStreamCreate", &[1]);
    let words = [copier.stream.into(), gate.as_ptr() as u64, 1, 0];
    let (function, bytes) = testing::arguments("cuStreamWaitValue32_v2", &words);
    let third = copier.context;
    copier.server.forward(third, function, &bytes.0).unwrap();
    let call = Fill {
        context: third,
        stream: copier.stream,
        at: device,
        value: 7,
        width: 1,
        count: PAGE,
        pitch: 0,
        rows: 1,
    };
    copier.post(call, Request::Fill);
    returned.store(1, Ordering::SeqCst);
    copier.awaits_end(first);
    gate.store(1, Ordering::SeqCst);
}

#[test]
fn a_context_does_not_end_beside_a_capture_before_others_copies() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let gate = copier.goes_on_elsewhere();
    copier.write(2);
    let context = copier.context;
    let captured = testing::made(&mut copier.server, context, "cuStreamCreate", &[1]);
    let words = [captured.into(), 2];
    let (function, bytes) = testing::arguments("cuStreamBeginCapture_v2", &words);
    copier.server.forward(context, function, &bytes.0).unwrap();
    assert!(!copier.destroys(first));
    gate.store(1, Ordering::SeqCst);
    copier.awaits_end(first);
}

#[test]
fn a_context_does_not_end_before_copies_of_a_stream_that_has() {
    let mut copier = Copier::new(testing::driver());
    let first = copier.context;
    let gate = copier.goes_on_elsewhere();
    copier.write(2);
    let (context, stream) = (copier.context, copier.stream);
    let (function, bytes) = testing::arguments("cuStreamDestroy_v2", &[stream.into()]);
    copier.server.forward(context, function, &bytes.0).unwrap();
    assert!(!copier.destroys(first));
    gate.store(1, Ordering::SeqCst);
    copier.awaits_end(first);
}

#[test]
fn a_parked_copy_waits_once_for_the_work_before_it() {
    let mut copier = Copier::new(testing::driver());
    refuses_more(&mut copier);
    let word = copier.hold();
    copier.stages += 1;
    let call = Write {
        context: copier.context,
        stream: copier.stream,
        to: copier.allocate(),
        from: WindowRange {
            offset: copier.window.data() + FIRST + SECOND + MIB,
            length: PAGE,
            stage: Some(StageId(copier.stages)),
        },
    };
    copier.post(call, Request::Write);
    assert!(copier.server.backend.is_busy());
    word.store(1, Ordering::SeqCst);
    // The next work of the stream does not end: it is not the copy's.
    let api = Arc::clone(&copier.server.backend.api);
    let context = copier.server.enter(copier.context).unwrap();
    let raw = copier
        .server
        .backend
        .objects
        .raw(Kind::Stream, copier.stream);
    let stream = raw.unwrap() as CUstream;
    let gate = copier
        .window
        .at(copier.window.data() + 2 * PAGE, 4)
        .unwrap();
    // SAFETY: an aligned word of the window, which lives as long as the test.
    let gate_word = unsafe { &*gate.cast::<AtomicU32>() };
    gate_word.store(0, Ordering::SeqCst);
    api.enter(context);
    assert_eq!(
        cu!(api, cuStreamWaitValue32_v2(stream, gate as u64, 1, 0)),
        0
    );
    drop(api);
    while copier.server.backend.is_busy() {
        copier.released();
        thread::sleep(Duration::from_millis(1));
    }
    gate_word.store(1, Ordering::SeqCst);
}

/// As the driver's `cuMemHostRegister` in a context of which work has failed.
unsafe extern "C" fn fail(_: *mut c_void, _: usize, _: c_uint) -> CUresult {
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
}

#[test]
fn a_failed_context_keeps_no_other_from_registering() {
    let mut copier = Copier::new(testing::driver());
    let register = |copier: &mut Copier, function| {
        let api = Arc::get_mut(&mut copier.server.backend.api).unwrap();
        std::mem::replace(&mut api.functions.cuMemHostRegister_v2, function)
    };
    let pin = Pin {
        context: copier.context,
        offset: copier.window.data() + FIRST + SECOND,
        length: SECOND,
        whole: false,
    };
    let before = register(&mut copier, Some(fail));
    assert_eq!(copier.server.pin(&pin), Err(700));
    register(&mut copier, before);
    copier.server.pin(&pin).unwrap();
    let cover = &copier.server.backend.cover;
    assert!(cover.holds(&copier.window, pin.offset, pin.length));
}

#[test]
fn a_stage_of_a_refused_copy_is_used_until_its_stream_comes_there() {
    let mut copier = Copier::new(testing::driver());
    let word = copier.hold();
    copier.write(0);
    assert!(copier.is_held_by_the_stream(word));
}

#[test]
fn a_stage_of_a_refused_copy_without_an_event_is_used_until_its_stream_is_idle() {
    let mut driver = testing::driver();
    driver.functions.cuEventCreate = None;
    let mut copier = Copier::new(driver);
    let word = copier.hold();
    copier.write(0);
    assert!(copier.is_held_by_the_stream(word));
}

#[test]
fn a_stage_behind_which_no_event_is_recorded_is_used_until_its_stream_is_idle() {
    let mut driver = testing::driver();
    driver.functions.cuEventCreate = None;
    let mut copier = Copier::new(driver);
    let context = copier.context;
    let word = copier.hold();
    copier.write(2);
    assert!(copier.is_held_by_the_stream(word));
    let deferred = copier.server.take_deferred(context);
    assert_eq!(deferred, Some(codes::NOT_SUPPORTED));
}

#[test]
fn a_stage_is_used_though_another_stream_gets_its_streams_number() {
    let mut driver = testing::driver();
    driver.functions.cuEventCreate = None;
    let mut copier = Copier::new(driver);
    let (context, stream) = (copier.context, copier.stream);
    let word = copier.hold();
    copier.write(2);
    let (function, bytes) = testing::arguments("cuStreamDestroy_v2", &[stream.into()]);
    copier.server.forward(context, function, &bytes.0).unwrap();
    loop {
        let other = testing::made(&mut copier.server, context, "cuStreamCreate", &[1]);
        if other == stream {
            break;
        }
        let (function, bytes) = testing::arguments("cuStreamDestroy_v2", &[other.into()]);
        copier.server.forward(context, function, &bytes.0).unwrap();
    }
    assert_eq!(copier.released(), []);
    word.store(1, Ordering::SeqCst);
    // Only this tells when the work of the first stream has ended.
    let header = testing::posted(ContextSynchronize::OPCODE);
    let call = ContextSynchronize {
        context,
        spares_captures: false,
    };
    copier.server.context_synchronize(header, &call).unwrap();
    assert_eq!(copier.released(), [(StageId(1), false)]);
}
