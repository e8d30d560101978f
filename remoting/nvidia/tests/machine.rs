//! The programs of a virtual machine's guest, by way of rings in the machine's window. The driver is a stand-in. Each
//! test's worker is a process of its own, which this program starts again for: the pool has one thread.

use std::{
    collections::HashMap,
    fs::File,
    io::{Read, Write},
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use base::{event::Event, socket};
use gantry_nvidia::{
    machine, pool,
    server::Worker,
    sharing::introducer,
    stand_in::{HANGS, StandIn},
};
use nvidia_abi::wire::{Answer, DEVICE, Operation, Request, VERSION};
use remoting_proto::{
    apis::nvidia::{PageAnswer, PageRequest, SPOKEN, to_agent, to_worker},
    port::{Attachment, READY, REFUSED},
    wire::{
        frame::{Flags, Header},
        hello::{self, Form, Hello},
    },
};
use remoting_transport::{
    account::Account,
    bell::Bell,
    endpoint::{Receiver, Sender},
    mapping,
    ring::{Consumer, Producer},
    sync::{AtomicU32, Ordering},
    window::{self, RING, Window},
};
use remoting_turns::message::{JOIN, Join};

/// Bytes of the window.
const WINDOW: u64 = 16 << 20;
/// Longer than anything takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// The socket of the pool that this process is to be.
const PATH: &str = "GANTRY_TEST_MACHINES";

/// Becomes a pool, in the process that [`Pool::start`] starts for that.
fn become_pool() {
    let Some(path) = std::env::var_os(PATH) else {
        return;
    };
    let arbiter = std::env::var_os(ARBITER).map(PathBuf::from);
    let error = pool::serve(&PathBuf::from(path), |connection| {
        let control = arbiter.as_deref().map(introducer).transpose();
        let control = control.expect("a process starts");
        let served = machine::serve(&connection, |machine, limit, account| {
            Worker::of_machine(
                Box::new(StandIn::confined(16)),
                machine,
                limit,
                account,
                control,
            )
        });
        eprintln!("{:?}", served.err());
    });
    panic!("{error}");
}

/// The arbiter of that pool, if there is one.
const ARBITER: &str = "GANTRY_TEST_ARBITER";

struct Pool {
    process: Child,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Pool {
    /// A pool in a process of its own. `test` is the name of the calling test, which calls [`become_pool`] first.
    fn start(test: &str) -> Self {
        Self::start_with(test, None)
    }

    /// The same with the socket of an arbiter.
    fn start_with(test: &str, arbiter: Option<&Path>) -> Self {
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("vm.sock");
        let process = Command::new(std::env::current_exe().expect("it is known"))
            .args(["--exact", test, "--test-threads=1", "--nocapture"])
            .env(PATH, &path)
            .envs(arbiter.map(|arbiter| (ARBITER, arbiter)))
            // The lines of this process's tests stay whole.
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        Self {
            process,
            path,
            _folder: folder,
        }
    }

    fn connect(&self) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(&self.path) {
                Ok(connection) => return connection,
                Err(error) if start.elapsed() > PATIENCE => panic!("{error}"),
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn event() -> OwnedFd {
    Event::new().expect("there are descriptors").into()
}

/// How the agent rings and sleeps.
#[derive(Debug)]
struct Doorbell(File);

impl Bell for Doorbell {
    fn ring(&self, word: &AtomicU32) {
        word.fetch_add(1, Ordering::Release);
        (&self.0)
            .write_all(&1u64.to_ne_bytes())
            .expect("it is open");
    }

    fn wait(&self, _: &AtomicU32, _: u32, _: Duration) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A machine, and the agent in its guest.
struct Machine {
    connection: UnixStream,
    window: Arc<Window>,
    calls: Sender<window::Slice, Doorbell>,
    answers: Receiver<window::Slice, Doorbell>,
    account: Account,
    pages: Arc<Mutex<Vec<PageRequest>>>,
    /// Sessions that have ended.
    ended: Vec<u32>,
}

impl Machine {
    /// A machine whose agent has said hello, and what the worker says to it.
    fn attach(pool: &Pool, change: impl FnOnce(&mut Attachment)) -> (Self, Vec<u8>) {
        Self::attach_with(pool, &event(), change)
    }

    /// The same, with this in place of an interrupt.
    fn attach_with(
        pool: &Pool,
        interrupt: &OwnedFd,
        change: impl FnOnce(&mut Attachment),
    ) -> (Self, Vec<u8>) {
        let connection = pool.connect();
        let memory = mapping::create(WINDOW).expect("there is memory");
        let window = Window::map(&memory, WINDOW, RING).expect("it is large enough");
        let hello = Hello::answer(SPOKEN, Form::Port, (0, 0));
        window.write_client_hello(&hello.to_bytes());
        let (account, account_file) = Account::create().expect("there is memory");
        let doorbell = event();
        let mut attachment = Attachment::new(SPOKEN, WINDOW);
        change(&mut attachment);
        let files = [&memory, &doorbell, interrupt, &account_file].map(AsFd::as_fd);
        socket::send(&connection, &attachment.to_bytes(), &files).expect("it listens");
        let mut said = vec![0; hello::SIZE];
        let length = (&connection).read(&mut said).expect("it answers");
        said.truncate(length);
        let bell = || Doorbell(doorbell.try_clone().expect("there are descriptors").into());
        let pages = Arc::<Mutex<Vec<PageRequest>>>::default();
        if said == [READY] {
            let connection = connection.try_clone().expect("there are descriptors");
            let pages = pages.clone();
            thread::spawn(move || show(&connection, &pages));
        }
        let machine = Self {
            connection,
            calls: Sender::new(Producer::new(window.calls(), bell()), Duration::ZERO),
            answers: Receiver::new(Consumer::new(window.answers(), bell())),
            window,
            account,
            pages,
            ended: Vec::new(),
        };
        (machine, said)
    }

    fn served(pool: &Pool) -> Self {
        let (machine, said) = Self::attach(pool, |_| ());
        assert_eq!(said, [READY]);
        machine
    }

    fn tell(&mut self, opcode: u16, number: u32, body: &[u8]) {
        let header = Header {
            length: body.len() as u32,
            opcode,
            flags: Flags::default(),
            sequence: number.into(),
        };
        self.calls
            .send(header, body, || true)
            .expect("the worker reads");
    }

    /// The next message: its kind, its number and its body.
    fn hear(&mut self) -> (u16, u32, Vec<u8>) {
        let start = Instant::now();
        let mut body = Vec::new();
        loop {
            if let Some(header) = self.answers.poll(&mut body).expect("the rules hold") {
                return (header.opcode, header.sequence as u32, body);
            }
            assert!(start.elapsed() < PATIENCE, "the worker says nothing");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn begin(&mut self, session: u32) {
        self.tell(to_worker::BEGIN, session, &1000u32.to_le_bytes());
        let hello = self.ask(session, Operation::Hello, 0, (VERSION.into(), 0), &[]);
        assert_eq!((hello.0.result, hello.0.a), (0, WINDOW));
    }

    fn ask(
        &mut self,
        session: u32,
        operation: Operation,
        file: u32,
        (a, b): (u64, u64),
        bytes: &[u8],
    ) -> (Answer, Vec<u8>) {
        let request = Request {
            operation,
            file,
            a,
            b,
            length: bytes.len() as u32,
        };
        let packet = [&request.to_bytes()[..], bytes].concat();
        self.tell(to_worker::REQUEST, session, &packet);
        loop {
            let (opcode, number, body) = self.hear();
            match opcode {
                to_agent::ANSWER if number == session => {
                    let (answer, bytes) = Answer::from_packet(&body).expect("it is an answer");
                    return (answer, bytes.to_vec());
                }
                to_agent::ENDED => self.ended.push(number),
                _ => panic!("{opcode} of {number}"),
            }
        }
    }

    fn open(&mut self, session: u32, path: &str) -> u32 {
        let answer = self.ask(session, Operation::Open, 0, (2, 0), path.as_bytes());
        assert_eq!((answer.0.result, answer.1.len()), (0, 16), "{path}");
        answer.0.a as u32
    }

    /// A call's block afterwards.
    fn call(&mut self, session: u32, file: u32, command: u32, block: &[u8]) -> Vec<u8> {
        let words = (1, command.into());
        let (answer, bytes) = self.ask(session, Operation::Call, file, words, block);
        assert_eq!(answer.result, 0, "{command:x}");
        bytes
    }

    fn shown(&self) -> Vec<PageRequest> {
        self.pages.lock().expect("nothing has failed").clone()
    }

    /// Waits until the worker has asked for this of its pages, and nothing else.
    fn until_shown(&self, expected: &[PageRequest]) {
        let start = Instant::now();
        while self.shown().len() < expected.len() {
            assert!(start.elapsed() < PATIENCE, "{:x?}", self.shown());
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.shown(), expected);
    }

    /// Whether the worker ends the connection.
    fn ends(&self) -> bool {
        self.connection
            .set_read_timeout(Some(PATIENCE))
            .expect("it is open");
        // What the thread that shows pages reads instead is the end, too.
        matches!((&self.connection).read(&mut [0]), Ok(0))
    }
}

/// Answers that pages are shown, and notes them.
fn show(mut connection: &UnixStream, pages: &Mutex<Vec<PageRequest>>) {
    let mut bytes = [0; PageRequest::SIZE];
    while socket::receive_exact(connection, &mut bytes).is_ok() {
        let request = PageRequest::from_bytes(&bytes).expect("it is one");
        pages.lock().expect("nothing has failed").push(request);
        let answer = PageAnswer(0).to_bytes();
        connection.write_all(&answer).expect("it is read");
    }
}

/// A block with these words.
fn words(length: usize, words: &[(usize, u32)]) -> Vec<u8> {
    let mut block = vec![0; length];
    for (at, word) in words {
        block[*at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    block
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

const GPU: u32 = 0x5c00_0002;
const SUBDEVICE: u32 = 0x5c00_0003;
const DOORBELLS: u32 = 0x5c00_0004;
const REGISTER: u32 = 0xc004_46c9;
const ALLOCATE: u32 = 0xc030_462b;
const FREE: u32 = 0xc010_4629;
const MAP: u32 = 0xc038_464e;
const UNMAP: u32 = 0xc020_464f;
/// Bytes of the doorbells of a GPU, and the class.
const LENGTH: u64 = 0x1_0000;
const DOORBELL: u32 = 0xc661;

/// A program whose doorbells are shown.
struct Program {
    session: u32,
    control: u32,
    client: u32,
    /// The file that its doorbells are mapped from, the place, and the number of the mapping.
    doorbells: (u32, u64, u32),
}

impl Program {
    fn start(machine: &mut Machine, session: u32) -> Self {
        machine.begin(session);
        let control = machine.open(session, "/dev/nvidiactl");
        let gpu = machine.open(session, "/dev/nvidia0");
        machine.call(session, gpu, REGISTER, &words(4, &[(0, control)]));
        let root = machine.call(session, control, ALLOCATE, &words(48, &[(12, 0x41)]));
        let client = word(&root, 8);
        for (parent, handle, class, length) in [
            (client, GPU, 0x80, 56),
            (GPU, SUBDEVICE, 0x2080, 4),
            (SUBDEVICE, DOORBELLS, DOORBELL, 2),
        ] {
            let block = [(0, client), (4, parent), (8, handle), (12, class), (16, 1)];
            let answer = machine.call(session, control, ALLOCATE, &words(48 + length, &block));
            assert_eq!(word(&answer, 40), 0, "{class:x}");
        }
        let mut program = Self {
            session,
            control,
            client,
            doorbells: (0, 0, 0),
        };
        program.show_doorbells(machine);
        program
    }

    fn show_doorbells(&mut self, machine: &mut Machine) {
        let file = machine.open(self.session, "/dev/nvidia0");
        let block = [
            (0, self.client),
            (4, SUBDEVICE),
            (8, DOORBELLS),
            (24, LENGTH as u32),
            (48, file),
        ];
        let mapped = machine.call(self.session, self.control, MAP, &words(56, &block));
        assert_eq!(word(&mapped, 40), 0);
        let (answer, _) = machine.ask(self.session, Operation::Map, file, (0, LENGTH), &[]);
        assert_eq!((answer.result, answer.a), (0, DEVICE));
        self.doorbells = (file, answer.b, word(&mapped, 32));
    }

    fn free(&self, machine: &mut Machine, parent: u32, handle: u32) {
        let block = words(16, &[(0, self.client), (4, parent), (8, handle)]);
        let answer = machine.call(self.session, self.control, FREE, &block);
        assert_eq!(word(&answer, 12), 0);
    }
}

fn place(offset: u64) -> PageRequest {
    PageRequest::Place {
        offset,
        length: LENGTH,
        writable: true,
    }
}

fn remove(offset: u64) -> PageRequest {
    PageRequest::Remove {
        offset,
        length: LENGTH,
    }
}

#[test]
fn device_pages_are_hidden_before_what_they_show_is_freed() {
    become_pool();
    let pool = Pool::start("device_pages_are_hidden_before_what_they_show_is_freed");
    let machine = &mut Machine::served(&pool);
    let mut first = Program::start(machine, 1);
    let second = Program::start(machine, 2);
    assert_eq!((first.doorbells.1, second.doorbells.1), (0, LENGTH));
    let mut expected = vec![place(0), place(LENGTH)];
    assert_eq!(machine.shown(), expected);

    // The same file again is the same place.
    let (file, at, _) = first.doorbells;
    let (again, _) = machine.ask(1, Operation::Map, file, (0, LENGTH), &[]);
    assert_eq!((again.a, again.b), (DEVICE, at));
    assert_eq!(machine.shown(), expected);

    // The mapping, by its own object only.
    let wrong = [
        (0, first.client),
        (4, SUBDEVICE),
        (8, SUBDEVICE),
        (16, first.doorbells.2),
    ];
    let answer = machine.call(1, first.control, UNMAP, &words(32, &wrong));
    assert_eq!(word(&answer, 24), 0x1f);
    assert_eq!(machine.shown(), expected);
    let block = [
        (0, first.client),
        (4, SUBDEVICE),
        (8, DOORBELLS),
        (16, first.doorbells.2),
    ];
    let answer = machine.call(1, first.control, UNMAP, &words(32, &block));
    assert_eq!(word(&answer, 24), 0);
    expected.push(remove(0));
    assert_eq!(machine.shown(), expected);
    let (gone, _) = machine.ask(1, Operation::Map, file, (0, LENGTH), &[]);
    assert_eq!(gone.result, -libc::ENOMEM);

    // What contains it.
    first.show_doorbells(machine);
    first.free(machine, first.client, GPU);
    expected.extend([place(0), remove(0)]);
    assert_eq!(machine.shown(), expected);

    // The control file that the client lives on. Others keep theirs.
    machine.tell(to_worker::CLOSE, second.control, &[]);
    expected.push(remove(LENGTH));
    machine.until_shown(&expected);
}

#[test]
fn a_mapping_outlives_its_file_and_a_program_ends_alone() {
    become_pool();
    let pool = Pool::start("a_mapping_outlives_its_file_and_a_program_ends_alone");
    let machine = &mut Machine::served(&pool);
    let first = Program::start(machine, 1);
    let second = Program::start(machine, 7);
    let shown = [place(0), place(LENGTH)];
    // As libcuda does: a mapping keeps its file.
    machine.tell(to_worker::CLOSE, first.doorbells.0, &[]);
    let stat = |machine: &mut Machine| {
        let (answer, _) = machine.ask(7, Operation::Stat, 0, (0, 0), b"/dev/nvidiactl");
        assert_eq!(answer.result, 0);
    };
    stat(machine);
    assert_eq!(machine.shown(), shown);
    machine.tell(to_worker::CLOSE, first.control, &[]);
    machine.tell(to_worker::END, 1, &[]);
    machine.until_shown(&[&shown[..], &[remove(0)]].concat());
    while !machine.ended.contains(&1) {
        let (opcode, number, _) = machine.hear();
        assert_eq!((opcode, number), (to_agent::ENDED, 1));
        machine.ended.push(number);
    }
    // Its number may be another program's, which does not have its files.
    machine.begin(1);
    let (answer, _) = machine.ask(1, Operation::Map, second.doorbells.0, (0, LENGTH), &[]);
    assert_eq!(answer.result, -libc::EBADF);
}

#[test]
fn programs_take_disjoint_pages_of_the_window() {
    become_pool();
    let pool = Pool::start("programs_take_disjoint_pages_of_the_window");
    let machine = &mut Machine::served(&pool);
    machine.begin(1);
    machine.begin(2);
    let take = |machine: &mut Machine, session| {
        let (answer, _) = machine.ask(session, Operation::Pages, 0, (2 << 20, 0), &[]);
        (answer.result == 0).then_some(answer.a)
    };
    let mut taken = HashMap::new();
    while let Some(offset) = take(machine, 1 + taken.len() as u32 % 2) {
        assert!(offset >= machine.window.data(), "{offset:x} is the rings'");
        assert_eq!(taken.insert(offset, taken.len()), None);
    }
    let all = (WINDOW - machine.window.data()) >> 21;
    assert_eq!(taken.len() as u64, all);
    let at = |number| {
        let mut found = taken.iter().filter(|(_, other)| **other == number);
        *found.next().expect("it was taken").0
    };
    // The second program's pages are not the first one's to give.
    machine.ask(1, Operation::Return, 0, (at(1), 0), &[]);
    assert_eq!(take(machine, 1), None);
    // They are free when it ends.
    let memory = machine
        .window
        .at(at(1), 8)
        .expect("it is in the data")
        .cast::<u64>();
    // SAFETY: the window is mapped, and the worker does not use these pages.
    unsafe { memory.write_volatile(7) };
    machine.tell(to_worker::END, 2, &[]);
    assert_eq!(machine.hear().0, to_agent::ENDED);
    assert_eq!(take(machine, 1), Some(at(1)));
    // SAFETY: as above.
    assert_eq!(unsafe { memory.read_volatile() }, 0, "they are empty");
}

#[test]
fn the_video_memory_of_a_guest_is_limited_and_shown() {
    become_pool();
    let pool = Pool::start("the_video_memory_of_a_guest_is_limited_and_shown");
    let (mut machine, said) = Machine::attach(&pool, |attachment| attachment.memory = 8 << 20);
    assert_eq!(said, [READY]);
    let program = Program::start(&mut machine, 1);
    let allocate = |machine: &mut Machine, handle: u32, bytes: u32| {
        let header = [
            (0, program.client),
            (4, GPU),
            (8, handle),
            (12, 0x40),
            (16, 1),
        ];
        let mut block = words(48 + 128, &header);
        block[48 + 64..48 + 68].copy_from_slice(&bytes.to_le_bytes());
        word(&machine.call(1, program.control, ALLOCATE, &block), 40)
    };
    assert_eq!(allocate(&mut machine, 0x10, 6 << 20), 0);
    assert_eq!(machine.account.total(), 6 << 20);
    assert_eq!(allocate(&mut machine, 0x11, 4 << 20), 0x51);
    assert_eq!(machine.account.total(), 6 << 20);
    program.free(&mut machine, GPU, 0x10);
    assert_eq!(machine.account.total(), 0);
}

#[test]
fn a_machines_weight_is_told_to_the_arbiter_and_refused_where_there_is_none() {
    become_pool();
    let test = "a_machines_weight_is_told_to_the_arbiter_and_refused_where_there_is_none";
    let weighs = |attachment: &mut Attachment| {
        (attachment.client, attachment.weight) = ("812/gpu".to_owned(), 3);
        attachment.latency = 2;
    };
    let (_, said) = Machine::attach(&Pool::start(test), weighs);
    assert_eq!(said, [REFUSED]);
    let folder = tempfile::tempdir().expect("there is room");
    let path = folder.path().join("arbiter");
    let arbiter = UnixListener::bind(&path).expect("the folder is new");
    let pool = Pool::start_with(test, Some(&path));
    let (machine, said) = Machine::attach(&pool, weighs);
    assert_eq!(said, [READY]);
    let (mut worker, _) = arbiter.accept().expect("it is introduced");
    let files = socket::receive_exact(&worker, &mut [0]).expect("a process's handle comes first");
    assert_eq!(files.len(), 1);
    let mut join = [0; JOIN];
    worker
        .read_exact(&mut join)
        .expect("it says for whom it works");
    let expected = Join {
        name: "812/gpu".to_owned(),
        weight: 3,
        latency: 2,
        sliced: true,
    };
    assert_eq!(Join::from_bytes(&join), Ok(expected));
    // Nobody else has the connection.
    let end = machine.connection.shutdown(Shutdown::Write);
    end.expect("it is open");
    assert_eq!(worker.read(&mut [0]).expect("it ends"), 0);
}

#[test]
fn a_machine_that_ends_takes_its_process_along_and_no_other() {
    become_pool();
    let pool = Pool::start("a_machine_that_ends_takes_its_process_along_and_no_other");
    let mut other = Machine::served(&pool);
    let mut machine = Machine::served(&pool);
    Program::start(&mut machine, 1);
    machine
        .connection
        .shutdown(Shutdown::Write)
        .expect("it is open");
    assert!(machine.ends());
    other.begin(1);
}

#[test]
fn an_agent_that_breaks_the_rules_loses_its_worker() {
    become_pool();
    let pool = Pool::start("an_agent_that_breaks_the_rules_loses_its_worker");
    let hello = Request {
        operation: Operation::Hello,
        file: 0,
        a: VERSION.into(),
        b: 0,
        length: 0,
    };
    let most = vec![0; (64 << 10) + 33];
    let cases: [(u16, &[u8]); 4] = [
        (99, &[]),
        (to_worker::BEGIN, &[0; 3]),
        (to_worker::REQUEST, &most),
        (to_worker::CLOSE, &[]),
    ];
    for (opcode, body) in cases {
        let mut machine = Machine::served(&pool);
        machine.begin(1);
        let number = if opcode == to_worker::CLOSE {
            u64::MAX
        } else {
            1
        };
        let header = Header {
            length: body.len() as u32,
            opcode,
            flags: Flags::default(),
            sequence: number,
        };
        machine
            .calls
            .send(header, body, || true)
            .expect("there is room");
        assert!(machine.ends(), "{opcode}");
    }
    // A packet that is no request ends its program.
    let mut machine = Machine::served(&pool);
    machine.begin(1);
    machine.tell(to_worker::REQUEST, 1, &hello.to_bytes()[..8]);
    assert_eq!(machine.hear(), (to_agent::ENDED, 1, Vec::new()));
    // The agent may not have seen that yet.
    machine.tell(to_worker::REQUEST, 1, &hello.to_bytes());
    machine.tell(to_worker::END, 1, &[]);
    assert_eq!(machine.hear(), (to_agent::ENDED, 1, Vec::new()));
    machine.begin(1);
}

#[test]
fn memory_of_a_session_that_the_worker_ends_stays_taken() {
    become_pool();
    let pool = Pool::start("memory_of_a_session_that_the_worker_ends_stays_taken");
    let machine = &mut Machine::served(&pool);
    machine.begin(1);
    machine.begin(2);
    let all = WINDOW - machine.window.data();
    let take = |machine: &mut Machine, session| {
        let (answer, _) = machine.ask(session, Operation::Pages, 0, (all, 0), &[]);
        answer.result
    };
    assert_eq!(take(machine, 1), 0);
    machine.tell(to_worker::REQUEST, 1, &[0; 8]);
    assert_eq!(machine.hear(), (to_agent::ENDED, 1, Vec::new()));
    assert_eq!(take(machine, 2), -libc::ENOMEM, "its program has it mapped");
    machine.tell(to_worker::END, 1, &[]);
    assert_eq!(machine.hear(), (to_agent::ENDED, 1, Vec::new()));
    assert_eq!(take(machine, 2), 0);
}

#[test]
fn new_programs_do_not_wait_for_a_file_that_is_being_closed() {
    become_pool();
    let pool = Pool::start("new_programs_do_not_wait_for_a_file_that_is_being_closed");
    let machine = &mut Machine::served(&pool);
    let program = Program::start(machine, 1);
    let block = [
        (0, program.client),
        (4, GPU),
        (8, HANGS),
        (12, 0x40),
        (16, 1),
    ];
    let request = Request {
        operation: Operation::Call,
        file: program.control,
        a: 1,
        b: ALLOCATE.into(),
        length: 48 + 128,
    };
    let packet = [&request.to_bytes()[..], &words(48 + 128, &block)].concat();
    machine.tell(to_worker::REQUEST, 1, &packet);
    machine.begin(2);
    let file = machine.open(2, "/dev/nvidiactl");
    // The second time, nobody has it.
    for _ in 0..2 {
        machine.tell(to_worker::CLOSE, file, &[]);
    }
    let (answer, _) = machine.ask(2, Operation::Stat, 0, (0, 0), b"/dev/nvidiactl");
    assert_eq!(answer.result, 0);
}

#[test]
fn a_machine_of_another_build_for_some_devices_or_with_other_files_is_refused() {
    become_pool();
    let pool =
        Pool::start("a_machine_of_another_build_for_some_devices_or_with_other_files_is_refused");
    let (machine, said) = Machine::attach(&pool, |attachment| attachment.version.fingerprint ^= 1);
    let answer: [u8; hello::SIZE] = said.try_into().expect("it is a hello");
    let check = |bytes| Hello::check(bytes, &[SPOKEN]);
    assert!(check(&answer).is_ok(), "the machine is told the worker's");
    assert!(
        check(&machine.window.answer()).is_err(),
        "and the agent the machine's"
    );
    let (_, said) = Machine::attach(&pool, |attachment| attachment.device = "H200".to_owned());
    assert_eq!(said, [remoting_proto::port::REFUSED]);
    let file = File::open("/proc/version").expect("it is there");
    let (_, said) = Machine::attach_with(&pool, &file.into(), |_| ());
    assert_eq!(
        said,
        [remoting_proto::port::REFUSED],
        "a file system's file"
    );
    let connection = pool.connect();
    (&connection).write_all(&[7; 300]).expect("it listens");
    let mut said = Vec::new();
    let _ = (&connection).read_to_end(&mut said);
    assert_eq!(said, [remoting_proto::port::REFUSED]);
    assert!(connection.as_raw_fd() >= 0);
}
