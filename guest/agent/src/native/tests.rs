//! Programs, and a worker at the other end of the rings of a port made of files.

mod suspension;

use std::{
    collections::HashMap,
    env,
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Read},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use base::{Access, Mapping, Unpoisoned, event::Event, socket};
use nvidia_abi::wire::{Answer, DEVICE, HEADER, MOST, Operation, Request, TOKEN, VERSION};
use remoting_proto::{
    apis::nvidia::{self, to_agent, to_worker},
    port::{Outcome, State, Wish},
    wire::{
        Flags, Header,
        hello::{self, Form, Hello},
    },
};
use remoting_transport::{
    endpoint::{Receiver, Sender},
    mapping::create,
    port_bell::{Events, Waker},
    ring::{Consumer, Producer},
    window::{RING, SMALLEST, Slice, Window},
};

use super::{
    checkpointer::Checkpointer, port_link::OneSlice, programs::MOST_PROGRAMS, relay::Relay,
};

/// Only a hang takes so long.
const HANGS: Duration = Duration::from_secs(60);
/// Where the worker's device page is.
const PLACE: u64 = 0x3000;

/// What the worker's `Call` does, by its command.
mod command {
    /// Answers with the bytes and 7.
    pub const ECHO: u64 = 1;
    /// The file has an event.
    pub const EVENT: u64 = 2;
    /// The worker ends without an answer.
    pub const END: u64 = 3;
    /// The worker sends what is no message.
    pub const BREAK: u64 = 4;
    /// Answers when another program calls [`ECHO`].
    pub const HOLD: u64 = 5;
    /// The answer is as long as one may be.
    pub const LONG: u64 = 6;
    /// The worker ends the program's session.
    pub const LEAVE: u64 = 7;
}

/// What the worker is told.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Opened,
    Begin(u32),
    Request(Operation),
    End,
    Close(u32),
    SliceClosed,
}

fn event() -> OwnedFd {
    Event::new().unwrap().into()
}

/// The port, as host and worker have it.
struct Host {
    window: OwnedFd,
    doorbells: OwnedFd,
    pages: Option<OwnedFd>,
    interrupt: Option<OwnedFd>,
    events: Arc<Events>,
    state: AtomicU32,
    is_there: AtomicBool,
    /// Whether the window is read as slowly as what no machine caches.
    is_slow: AtomicBool,
    /// Whether a worker takes the slice.
    has_worker: AtomicBool,
    is_closed: AtomicBool,
    worker: Mutex<Option<thread::JoinHandle<()>>>,
    told: mpsc::Sender<Told>,
    /// What the host wishes.
    wish: Mutex<Option<Wish>>,
    /// What has become of its wishes.
    outcomes: mpsc::Sender<(Outcome, String)>,
}

impl Host {
    fn set(&self, state: State) {
        self.state.store(state as u32, Ordering::SeqCst);
        self.events.interrupt();
    }
}

/// The port, as the agent has it.
struct StandIn(Arc<Host>);

impl OneSlice for StandIn {
    fn window(&self) -> &OwnedFd {
        &self.0.window
    }

    fn pages(&self) -> Option<&OwnedFd> {
        self.0.pages.as_ref()
    }

    fn doorbells(&self) -> &OwnedFd {
        &self.0.doorbells
    }

