//! Tests of moves after which contents follow.

use std::{
    ffi::c_void,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use proptest::prelude::*;
use remoting_proto::{
    apis::opencl::{OpenCl, calls::*, codes},
    wire::{Flags, Header},
};
use remoting_session::{
    checkpoint,
    image::{self, Contents, Immovable, Writer},
    postcopy::{Fetch, Remaining},
    server::Error,
};
use remoting_transport::{
    control::{Failure, serve_fetches},
    window::Window,
};

use super::{postcopy::LARGE, *};
use crate::{
    driver::{Api, adder, api::Handle},
    testing::{self, carry_out},
    touched::BLOCK,
};

const BUFFERS: u32 = 3;
const QUEUE: Order = Order {
    queue: QueueId(0),
    wait: Vec::new(),
    event: None,
};

/// An application with a few large buffers, and its window.
struct Application {
    server: Server,
    window: Arc<Window>,
    /// Size of each of its buffers, in bytes.
    size: u64,
}

impl Application {
    fn new() -> Self {
        Self::before(adder::open())
    }

    fn before(api: Api) -> Self {
        let (server, _, window) = testing::server_before(api);
        let size = LARGE;
        Self {
            server,
            window,
            size,
        }
    }

    fn with_buffers() -> Self {
        Self::new().and_buffers()
    }

    fn and_buffers(self) -> Self {
        let mut application = self;
        testing::make_queue(&mut application.server);
        for id in 0..BUFFERS {
            let buffer = testing::buffer(id, 0, application.size);
            carry_out(&mut application.server, Request::CreateBuffer(buffer));
        }
        application
    }

    /// An application whose buffers all have contents.
    fn with_contents() -> Self {
        let mut application = Self::with_buffers();
        for mem in 0..BUFFERS {
            application.write(mem, 0, LARGE, 5).unwrap();
        }
        application
    }

    /// Makes a call, and waits until it has been executed.
    fn call(&mut self, request: Request) -> Result<(), Error> {
        let header = Header {
            length: 0,
            opcode: 70,
            flags: Flags::default(),
            sequence: 0,
        };
        self.server.serve_in_turn(header, request, 0)?;
        while !self.server.holds_nothing() {
            self.server.notices()?;
            self.server.serve_held()?;
            thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn place(&self, length: u64) -> WindowRange {
        WindowRange {
            offset: self.window.data(),
            length,
            stage: None,
        }
    }

    /// Writes a part of a buffer.
    fn write(&mut self, mem: u32, offset: u64, length: u64, value: u8) -> Result<(), Error> {
        let from = self.place(length);
        let start = self.window.at(from.offset, length).unwrap();
        // SAFETY: within the window, which nobody else uses.
        unsafe { start.write_bytes(value, length as usize) };
        let mem = MemId(mem);
        self.call(Request::WriteBuffer(WriteBuffer {
            order: QUEUE,
            mem,
            offset,
            from,
        }))
    }

    fn read(&mut self, mem: u32) -> Result<Vec<u8>, Error> {
        let to = self.place(LARGE);
        let start = self.window.at(to.offset, LARGE).unwrap();
        let mem = MemId(mem);
        self.call(Request::ReadBuffer(ReadBuffer {
            order: QUEUE,
            mem,
            offset: 0,
            to,
        }))?;
        // SAFETY: as above.
        Ok(unsafe { std::slice::from_raw_parts(start, LARGE as usize) }.to_vec())
    }

    fn read_all(&mut self) -> Vec<Vec<u8>> {
        (0..BUFFERS).map(|mem| self.read(mem).unwrap()).collect()
    }

    /// Runs a round: what it copies while the application runs is made elsewhere. Returns what the next round needs.
    fn copied(&mut self, known: Option<Precopied>, new: &mut Self) -> Precopied {
        self.server.notices().unwrap();
        let image = image::create().unwrap();
        let writer = Writer::new(image.try_clone().unwrap());
        let (known, copying) = self.server.precopy_objects(known, writer).unwrap();
        copying().unwrap();
        new.server.prepare(image, false).unwrap();
        known
    }

    /// Moves the application. Returns it, the contents that remain here, and their number.
    fn left(self) -> (Self, Option<Remaining>, usize) {
        self.left_for(Self::new(), None, true)
    }

    /// The same after rounds, or with a state that has all contents.
    fn left_for(
        mut self,
        mut new: Self,
        known: Option<Precopied>,
        postcopy: bool,
    ) -> (Self, Option<Remaining>, usize) {
        self.server.notices().unwrap();
        let image = image::create().unwrap();
        let mut writer = Writer::new(image.try_clone().unwrap());
        let saved = self.server.save_objects(known, &mut writer, postcopy);
        let (objects, remaining) = saved.unwrap();
        let mut bytes = Vec::new();
        objects.put(&mut bytes);
        writer.finish::<OpenCl, _>(SHAPE, &Blob(bytes)).unwrap();
        let (state, contents) = Contents::open::<OpenCl, Blob>(image, SHAPE).unwrap();
        new.server.restore_objects(&state.0, &contents).unwrap();
        // As in a session that has restored everything.
        new.server.is_prepared = false;
        (new, remaining, objects.missing.len())
    }

    /// Moves the application, which fetches its contents from here.
    fn moved(self) -> Self {
        let (mut new, remaining, _) = self.left();
        new.server.fetch_contents(remaining.map(serve)).unwrap();
        new
    }

    /// Waits until all contents have arrived.
    fn await_all(&mut self) {
        while self.server.driver_busy().is_some() {
            thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Serves contents in a thread.
fn serve(Remaining(mut save): Remaining) -> UnixStream {
    let (here, there) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        serve_fetches(&here, |what, file| {
            let file = file.try_clone_to_owned().unwrap();
            let saved = save(what.mem, Writer::new(file.into()));
            saved.map_err(|why| Failure::Refused(why.to_string()))
        })
    });
    there
}

/// Writes: the buffer, whether all of it is written, the offset otherwise, and the value.
fn some_writes() -> impl Strategy<Value = Vec<(u32, bool, u64, u8)>> {
    prop::collection::vec((0..BUFFERS, any::<bool>(), 0..LARGE, any::<u8>()), 0..6)
}

fn write_all(application: &mut Application, writes: &[(u32, bool, u64, u8)]) {
    for (mem, is_whole, at, value) in writes {
        let (offset, length) = match is_whole {
            true => (0, LARGE),
            false => (*at, (LARGE - at).min(1000)),
        };
        application.write(*mem, offset, length, *value).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Wherever the move happens, and whatever has arrived by then, the final contents are those without a move.
    #[test]
    fn an_application_whose_contents_follow_it_computes_what_one_does_that_stays(
        parts in prop::collection::vec(some_writes(), 2..4),
    ) {
        let mut stays = Application::with_buffers();
        let mut moves = Application::with_buffers();
        for (at, writes) in parts.iter().enumerate() {
            if at > 0 {
                moves.await_all();
                moves = moves.moved();
            }
            write_all(&mut stays, writes);
            write_all(&mut moves, writes);
        }
        prop_assert!(stays.read_all() == moves.read_all());
    }
}

/// Without kernels: a device that computes no hashes. The adder's kernels have arguments that all tests share.
fn without_kernels() -> Api {
    unsafe extern "C" fn is(_: Handle, _: u32, _: usize, _: *mut c_void, _: *mut usize) -> i32 {
        codes::INVALID_KERNEL
    }
    unsafe extern "C" fn takes(
        _: Handle,
        _: u32,
        _: u32,
        _: usize,
        _: *mut c_void,
        _: *mut usize,
    ) -> i32 {
        codes::INVALID_KERNEL
    }
    unsafe extern "C" fn set(_: Handle, _: u32, _: usize, _: *const c_void) -> i32 {
        codes::INVALID_KERNEL
    }
    adder::open().with_kernels(is, takes, set)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Whatever parts of its buffers it has written by then, and whatever of them rounds have copied.
    #[test]
    fn an_application_that_moves_again_and_again_has_all_that_it_has_written(
        moves in prop::collection::vec(
            (prop::collection::vec(some_writes(), 0..3), some_writes(), any::<bool>()),
            1..4,
        ),
    ) {
        let application = || Application::before(without_kernels());
        let (mut stays, mut here) = (application().and_buffers(), application().and_buffers());
        for (rounds, writes, postcopy) in moves {
            let (mut there, mut known) = (application(), None);
            for writes in &rounds {
                write_all(&mut stays, writes);
                write_all(&mut here, writes);
                here.await_all();
                known = Some(here.copied(known, &mut there));
            }
            write_all(&mut stays, &writes);
            write_all(&mut here, &writes);
            here.await_all();
            let (new, remaining, _) = here.left_for(there, known, postcopy);
            here = new;
            here.server.fetch_contents(remaining.map(serve)).unwrap();
        }
        prop_assert!(stays.read_all() == here.read_all());
    }
}

#[test]
fn what_nobody_has_written_does_not_move() {
    let mut application = Application::before(without_kernels()).and_buffers();
    application.write(0, 0, 8, 5).unwrap();
    application.write(1, BLOCK - 1, 2, 5).unwrap();
    let mut new = Application::before(without_kernels());
    let known = application.copied(None, &mut new);
    let missing = |application: &mut Application| {
        application.server.notices().unwrap();
        let writer = &mut Writer::new(image::create().unwrap());
        let (objects, _) = application.server.save_objects(None, writer, true).unwrap();
        let parts = objects.contents.iter();
        let parts = parts.map(|part| (part.mem, part.from, part.length));
        assert!(objects.missing.is_empty());
        parts.collect::<Vec<_>>()
    };
    let parts = [(0, 0, BLOCK), (1, 0, 2 * BLOCK)];
    assert_eq!(missing(&mut application), parts);
    let (mut new, ..) = application.left_for(new, Some(known), true);
    // Another move has no more to bring, and no less.
    assert_eq!(missing(&mut new), parts);
}

/// The parts of buffers that a state contains.
fn parts(application: &mut Application) -> Vec<(u32, u64, u64)> {
    application.server.notices().unwrap();
    let writer = &mut Writer::new(image::create().unwrap());
    let (objects, _) = application
        .server
        .save_objects(None, writer, false)
        .unwrap();
    let parts = objects.contents.iter();
    parts
        .map(|part| (part.mem, part.from, part.length))
        .collect()
}

#[test]
fn only_what_was_written_of_contents_that_have_followed_moves_again() {
    let mut application = Application::before(without_kernels());
    application.size = 8 * LARGE;
    let mut application = application.and_buffers();
    let writes = [(0, LARGE), (2 * LARGE, 1), (3 * LARGE, BLOCK)];
    for (from, length) in writes {
        application.write(0, from, length, 5).unwrap();
    }
    let mut moved = [(0, 0, LARGE), (0, 2 * LARGE, BLOCK), (0, 3 * LARGE, BLOCK)].to_vec();
    assert_eq!(parts(&mut application), moved);
    let (mut new, remaining, count) =
        application.left_for(Application::before(without_kernels()), None, true);
    assert_eq!(count, 1);
    new.server.fetch_contents(remaining.map(serve)).unwrap();
    new.await_all();
    assert_eq!(parts(&mut new), moved);
    // Together with what is written since.
    new.write(0, 4 * LARGE, 1, 7).unwrap();
    moved.push((0, 4 * LARGE, BLOCK));
    assert_eq!(parts(&mut new), moved);
}

#[test]
fn large_contents_follow_and_are_there_when_a_command_needs_them() {
    let (mut new, remaining, count) = Application::with_contents().left();
    assert_eq!(count, BUFFERS as usize);
    assert!(new.server.driver_busy().is_some());
    new.server.fetch_contents(remaining.map(serve)).unwrap();
    assert!(new.read_all().iter().flatten().all(|byte| *byte == 5));
    new.await_all();
    // What has arrived is not saved for a second move again, and can move on.
    let mut again = new.moved();
    assert!(again.read_all().iter().flatten().all(|byte| *byte == 5));
}

#[test]
fn who_needs_what_is_lost_ends_and_who_overwrites_it_goes_on() {
    let (mut new, remaining, _) = Application::with_contents().left();
    drop(remaining);
    let (here, there) = UnixStream::pair().unwrap();
    new.server.fetch_contents(Some(there)).unwrap();
    drop(here);
    new.write(0, 0, LARGE, 7).unwrap();
    assert!(new.read(0).unwrap().iter().all(|byte| *byte == 7));
    // Overwriting a part is not enough.
    let refused = new.write(1, 0, LARGE - 1, 7);
    assert!(matches!(refused, Err(Error::Lost(_))), "{refused:?}");
    let busy = new.server.driver_busy();
    assert!(matches!(busy, Some(Busy::Never(_))), "{busy:?}");
}

#[test]
fn one_object_that_cannot_be_fetched_costs_none_of_the_others_and_is_asked_for_once() {
    let (mut new, remaining, _) = Application::with_contents().left();
    let Some(Remaining(mut save)) = remaining else {
        panic!("nothing is left");
    };
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let saves = Remaining(Box::new(move |mem, image| {
        seen.lock().unwrap().push(mem);
        match mem {
            0 => Err(Immovable::Wrong("the first one")),
            _ => save(mem, image),
        }
    }));
    new.server.fetch_contents(Some(serve(saves))).unwrap();
    for mem in 1..BUFFERS {
        assert!(new.read(mem).unwrap().iter().all(|byte| *byte == 5));
    }
    let refused = new.read(0);
    assert!(matches!(refused, Err(Error::Lost(_))), "{refused:?}");
    let busy = new.server.driver_busy();
    assert!(matches!(busy, Some(Busy::Never(_))), "{busy:?}");
    asked.lock().unwrap().sort_unstable();
    assert_eq!(*asked.lock().unwrap(), [0, 1, 2]);
    // An application that no longer needs it can move on.
    let release = ReleaseMem {
        id: MemId(0),
        callback: None,
    };
    carry_out(&mut new.server, Request::ReleaseMem(release));
    assert!(new.server.driver_busy().is_none());
}

#[test]
fn a_write_that_may_be_late_or_is_refused_does_not_stand_for_what_was_there() {
    for is_refused in [false, true] {
        let mut application = Application::with_buffers();
        application.write(0, 0, LARGE, 5).unwrap();
        let (mut new, remaining, _) = application.left();
        let order = Order {
            // A nonexistent event: the command fails.
            wait: match is_refused {
                false => vec![EventId(9)],
                true => Vec::new(),
            },
            // A number that is not a queue's.
            queue: QueueId(u32::from(is_refused)),
            event: None,
        };
        let source = remaining.map(serve);
        let from = new.place(LARGE);
        new.server.fetch_contents(source).unwrap();
        let mem = MemId(0);
        new.call(Request::WriteBuffer(WriteBuffer {
            order,
            mem,
            offset: 0,
            from,
        }))
        .unwrap();
        assert!(new.read(0).unwrap().iter().all(|byte| *byte == 5));
    }
}

#[test]
fn contents_that_nobody_brings_or_of_nothing_are_refused() {
    let (mut new, ..) = Application::with_contents().left();
    let refused = new.server.fetch_contents(None);
    assert!(matches!(refused, Err(Immovable::Wrong(_))), "{refused:?}");
    let (_, remaining, _) = Application::with_contents().left();
    let Some(Remaining(mut save)) = remaining else {
        panic!("nothing is left");
    };
    let refused = save(BUFFERS, Writer::new(image::create().unwrap()));
    assert!(matches!(refused, Err(Immovable::Wrong(_))), "{refused:?}");
    let mut server = Application::with_contents().server;
    let (mut objects, _) = server
        .save_objects(None, &mut Writer::new(image::create().unwrap()), true)
        .unwrap();
    objects.missing = vec![0, u32::MAX];
    let mut bytes = Vec::new();
    objects.put(&mut bytes);
    let image = image::create().unwrap();
    checkpoint::write::<crate::OpenClBackend>(image.try_clone().unwrap(), &bytes).unwrap();
    let refused = Application::new().server.restore(image, true);
    assert!(matches!(refused, Err(Immovable::Wrong(_))), "{refused:?}");
}

#[test]
fn whatever_a_source_sends_is_written_within_its_object_or_lost() {
    let part = |mem, from, length| Bytes {
        mem,
        from,
        at: 4096,
        length,
    };
    let wrong = [
        part(0, 1, LARGE),
        part(0, u64::MAX, 1),
        part(0, 0, u64::MAX),
        part(0, 0, LARGE),
    ];
    for part in wrong {
        let (mut new, remaining, _) = Application::with_contents().left();
        drop(remaining);
        // Parts that the image claims to have, but has not.
        let sends = Remaining(Box::new(move |_, image| {
            image.finish::<OpenCl, _>(
                SHAPE,
                &vec![Bytes {
                    mem: part.mem,
                    from: part.from,
                    at: part.at,
                    length: part.length,
                }],
            )
        }));
        new.server.fetch_contents(Some(serve(sends))).unwrap();
        assert!(matches!(new.read(0), Err(Error::Lost(_))));
    }
}

#[test]
fn a_session_that_has_left_saves_what_remains_until_nobody_can_ask() {
    let (_, remaining, _) = Application::with_contents().left();
    let (fetches, asked) = mpsc::channel();
    let left = thread::spawn(move || Remaining::serve(remaining, asked));
    let ask = |mem| Fetch::ask(&fetches, mem, image::create().unwrap());
    assert!(ask(0).is_ok() && ask(0).is_ok());
    assert!(ask(BUFFERS).is_err());
    drop(fetches);
    left.join().unwrap();
}
