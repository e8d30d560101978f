//! A program that sends whatever it likes.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    thread,
};

use gantry_nvidia::{
    server::{Listener, Worker},
    stand_in::StandIn,
};
use nvidia_abi::wire::{Answer, HEADER, MOST, Operation, Request, VERSION};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with,
};

/// A worker with a stand-in for the driver.
struct Served {
    socket: PathBuf,
    device: StandIn,
    _folder: tempfile::TempDir,
}

fn serve() -> Served {
    let folder = tempfile::tempdir().expect("there is room");
    let socket = folder.path().join("nvidia.sock");
    let listener = Listener::bind(&socket).expect("the folder is new");
    let device = StandIn::default();
    let worker = Worker::new(Box::new(device.clone()), 8 << 20, None).expect("the branch is known");
    thread::spawn(move || worker.serve(&listener));
    Served {
        socket,
        device,
        _folder: folder,
    }
}

impl Served {
    fn connect(&self) -> OwnedFd {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.expect("there are descriptors");
        connect(
            &socket,
            &SocketAddrUnix::new(&self.socket).expect("it is short"),
        )
        .expect("it listens");
        socket
    }

    /// A connection that has said hello.
    fn program(&self) -> OwnedFd {
        let socket = self.connect();
        let hello = ask(&socket, Operation::Hello, 0, VERSION.into(), 0, &[]).expect("it answers");
        assert_eq!((hello.0.result, hello.0.a), (0, 8 << 20));
        socket
    }
}

/// An answer, its bytes, and the file that came along.
type Answered = (Answer, Vec<u8>, Option<OwnedFd>);