    fn interrupts(&self) -> Option<BorrowedFd<'_>> {
        self.0.interrupt.as_ref().map(AsFd::as_fd)
    }

    fn interrupted(&mut self) -> Option<bool> {
        let mut count = 0u64;
        let fd = self.0.interrupt.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: eight bytes of a local.
        let heard = unsafe { libc::read(fd, (&raw mut count).cast(), 8) > 0 };
        heard.then_some(true)
    }

    fn is_there(&self) -> bool {
        self.0.is_there.load(Ordering::SeqCst)
    }

    fn measure(&self) -> std::io::Result<Duration> {
        match self.0.is_slow.load(Ordering::SeqCst) {
            true => Ok(Duration::from_secs(1)),
            false => super::caching::measure(self.window()),
        }
    }

    fn state(&self) -> State {
        State::from_number(self.0.state.load(Ordering::SeqCst)).unwrap()
    }

    fn wish(&self) -> Option<Wish> {
        *self.0.wish.lock_unpoisoned()
    }

    fn tell(&self, outcome: Outcome, reason: &str) {
        // The test may be over.
        let _ = self.0.outcomes.send((outcome, reason.to_owned()));
    }

    fn open(&self, hello: &[u8; hello::SIZE]) -> std::io::Result<()> {
        assert_eq!(self.state(), State::Free);
        let host = self.0.clone();
        host.is_closed.store(false, Ordering::SeqCst);
        let window = Window::map(&host.window, SMALLEST, RING).unwrap();
        window.write_client_hello(hello);
        host.set(State::Opening);
        let worker = thread::spawn(move || match host.has_worker.load(Ordering::SeqCst) {
            true => Worker::serve(&host, &window),
            false => host.set(State::Ended),
        });
        *self.0.worker.lock_unpoisoned() = Some(worker);
        Ok(())
    }

    fn reply(&self) -> std::io::Result<[u8; hello::SIZE]> {
        let window = Window::map(&self.0.window, SMALLEST, RING);
        Ok(window.unwrap().answer())
    }

    fn close(&self) {
        if self.state() == State::Free {
            return;
        }
        self.0.set(State::Closing);
        self.0.is_closed.store(true, Ordering::SeqCst);
        let host = self.0.clone();
        let worker = host.worker.lock_unpoisoned().take();
        thread::spawn(move || {
            if let Some(worker) = worker {
                worker.join().unwrap();
            }
            let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: a call without pointers.
            let renewed =
                unsafe { libc::fallocate(host.window.as_raw_fd(), flags, 0, SMALLEST as i64) };
            assert_eq!(renewed, 0);
            let _ = host.told.send(Told::SliceClosed);
            host.set(State::Free);
        });
    }
}

/// A worker of one opening of the slice.
struct Worker<'a> {
    host: &'a Host,
    sender: Sender<Slice, Waker>,
    receiver: Receiver<Slice, Waker>,
    /// Open files by their tokens.
    files: HashMap<[u8; TOKEN], u32>,
    held: Vec<u64>,
}

