//! Programs of a worker whose driver is a stand-in.

mod duplicates;
mod freed;
mod hostile;
mod quota;
mod sharing;
mod unified;

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
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

/// Bytes of each program's slice.
const SLICE: u64 = 8 << 20;

/// A worker with a stand-in for the driver.
struct Served {
    socket: PathBuf,
    device: StandIn,
    _folder: tempfile::TempDir,
}

fn serve() -> Served {
    serve_with(None)
}

/// A worker whose programs may have so much video memory.
fn serve_with(memory: Option<u64>) -> Served {
    let folder = tempfile::tempdir().expect("there is room");
    let device = StandIn::default();
    let worker =
        Worker::new(Box::new(device.clone()), SLICE, memory, None).expect("the branch is known");
    Served::start(&worker, device, folder)
}

impl Served {
    /// Has a worker for this device serve programs, at a socket in a folder.
    fn start(worker: &Arc<Worker>, device: StandIn, folder: tempfile::TempDir) -> Self {
        let socket = folder.path().join("nvidia.sock");
        let listener = Listener::bind(&socket).expect("the folder is new");
        let worker = worker.clone();
        thread::spawn(move || worker.serve(&listener));
        Self {
            socket,
            device,
            _folder: folder,
        }
    }

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
        self.program_with_slice().0
    }

    /// A connection that has said hello, and the slice.
    fn program_with_slice(&self) -> (OwnedFd, OwnedFd) {
        let socket = self.connect();
        let hello = ask(&socket, Operation::Hello, 0, VERSION.into(), 0, &[]).expect("it answers");
        assert_eq!((hello.0.result, hello.0.a), (0, SLICE));
        (socket, hello.2.expect("it comes along"))
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
    slice: OwnedFd,
    control: u32,
    client: u32,
    _ends: [OwnedFd; 2],
}

const GPU: u32 = 0x5c00_0002;
const ALLOCATE: u32 = 0xc030_462b;
const FREE: u32 = 0xc010_4629;
const CONTROL: u32 = 0xc020_462a;
const MAP: u32 = 0xc038_464e;
/// The class of a doorbell.
const DOORBELL: u32 = 0xc661;

impl Owner {
    fn new(served: &Served) -> Self {
        let (socket, slice) = served.program_with_slice();
        let (control, _, control_end) = open(&socket, "/dev/nvidiactl");
        let (gpu, _, gpu_end) = open(&socket, "/dev/nvidia0");
        let mut owner = Self {
            socket,
            slice,
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

    /// Frees an object.
    fn free(&self, handle: u32) {
        let block = [(0, self.client), (4, GPU), (8, handle)];
        assert_eq!(
            word(&self.call(self.control, FREE, &words(16, &block)), 12),
            0
        );
    }

    /// Whether no page of the slice is in use.
    fn has_whole_slice(&self) -> bool {
        let ask = |operation, a| {
            ask(&self.socket, operation, 0, a, 0, &[])
                .expect("it answers")
                .0
        };
        let taken = ask(Operation::Pages, SLICE);
        taken.result == 0 && ask(Operation::Return, taken.a).result == 0
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
