//! Stages of copies of which the driver refuses a part, or behind which it records no event.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use cuda_definition::driver::types::{CUDA_ARRAY_DESCRIPTOR, CUarray_format};

use super::{Server, driver::Api, testing};
use crate::{
    apis::cuda::{
        calls::{
            ContextSynchronize, CopyVolume, FunctionTurn, HostFunction, Pin, Read, Request, Side,
            Write,
        },
        codes,
    },
    link::window::Window,
    session::backend::Backend,
    wire::messages::{Call, StageId, WindowRange},
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

#[test]
fn a_stage_of_which_nothing_is_accepted_is_free_at_once() {
    let mut copier = Copier::new(testing::driver());
    let word = copier.hold();
    copier.write(0);
    assert_eq!(copier.released(), [(StageId(1), false)]);
    word.store(1, Ordering::SeqCst);
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
    copier.server.context_synchronize(header, context).unwrap();
    assert_eq!(copier.released(), [(StageId(1), false)]);
}