impl Worker<'_> {
    fn serve(host: &Host, window: &Arc<Window>) {
        let asked = Hello::check(&window.client_hello(), &[nvidia::SPOKEN]).unwrap();
        assert_eq!(asked.form, Form::File);
        let reply = Hello::answer(nvidia::SPOKEN, Form::Port, (SMALLEST, RING));
        window.reply(&reply.to_bytes());
        let waker = Waker::Guest(host.events.clone());
        let spin = Duration::ZERO;
        let mut worker = Worker {
            host,
            sender: Sender::new(Producer::new(window.answers(), waker.clone()), spin),
            receiver: Receiver::new(Consumer::new(window.calls(), waker)),
            files: HashMap::new(),
            held: Vec::new(),
        };
        worker.tell(Told::Opened);
        host.set(State::Open);
        let mut body = Vec::new();
        while !host.is_closed.load(Ordering::SeqCst) {
            match worker.receiver.poll(&mut body).unwrap() {
                Some(header) => {
                    if !worker.handle(header, &body) {
                        return host.set(State::Ended);
                    }
                }
                None => worker.receiver.sleep(|| false),
            }
        }
    }

    fn tell(&self, told: Told) {
        // The test may be over.
        let _ = self.host.told.send(told);
    }

    fn send(&mut self, opcode: u16, sequence: u64, body: &[u8]) {
        let header = Header {
            length: body.len() as u32,
            opcode,
            flags: Flags::default(),
            sequence,
        };
        self.sender.send(header, body, || true).unwrap();
    }

    fn answer(&mut self, session: u64, answer: Answer, bytes: &[u8]) {
        let length = bytes.len() as u32;
        let head = Answer { length, ..answer }.to_bytes();
        self.send(to_agent::ANSWER, session, &[&head[..], bytes].concat());
    }

    /// Handles a message. Returns whether the worker goes on.
    fn handle(&mut self, header: Header, body: &[u8]) -> bool {
        let session = header.sequence;
        match header.opcode {
            to_worker::BEGIN => {
                self.tell(Told::Begin(u32::from_le_bytes(body.try_into().unwrap())));
            }
            to_worker::END => {
                self.tell(Told::End);
                self.send(to_agent::ENDED, session, &[]);
            }
            to_worker::CLOSE => {
                self.files.retain(|_, number| u64::from(*number) != session);
                self.tell(Told::Close(session as u32));
            }
            to_worker::REQUEST => {
                let (request, bytes) = Request::from_packet(body).unwrap();
                self.tell(Told::Request(request.operation));
                return self.request(session, request, bytes);
            }
            other => panic!("{other}"),
        }
        true
    }

    fn request(&mut self, session: u64, request: Request, bytes: &[u8]) -> bool {
        let none = Answer::default();
        match (request.operation, request.b) {
            (Operation::Hello, _) => {
                let answer = Answer {
                    a: SMALLEST,
                    ..none
                };
                self.answer(session, answer, b"580.1");
            }
            (Operation::Open, _) => {
                let number = (1..).find(|at| !self.files.values().any(|one| one == at));
                let number = number.unwrap();
                let token = [number as u8; TOKEN];
                self.files.insert(token, number);
                let a = u64::from(number);
                self.answer(session, Answer { a, ..none }, &token);
            }
            (Operation::Adopt, _) => {
                let a = self.files[bytes].into();
                self.answer(session, Answer { a, ..none }, &[]);
            }
            (Operation::Map, _) => {
                let (a, b) = (DEVICE, PLACE);
                self.answer(session, Answer { a, b, ..none }, &[]);
            }
            (Operation::Call, command::ECHO) => {
                for held in std::mem::take(&mut self.held) {
                    self.answer(held, none, b"held");
                }
                self.answer(session, Answer { result: 7, ..none }, bytes);
            }
            (Operation::Call, command::EVENT) => {
                for _ in 0..2 {
                    self.send(to_agent::EVENT, request.file.into(), &[]);
                }
                // Of files and sessions that there are not.
                self.send(to_agent::EVENT, 77, &[]);
                self.send(to_agent::ENDED, 77, &[]);
                self.answer(77, none, &[]);
                self.answer(session, none, &[]);
            }
            (Operation::Call, command::END) => return false,
            (Operation::Call, command::BREAK) => self.send(99, session, b"?"),
            (Operation::Call, command::HOLD) => self.held.push(session),
            (Operation::Call, command::LONG) => self.answer(session, none, &[1; MOST]),
            (Operation::Call, command::LEAVE) => self.send(to_agent::ENDED, session, &[]),
            (operation, _) => panic!("{operation:?}"),
        }
        true
    }
}

/// An agent's relay and its worker.
struct Rig {
    folder: tempfile::TempDir,
    host: Arc<Host>,
    told: mpsc::Receiver<Told>,
    outcomes: mpsc::Receiver<(Outcome, String)>,
    relay: Option<thread::JoinHandle<()>>,
}

impl Rig {
    fn new(has_interrupts: bool) -> Self {
        Self::found(has_interrupts, State::Free, |_| {})
    }

    /// In a folder that holds what suspends programs.
    fn with_folder(has_interrupts: bool, folder: tempfile::TempDir) -> Self {
        Self::all(has_interrupts, State::Free, |_| {}, folder)
    }

    /// With a slice that is in this state when the agent starts, and before that, `also`.
    fn found(has_interrupts: bool, state: State, also: impl FnOnce(&Host)) -> Self {
        Self::all(has_interrupts, state, also, tempfile::tempdir().unwrap())
    }