/// Sends a packet. Answers the answer, or nothing if the worker has hung up.
fn send(socket: &OwnedFd, packet: &[u8], file: Option<&OwnedFd>) -> Option<Answered> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = file.map(AsFd::as_fd);
    if let Some(file) = &files {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(file))));
    }
    sendmsg(
        socket,
        &[IoSlice::new(packet)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )
    .ok()?;
    let mut answer = vec![0; HEADER + MOST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut vectors = [IoSliceMut::new(&mut answer)];
    let received = recvmsg(
        socket,
        &mut vectors,
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )
    .ok()?
    .bytes;
    let file = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let (answer, bytes) = Answer::from_packet(&answer[..received])?;
    Some((answer, bytes.to_vec(), file))
}

fn ask(
    socket: &OwnedFd,
    operation: Operation,
    file: u32,
    a: u64,
    b: u64,
    bytes: &[u8],
) -> Option<Answered> {
    let request = Request {
        operation,
        file,
        a,
        b,
        length: bytes.len() as u32,
    };
    send(socket, &[&request.to_bytes()[..], bytes].concat(), None)
}

/// Opens a file: its number, its token, and the program's end.
fn open(socket: &OwnedFd, path: &str) -> (u32, Vec<u8>, OwnedFd) {
    let (answer, token, end) =
        ask(socket, Operation::Open, 0, 2, 0, path.as_bytes()).expect("it answers");
    assert_eq!(answer.result, 0, "{path}");
    (answer.a as u32, token, end.expect("it comes along"))
}

/// A block with these words.
fn words(length: usize, words: &[(usize, u32)]) -> Vec<u8> {
    let mut block = vec![0; length];
    for (at, word) in words {
        block[*at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    block
}

/// A program with a client, a GPU's file and the GPU as an object.
struct Owner {
    socket: OwnedFd,
    control: u32,
    client: u32,
    _ends: [OwnedFd; 2],
}

const GPU: u32 = 0x5c00_0002;
const ALLOCATE: u32 = 0xc030_462b;
const MAP: u32 = 0xc038_464e;
/// The class of a doorbell.
const DOORBELL: u32 = 0xc661;

impl Owner {
    fn new(served: &Served) -> Self {
        let socket = served.program();
        let (control, _, control_end) = open(&socket, "/dev/nvidiactl");
        let (gpu, _, gpu_end) = open(&socket, "/dev/nvidia0");
        let mut owner = Self {
            socket,
            control,
            client: 0,
            _ends: [control_end, gpu_end],
        };
        owner.call(gpu, 0xc004_46c9, &words(4, &[(0, control)]));
        let root = owner.call(control, ALLOCATE, &words(48, &[(12, 0x41)]));
        owner.client = word(&root, 8);
        assert_eq!(owner.allocate(owner.client, GPU, 0x80, 56), 0);
        owner
    }

    fn call(&self, file: u32, command: u32, bytes: &[u8]) -> Vec<u8> {
        let call = ask(
            &self.socket,
            Operation::Call,
            file,
            1,
            command.into(),
            bytes,
        );
        let (answer, bytes, _) = call.expect("it answers");
        assert_eq!(answer.result, 0, "{command:x}");
        bytes
    }

    /// Answers the status.
    fn allocate(&self, parent: u32, handle: u32, class: u32, parameters: usize) -> u32 {
        let header = [
            (0, self.client),
            (4, parent),
            (8, handle),
            (12, class),
            (16, 1),
        ];
        let answer = self.call(self.control, ALLOCATE, &words(48 + parameters, &header));
        word(&answer, 40)
    }

    /// Asks for a mapping by way of a file. Answers the status and its number.
    fn map(&self, handle: u32, length: u32, file: u32) -> (u32, u32) {
        let block = [
            (0, self.client),
            (4, GPU),
            (8, handle),
            (24, length),
            (48, file),
        ];
        let answer = self.call(self.control, MAP, &words(56, &block));
        (word(&answer, 40), word(&answer, 32))
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

#[test]
fn a_program_that_reads_no_answers_is_disconnected() {
    let served = serve();
    let other = served.program();
    let program = served.program();
    let request = Request {
        operation: Operation::Pages,
        file: 0,
        a: 4096,
        b: 0,
        length: 0,
    };
    let mut sent = 0;
    // Nobody reads: the connection ends long before the socket is full.
    while rustix::net::send(&program, &request.to_bytes(), SendFlags::NOSIGNAL).is_ok() {
        sent += 1;
        assert!(sent < 1 << 16, "it is still connected");
    }
    open(&other, "/dev/nvidiactl");
}

#[test]
fn a_client_has_a_bounded_number_of_mappings() {
    let served = serve();
    let owner = Owner::new(&served);
    assert_eq!(owner.allocate(GPU, 7, DOORBELL, 2), 0);
    let (file, _, _end) = open(&owner.socket, "/dev/nvidia0");
    let mut first = 0;
    for round in 0..=1 << 16 {
        match owner.map(7, 4096, file) {
            (0, number) if round == 0 => first = number,
            (0, _) => {}
            (status, _) => {
                assert_eq!((round, status), (1 << 16, 0x1a));
                break;
            }
        }
        assert!(round < 1 << 16, "there is no end to them");
    }
    let unmap = [(0, owner.client), (4, GPU), (8, 7), (16, first)];
    owner.call(owner.control, 0xc020_464f, &words(32, &unmap));
    assert_eq!(owner.map(7, 4096, file).0, 0, "there is room for one again");
}

#[test]
fn a_clients_own_file_is_not_given_to_map_a_page_of_the_device() {
    let served = serve();
    let owner = Owner::new(&served);
    assert_eq!(owner.allocate(GPU, 7, DOORBELL, 2), 0);
    assert_ne!(owner.map(7, 4096, owner.control).0, 0);
    let shown = ask(&owner.socket, Operation::Map, owner.control, 0, 4096, &[]);
    let (answer, _, file) = shown.expect("it answers");
    assert!(answer.result < 0 && file.is_none());
    // Nor does a file that was given get a client.
    let (control, _, _end) = open(&owner.socket, "/dev/nvidiactl");
    assert_eq!(owner.map(7, 4096, control).0, 0);
    let root = owner.call(control, ALLOCATE, &words(48, &[(12, 0x41)]));
    assert_ne!(word(&root, 40), 0);
}

#[test]
fn what_is_no_request_ends_the_connection_only() {
    let served = serve();
    for packet in [
        &[][..],
        &[0; HEADER - 1],
        &[9; HEADER],
        &[0; HEADER],
        &[1; HEADER + 5],
    ] {
        let socket = served.connect();
        assert!(send(&socket, packet, None).is_none(), "{packet:?}");
    }
    served.program();
}

#[test]
fn nothing_is_answered_before_hello_and_no_second_hello() {
    let served = serve();
    let socket = served.connect();
    let early = ask(&socket, Operation::Pages, 0, 4096, 0, &[])
        .expect("it answers")
        .0;
    let wrong = ask(&socket, Operation::Hello, 0, 7, 0, &[])
        .expect("it answers")
        .0;
    assert_eq!(
        (early.result, wrong.result),
        (-libc::EPROTO, -libc::EPROTONOSUPPORT)
    );
    let again = ask(
        &served.program(),
        Operation::Hello,
        0,
        VERSION.into(),
        0,
        &[],
    )
    .expect("it answers")
    .0;
    assert_eq!(again.result, -libc::EPROTO);
}

#[test]
fn files_of_others_and_guessed_tokens_are_refused() {
    let served = serve();
    let (one, two) = (served.program(), served.program());
    let (file, token, _end) = open(&one, "/dev/nvidiactl");
    for number in [file, 0, file + 1, u32::MAX] {
        let call = ask(&two, Operation::Call, number, 1, 0xc008_46d6, &[0; 8])
            .expect("it answers")
            .0;
        assert_eq!(call.result, -libc::EBADF);
        let map = ask(&two, Operation::Map, number, 0, 4096, &[])
            .expect("it answers")
            .0;
        assert_eq!(map.result, -libc::EBADF);
    }
    let mut guess = token;
    guess[0] ^= 1;
    for guess in [&guess[..], &[], &[0; 16], &[0; 17]] {
        assert_eq!(
            ask(&two, Operation::Adopt, 0, 0, 0, guess)
                .expect("it answers")
                .0
                .result,
            -libc::EBADF
        );
    }
    // A socket that is nobody's device file.
    let stranger = served.connect();
    let request = Request {
        operation: Operation::Identify,
        file: 0,
        a: 0,
        b: 0,
        length: 0,
    };
    let identified = send(&two, &request.to_bytes(), Some(&stranger))
        .expect("it answers")
        .0;
    assert_eq!(identified.result, -libc::ENOTTY);
}

#[test]
fn a_slice_has_no_more_than_its_length() {
    let served = serve();
    let program = served.program();
    for length in [0, (8 << 20) + 1, u64::MAX] {
        let pages = ask(&program, Operation::Pages, 0, length, 0, &[])
            .expect("it answers")
            .0;
        assert_eq!(pages.result, -libc::ENOMEM, "{length}");
    }
    for offset in [0, 1, u64::MAX] {
        // What was not taken is not given back.
        assert_eq!(
            ask(&program, Operation::Return, 0, offset, 0, &[])
                .expect("it answers")
                .0
                .result,
            0
        );
    }
}

#[test]
fn random_calls_neither_panic_nor_reach_other_programs() {
    let served = serve();
    let victim = served.program();
    let (control, _, _end) = open(&victim, "/dev/nvidiactl");
    let root = words(48, &[(12, 0x41)]);
    let created = ask(&victim, Operation::Call, control, 1, 0xc030_462b, &root)
        .expect("it answers")
        .1;
    let client = &created[8..12];
    let commands: Vec<u32> = nvidia_abi::Branch::R580.commands().collect();
    let classes = [
        0, 1, 0x3e, 0x40, 0x41, 0x71, 0x79, 0x80, 0x2080, 0xa06c, 0xc661, 0xc86f,
    ];
    let controls = [
        0x101,
        0xd01,
        0xd04,
        0x3d0b,
        0x3d0c,
        0x0080_170d,
        0x2080_1201,
        0x2080_018d,
        0x503c_0104,
    ];
    let mut random = fastrand::Rng::with_seed(580);
    let program = served.program();
    let mut ends = Vec::new();
    for round in 0..20_000 {
        if round % 200 == 0 {
            let path = *random
                .choice(&["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"])
                .expect("some");
            ends.push(open(&program, path));
        }
        let command = *random.choice(&commands).expect("some");
        let length = match random.u32(..4) {
            0 => random.usize(..400),
            _ => (command >> 16 & 0x3fff) as usize + random.usize(..3) * random.usize(..2400),
        };
        let mut bytes: Vec<u8> = (0..length)
            .map(|_| if random.bool() { 0 } else { random.u8(..) })
            .collect();
        if length >= 4 && random.bool() {
            bytes[..4].copy_from_slice(client);
        }
        if command & 0xff == 0x2b && length >= 48 {
            let class = *random.choice(&classes).expect("some");
            bytes[12..16].copy_from_slice(&u32::to_le_bytes(class));
            bytes[24..40].fill(0);
        }
        if command & 0xff == 0x2a && length >= 32 {
            let control = *random.choice(&controls).expect("some");
            bytes[8..12].copy_from_slice(&u32::to_le_bytes(control));
            bytes[12..16].fill(0);
            bytes[24..28].copy_from_slice(&(length as u32 - 32).to_le_bytes());
        }
        let operation = *random
            .choice(&[Operation::Call, Operation::Map, Operation::Pages])
            .expect("some");
        let argument = random.u64(..0x2000);
        let answer = ask(
            &program,
            operation,
            random.u32(..200),
            argument,
            command.into(),
            &bytes,
        );
        assert!(answer.is_some(), "the connection lives: round {round}");
    }
    let state = served.device.0.lock().expect("no call has panicked");
    assert!(
        state
            .share_types
            .iter()
            .all(|share_type| [0, 4].contains(share_type))
    );
    let client = u32::from_le_bytes(client.try_into().expect("four bytes"));
    let of_victim = state.objects.keys().filter(|(of, _)| *of == client);
    assert_eq!(
        of_victim.count(),
        1,
        "nothing was added to the other program's client"
    );
    drop(state);
    served.program();
}