    fn all(
        has_interrupts: bool,
        state: State,
        also: impl FnOnce(&Host),
        folder: tempfile::TempDir,
    ) -> Self {
        let path = folder.path().join("nvidia.sock");
        let listener = socket::listen_for_packets(&path).unwrap();
        let (tell, told) = mpsc::channel();
        let (tell_outcomes, outcomes) = mpsc::channel();
        let interrupt = event();
        let events = Events {
            // Nobody rings it: the worker looks again and again.
            doorbell: event(),
            interrupt: interrupt.try_clone().unwrap(),
            patience: Duration::from_millis(1),
        };
        let host = Arc::new(Host {
            window: create(SMALLEST).unwrap(),
            doorbells: create(4096).unwrap(),
            pages: Some(create(1 << 20).unwrap()),
            interrupt: has_interrupts.then_some(interrupt),
            events: Arc::new(events),
            state: AtomicU32::new(state as u32),
            is_there: AtomicBool::new(true),
            is_slow: AtomicBool::new(false),
            has_worker: AtomicBool::new(true),
            is_closed: AtomicBool::new(false),
            worker: Mutex::default(),
            told: tell,
            wish: Mutex::default(),
            outcomes: tell_outcomes,
        });
        also(&host);
        let checkpointer =
            Checkpointer::with_program(&path, folder.path().join("gantry-checkpoint"));
        let relay = Relay::new(listener, StandIn(host.clone()), checkpointer).unwrap();
        let relay = thread::spawn(move || relay.run().unwrap());
        Self {
            folder,
            host,
            told,
            outcomes,
            relay: Some(relay),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("nvidia.sock")
    }

    fn connect(&self) -> Program {
        Program::connect(&self.path())
    }

    /// A program that has said hello.
    fn program(&self) -> Program {
        let program = self.connect();
        let (answer, bytes, window) = program.hello();
        assert_eq!((answer.result, answer.a), (0, SMALLEST));
        assert_eq!(bytes, b"580.1");
        assert!(is_same(&window.unwrap(), &self.host.window));
        program
    }

    /// Waits until the worker has been told something.
    fn wait_for(&self, expected: &Told) {
        while self.told.recv_timeout(HANGS).unwrap() != *expected {}
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.host.is_there.store(false, Ordering::SeqCst);
        self.host.events.interrupt();
        // Without interrupts, it looks while a program waits for an answer.
        let waits = Program::try_connect(&self.path());
        if let Some(Program(waits)) = &waits {
            let request = Program::request(Operation::Call, 0, (0, command::HOLD));
            let _ = socket::send(waits, &request.to_bytes(), &[]);
        }
        let relay = self.relay.take().unwrap().join();
        assert!(relay.is_ok() || thread::panicking());
    }
}

fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    use std::os::unix::fs::MetadataExt;
    let number = |file: &OwnedFd| {
        let data = File::from(file.try_clone().unwrap()).metadata().unwrap();
        (data.dev(), data.ino())
    };
    number(one) == number(other)
}

/// A program of the guest.
struct Program(UnixStream);

impl Program {
    fn connect(path: &Path) -> Self {
        Self::try_connect(path).unwrap()
    }

    /// `None`: nobody listens.
    fn try_connect(path: &Path) -> Option<Self> {
        // SAFETY: a call without pointers; a new descriptor without another owner; an address of the length that is
        // passed.
        let stream = unsafe {
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as libc::sa_family_t;
            let bytes = path.as_os_str().as_encoded_bytes();
            for (to, from) in address.sun_path.iter_mut().zip(bytes) {
                *to = *from as libc::c_char;
            }
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
            let fd = libc::socket(libc::AF_UNIX, kind, 0);
            let length = size_of_val(&address) as libc::socklen_t;
            let stream = UnixStream::from_raw_fd(fd);
            if libc::connect(fd, (&raw const address).cast(), length) < 0 {
                return None;
            }
            stream
        };
        stream.set_read_timeout(Some(HANGS)).unwrap();
        Some(Self(stream))
    }

    fn request(operation: Operation, file: u32, (a, b): (u64, u64)) -> Request {
        Request {
            operation,
            file,
            a,
            b,
            length: 0,
        }
    }

    fn put(&self, request: Request, bytes: &[u8], along: &[BorrowedFd<'_>]) {
        let length = bytes.len() as u32;
        let head = Request { length, ..request }.to_bytes();
        socket::send(&self.0, &[&head[..], bytes].concat(), along).unwrap();
    }

    /// Makes a call without waiting for its answer.
    fn begin(&self, command: u64, file: u32) {
        let request = Self::request(Operation::Call, file, (0, command));
        self.put(request, &[], &[]);
    }

    /// The answer. `None`: the connection has ended.
    fn take(&self) -> Option<(Answer, Vec<u8>, Option<OwnedFd>)> {
        let mut packet = vec![0; HEADER + MOST];
        match socket::receive(&self.0, &mut packet) {
            Ok((0, _)) => None,
            Ok((length, files)) => {
                let (answer, bytes) = Answer::from_packet(&packet[..length]).unwrap();
                Some((answer, bytes.to_vec(), files.into_iter().next()))
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn ask(
        &self,
        operation: Operation,
        file: u32,
        words: (u64, u64),
        bytes: &[u8],
    ) -> (Answer, Vec<u8>, Option<OwnedFd>) {
        self.put(Self::request(operation, file, words), bytes, &[]);
        self.take().unwrap()
    }

    fn hello(&self) -> (Answer, Vec<u8>, Option<OwnedFd>) {
        self.ask(Operation::Hello, 0, (VERSION.into(), 0), &[])
    }

    fn open(&self) -> (u32, Vec<u8>, OwnedFd) {
        let (answer, token, file) = self.ask(Operation::Open, 0, (0, 0), b"/dev/nvidiactl");
        assert_eq!(answer.result, 0);
        (answer.a as u32, token, file.unwrap())
    }

    fn call(&self, command: u64, file: u32, bytes: &[u8]) -> (Answer, Vec<u8>) {
        let (answer, bytes, _) = self.ask(Operation::Call, file, (0, command), bytes);
        (answer, bytes)
    }

    /// What a file is, as the agent says.
    fn identify(&self, file: impl AsFd) -> Result<Vec<u8>, i32> {
        let request = Self::request(Operation::Identify, 0, (0, 0));
        self.put(request, &[], &[file.as_fd()]);
        let (answer, bytes, _) = self.take().unwrap();
        match answer.result {
            0 => Ok(bytes),
            error => Err(-error),
        }
    }
}

#[test]
fn a_program_opens_calls_and_closes_with_interrupts_and_without() {
    for has_interrupts in [true, false] {
        let rig = Rig::new(has_interrupts);
        let program = rig.program();
        // SAFETY: a call without pointers.
        let user = unsafe { libc::getuid() };
        rig.wait_for(&Told::Begin(user));
        let (number, token, file) = program.open();
        assert_eq!(token, [number as u8; TOKEN]);
        let (answer, bytes) = program.call(command::ECHO, number, b"bytes");
        assert_eq!((answer.result, &bytes[..]), (7, &b"bytes"[..]));
        // Another copy keeps it.
        let copy = file.try_clone().unwrap();
        drop(file);
        let (answer, _) = program.call(command::ECHO, number, b"");
        assert_eq!(answer.result, 7);
        rig.wait_for(&Told::Request(Operation::Call));
        rig.wait_for(&Told::Request(Operation::Call));
        drop(copy);
        assert_eq!(rig.told.recv_timeout(HANGS).unwrap(), Told::Close(number));
        drop(program);
        assert_eq!(rig.told.recv_timeout(HANGS).unwrap(), Told::End);
        assert_eq!(rig.told.recv_timeout(HANGS).unwrap(), Told::SliceClosed);
        // The next program gets another worker.
        let _next = rig.program();
        rig.wait_for(&Told::Opened);
    }
}

#[test]
fn a_file_keeps_the_worker_when_its_program_has_ended() {
    let rig = Rig::new(true);
    let first = rig.program();
    let (number, token, file) = first.open();
    drop(first);
    rig.wait_for(&Told::End);
    let second = rig.program();
    assert_eq!(second.identify(&file), Ok(token.clone()));
    let (answer, ..) = second.ask(Operation::Adopt, 0, (0, 0), &token);
    assert_eq!(answer.a, number.into());
    drop(file);
    rig.wait_for(&Told::Close(number));
    drop(second);
    rig.wait_for(&Told::SliceClosed);
}

#[test]
fn only_the_agents_own_files_are_identified() {
    let rig = Rig::new(true);
    let program = rig.program();
    let (_, _, file) = program.open();
    let (socket, _peer) = UnixStream::pair().unwrap();
    assert_eq!(program.identify(&socket), Err(libc::ENOTTY));
    assert_eq!(program.identify(&rig.host.window), Err(libc::ENOTTY));
    let (answer, ..) = program.ask(Operation::Identify, 0, (0, 0), &[]);
    assert_eq!(answer.result, -libc::EINVAL);
    let stranger = rig.connect();
    assert_eq!(stranger.identify(&file), Err(libc::EPROTO));
    assert!(program.identify(&file).is_ok());
}

#[test]
fn a_file_of_the_guest_is_not_lent_to_the_worker() {
    let rig = Rig::new(true);
    let program = rig.program();
    let (number, ..) = program.open();
    let along = [rig.host.window.as_fd()];
    let request = Program::request(Operation::Call, number, (0, command::ECHO));
    program.put(request, &[], &along);
    assert_eq!(program.take().unwrap().0.result, -libc::EOPNOTSUPP);
    assert_eq!(program.call(command::ECHO, number, &[]).0.result, 7);
}

#[test]
fn a_device_page_comes_with_the_file_that_it_is_in() {
    let rig = Rig::new(true);
    let program = rig.program();
    let (number, ..) = program.open();
    let (answer, _, file) = program.ask(Operation::Map, number, (0x1_0000, 4096), &[]);
    assert_eq!((answer.a, answer.b), (DEVICE, PLACE));
    assert!(is_same(&file.unwrap(), rig.host.pages.as_ref().unwrap()));
}

#[test]
fn an_event_is_one_byte_until_it_is_read() {
    let rig = Rig::new(true);
    let program = rig.program();
    let (number, _, file) = program.open();
    let file = UnixStream::from(file);
    file.set_nonblocking(true).unwrap();
    for _ in 0..2 {
        assert_eq!(program.call(command::EVENT, number, &[]).0.result, 0);
        let mut bytes = [0; 8];
        assert_eq!(socket::receive(&file, &mut bytes).unwrap().0, 1);
        assert!(socket::receive(&file, &mut bytes).is_err());
    }
}

#[test]
fn a_program_that_waits_does_not_keep_another_from_its_answers() {
    let rig = Rig::new(false);
    let (first, second) = (rig.program(), rig.program());
    first.begin(command::HOLD, 0);
    for _ in 0..2 {
        rig.wait_for(&Told::Request(Operation::Hello));
    }
    rig.wait_for(&Told::Request(Operation::Call));
    assert_eq!(second.call(command::ECHO, 0, b"second").1, b"second");
    assert_eq!(first.take().unwrap().1, b"held");
}

#[test]
fn a_program_that_does_not_read_keeps_nobody_and_is_disconnected() {
    let rig = Rig::new(true);
    let (silent, other) = (rig.program(), rig.program());
    silent.begin(command::LONG, 0);
    for _ in 0..10 {
        assert_eq!(other.call(command::LONG, 0, &[]).1.len(), MOST);
    }
    silent.begin(command::ECHO, 0);
    rig.wait_for(&Told::End);
    assert_eq!(other.call(command::ECHO, 0, b"x").1, b"x");
}

#[test]
fn a_second_request_before_the_answer_disconnects() {
    let rig = Rig::new(true);
    let (hasty, other) = (rig.program(), rig.program());
    hasty.begin(command::HOLD, 0);
    hasty.begin(command::ECHO, 0);
    rig.wait_for(&Told::End);
    assert!(hasty.take().is_none());
    assert_eq!(other.call(command::ECHO, 0, b"x").1, b"x");
}

#[test]
fn what_is_no_request_disconnects_its_program_only() {
    let rig = Rig::new(true);
    let other = rig.program();
    let good = Program::request(Operation::Open, 0, (0, 0));
    let mut unknown = good.to_bytes();
    unknown[0] = 77;
    let mut long = good.to_bytes();
    long[8] = 1;
    let too_long = [&good.to_bytes()[..], &[0; MOST + 1]].concat();
    for packet in [&[1u8][..], &unknown, &long, &too_long] {
        let program = rig.program();
        socket::send(&program.0, packet, &[]).unwrap();
        assert!(program.take().is_none());
    }
    assert_eq!(other.call(command::ECHO, 0, b"x").1, b"x");
}

#[test]
fn the_workers_end_ends_programs_and_files_and_the_next_gets_another() {
    for (has_interrupts, how) in [
        (true, command::END),
        (false, command::END),
        (true, command::BREAK),
        (false, command::BREAK),
    ] {
        let rig = Rig::new(has_interrupts);
        let (program, other) = (rig.program(), rig.program());
        let (number, _, file) = other.open();
        program.begin(how, number);
        assert!(program.take().is_none());
        assert!(other.take().is_none());
        let file = UnixStream::from(file);
        file.set_read_timeout(Some(HANGS)).unwrap();
        assert_eq!(socket::receive(&file, &mut [0]).unwrap().0, 0);
        rig.wait_for(&Told::SliceClosed);
        let (again, ..) = rig.program().open();
        assert_eq!(again, 1, "a new worker's first");
    }
}

#[test]
fn a_program_whose_session_the_worker_ends_is_disconnected() {
    let rig = Rig::new(true);
    let (program, other) = (rig.program(), rig.program());
    program.begin(command::LEAVE, 0);
    assert!(program.take().is_none());
    rig.wait_for(&Told::End);
    assert_eq!(other.call(command::ECHO, 0, b"x").1, b"x");
    drop(other);
    rig.wait_for(&Told::SliceClosed);
}

#[test]
fn where_no_worker_takes_the_slice_programs_are_disconnected() {
    let rig = Rig::new(true);
    rig.host.has_worker.store(false, Ordering::SeqCst);
    assert!(rig.connect().take().is_none());
    rig.wait_for(&Told::SliceClosed);
    rig.host.has_worker.store(true, Ordering::SeqCst);
    rig.program();
}

#[test]
fn a_file_that_was_opened_for_nobody_is_closed() {
    let rig = Rig::new(true);
    let keeps = rig.program();
    let program = rig.program();
    let request = Program::request(Operation::Open, 0, (0, 0));
    program.put(request, b"/dev/nvidiactl", &[]);
    drop(program);
    rig.wait_for(&Told::Close(1));
    drop(keeps);
    rig.wait_for(&Told::SliceClosed);
}

#[test]
fn there_are_so_many_programs_and_no_more() {
    let rig = Rig::new(true);
    let programs: Vec<_> = (0..MOST_PROGRAMS).map(|_| rig.program()).collect();
    assert!(rig.connect().take().is_none());
    let (last, ..) = programs[MOST_PROGRAMS - 1].open();
    assert_eq!(last, 1);
    drop(programs);
    rig.wait_for(&Told::SliceClosed);
    rig.program();
}

#[test]
fn the_ports_end_ends_programs() {
    let rig = Rig::new(true);
    let program = rig.program();
    rig.host.is_there.store(false, Ordering::SeqCst);
    rig.host.events.interrupt();
    assert!(program.take().is_none());
}

/// What the test [`another_process`] does, with what.
const WHAT: [&str; 3] = [
    "GANTRY_TEST_SOCKET",
    "GANTRY_TEST_WINDOW",
    "GANTRY_TEST_LEFT",
];

/// Not a test: another process, for tests. It ends when its input does.
#[test]
fn another_process() {
    let [path, window, left] = WHAT.map(env::var_os);
    let map = |file: File| Mapping::shared(file, 0, 4096, Access::ReadWrite).unwrap();
    let mapped = if let Some(window) = window {
        let file = OpenOptions::new().read(true).write(true).open(window);
        map(file.unwrap())
    } else if let Some(path) = path.as_ref().or(left.as_ref()) {
        let program = Program::connect(Path::new(path));
        let (.., window) = program.hello();
        let mapped = map(window.unwrap().into());
        let file = program.open();
        if left.is_some() {
            program.begin(command::LEAVE, 0);
            assert!(program.take().is_none());
        }
        // The connection's end is seen before the file's.
        drop(program);
        drop(file);
        mapped
    } else {
        return;
    };
    println!("\nmapped");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(mapped);
}

/// [`another_process`], which has the window mapped.
struct Other(Child);

impl Other {
    /// `is_stranger`: it is no descendant of this one.
    fn start(what: &str, with: &Path, is_stranger: bool) -> Self {
        let own = env::current_exe().unwrap();
        let test = ["--exact", "native::tests::another_process", "--nocapture"];
        let mut command = match is_stranger {
            true => Command::new("sh"),
            false => Command::new(&own),
        };
        if is_stranger {
            command.args(["-c", "exec 3<&0; \"$0\" \"$@\" <&3 3<&- &"]);
            command.arg(&own);
        }
        let mut child = command
            .args(test)
            .env(what, with)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Its end is that of the process.
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut lines = output.by_ref().lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "mapped"));
        child.stdout = Some(output.into_inner());
        if is_stranger {
            // The shell has ended; what it has started is nobody's.
            let input = child.stdin.take();
            child.wait().unwrap();
            child.stdin = input;
        }
        Self(child)
    }

    /// One that has mapped a host's window.
    fn with_window(host: &Host) -> Self {
        let file = host.window.as_raw_fd();
        let path = format!("/proc/{}/fd/{file}", std::process::id());
        Self::start(WHAT[1], Path::new(&path), true)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let output = self.0.stdout.as_mut().unwrap();
        let _ = output.read_to_end(&mut Vec::new());
        let _ = self.0.wait();
    }
}

impl Rig {
    /// What a program that connects is told.
    fn greeted(&self) -> i32 {
        self.connect().hello().0.result
    }

    fn wait_until_served(&self) {
        let since = std::time::Instant::now();
        while self.greeted() != 0 {
            assert!(since.elapsed() < HANGS);
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn memory_that_is_mapped_when_the_worker_ends_stays() {
    let rig = Rig::new(true);
    let program = rig.program();
    let other = Other::with_window(&rig.host);
    program.begin(command::END, 0);
    assert!(program.take().is_none());
    for _ in 0..2 {
        assert_eq!(rig.greeted(), -libc::ENODEV);
    }
    assert_eq!(rig.host.state.load(Ordering::SeqCst), State::Ended as u32);
    drop(other);
    rig.wait_until_served();
    rig.wait_for(&Told::SliceClosed);
}

#[test]
fn memory_that_is_mapped_when_all_programs_have_ended_stays() {
    let rig = Rig::new(true);
    let program = rig.program();
    let other = Other::with_window(&rig.host);
    drop(program);
    rig.wait_for(&Told::End);
    // The worker's answer to it may not have arrived, and who asks keeps the slice open.
    let since = std::time::Instant::now();
    while rig.greeted() == 0 {
        assert!(since.elapsed() < HANGS);
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(rig.host.state.load(Ordering::SeqCst), State::Open as u32);
    drop(other);
    rig.wait_until_served();
    rig.wait_for(&Told::SliceClosed);
}

#[test]
fn an_agent_that_starts_leaves_memory_that_is_mapped() {
    for state in [State::Open, State::Ended, State::Free] {
        let mut other = None;
        let rig = Rig::found(true, state, |host| other = Some(Other::with_window(host)));
        assert_eq!(rig.greeted(), -libc::ENODEV);
        assert_eq!(rig.host.state.load(Ordering::SeqCst), state as u32);
        drop(other);
        rig.wait_until_served();
    }
    // What nobody has mapped is closed at once.
    let rig = Rig::found(true, State::Ended, |_| {});
    rig.wait_for(&Told::SliceClosed);
    rig.program();
}

#[test]
fn a_session_ends_when_its_process_does_not_its_connection() {
    // Also if the worker has ended it.
    for what in [WHAT[0], WHAT[2]] {
        let rig = Rig::new(true);
        let keeps = rig.program();
        let program = Other::start(what, &rig.path(), false);
        let mut told = Vec::new();
        while !matches!(told.last(), Some(Told::Close(_))) {
            told.push(rig.told.recv_timeout(HANGS).unwrap());
        }
        assert_eq!(keeps.call(command::ECHO, 0, b"x").1, b"x");
        told.extend(rig.told.try_iter());
        assert!(!told.contains(&Told::End), "{what}: {told:?}");
        drop(program);
        rig.wait_for(&Told::End);
        drop(keeps);
        rig.wait_for(&Told::SliceClosed);
    }
}

#[test]
fn what_is_cached_is_found_anew_each_time_the_slice_is_opened() {
    let rig = Rig::new(true);
    drop(rig.program());
    rig.wait_for(&Told::SliceClosed);
    rig.host.is_slow.store(true, Ordering::SeqCst);
    assert_eq!(rig.greeted(), -libc::ENODEV);
    rig.wait_for(&Told::SliceClosed);
    rig.host.is_slow.store(false, Ordering::SeqCst);
    drop(rig.program());
    // One that was refused keeps nothing.
    rig.wait_for(&Told::SliceClosed);
}
