//! What a program may send to the worker of native contexts: requests of any kind, with and without files, on its own
//! files and on others. The driver is a stand-in that refuses to see what must not reach a driver.

#![no_main]

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::{LazyLock, PoisonError},
    thread,
    time::Duration,
};

use gantry_fuzz::{input::Input, scratch};
use gantry_nvidia::{
    server::{Listener, Worker},
    stand_in::{StandIn, State},
};
use libfuzzer_sys::fuzz_target;
use nvidia_abi::{
    Branch,
    wire::{Answer, HEADER, MOST, Operation, Request, VERSION},
};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
        sendmsg, socket_with,
    },
};

/// Bytes of a program's slice.
const SLICE: u64 = 1 << 20;
/// The most requests of an input.
const MOST_REQUESTS: usize = 64;
/// Longer than the worker needs for anything, in tenths of a second.
const PATIENCE: usize = 100;
const NODES: [&str; 4] = [
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/nvidia-uvm",
    "/dev/kvm",
];
const REGISTER: u32 = 0xc004_46c9;
const ALLOCATE: u32 = 0xc030_462b;
const CONTROL: u32 = 0xc020_462a;

static WORKER: LazyLock<(SocketAddrUnix, StandIn)> = LazyLock::new(|| {
    let path = scratch::path("nvidia");
    let listener = Listener::bind(&path).expect("nobody listens there");
    let device = StandIn::default();
    let worker = Worker::new(Box::new(device.clone()), SLICE, Some(16 << 20), None);
    let worker = worker.expect("the branch is known");
    thread::spawn(move || worker.serve(&listener));
    (SocketAddrUnix::new(&path).expect("it is short"), device)
});

/// A file that programs lend.
static LENT: LazyLock<OwnedFd> = LazyLock::new(|| {
    let file = memfd_create("lent", MemfdFlags::CLOEXEC).expect("there is memory");
    ftruncate(&file, 1 << 16).expect("there is memory");
    file
});

/// A program's connection.
struct Program(OwnedFd);

impl Program {
    /// Connects as soon as one of the programs before is gone.
    fn new() -> Self {
        for _ in 0..PATIENCE {
            let socket = socket_with(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            );
            let program = Self(socket.expect("there are descriptors"));
            while connect(&program.0, &WORKER.0) == Err(Errno::INTR) {}
            if program
                .ask(Operation::Hello, 0, VERSION.into(), 0, &[], None)
                .is_some()
            {
                return program;
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("the worker serves nobody");
    }

    fn send(&self, packet: &[u8], file: Option<&OwnedFd>) -> Result<(), Errno> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = file.map(AsFd::as_fd);
        if let Some(file) = &files {
            ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(file)));
        }
        let vectors = [std::io::IoSlice::new(packet)];
        loop {
            match sendmsg(&self.0, &vectors, &mut ancillary, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => return sent.map(|_| ()),
            }
        }
    }

    /// The answer with its bytes and the file that comes along. `None`: the worker has hung up.
    fn receive(&self) -> Option<(Answer, Vec<u8>, Option<OwnedFd>)> {
        let mut packet = vec![0; HEADER + MOST];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut vectors = [std::io::IoSliceMut::new(&mut packet)];
        // libFuzzer's clock interrupts.
        let received = loop {
            match recvmsg(
                &self.0,
                &mut vectors,
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Err(Errno::INTR) => {}
                received => break received.ok()?,
            }
        };
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let (answer, bytes) = Answer::from_packet(&packet[..received.bytes])?;
        Some((answer, bytes.to_vec(), file))
    }

    fn ask(
        &self,
        operation: Operation,
        file: u32,
        a: u64,
        b: u64,
        bytes: &[u8],
        along: Option<&OwnedFd>,
    ) -> Option<(Answer, Vec<u8>, Option<OwnedFd>)> {
        let length = bytes.len() as u32;
        let request = Request {
            operation,
            file,
            a,
            b,
            length,
        };
        self.send(&[&request.to_bytes()[..], bytes].concat(), along)
            .ok()?;
        self.receive()
    }

    /// Opens a node: its number and the program's end.
    fn open(&self, node: &str) -> Option<(u32, Option<OwnedFd>)> {
        let (answer, _, end) = self.ask(Operation::Open, 0, 2, 0, node.as_bytes(), None)?;
        Some((answer.a as u32, end))
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map_or(0, |word| u32::from_le_bytes(*word))
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    if let Some(place) = bytes.get_mut(at..at + 4) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

fuzz_target!(|bytes: &[u8]| {
    let commands: Vec<u32> = Branch::R580.commands().collect();
    let program = Program::new();
    let mut ends = Vec::new();
    let mut numbers = Vec::new();
    for node in &NODES[..3] {
        let (number, end) = program.open(node).expect("it answers");
        numbers.push(number);
        ends.extend(end);
    }
    let call = |file, command: u32, bytes: &[u8], along: Option<&OwnedFd>| {
        program.ask(Operation::Call, file, 1, command.into(), bytes, along)
    };
    // A client, with a GPU as an object.
    call(numbers[1], REGISTER, &numbers[0].to_le_bytes(), None).expect("it answers");
    let mut block = [0; 48 + 56];
    put(&mut block, 12, 0x41);
    let (_, root, _) = call(numbers[0], ALLOCATE, &block[..48], None).expect("it answers");
    let client = word(&root, 8);
    for (at, value) in [(0, client), (4, client), (8, 2), (12, 0x80), (16, 1)] {
        put(&mut block, at, value);
    }
    call(numbers[0], ALLOCATE, &block, None).expect("it answers");

    let mut input = Input::new(bytes);
    for _ in 0..MOST_REQUESTS {
        if input.is_empty() {
            break;
        }
        let (kind, of) = (input.u8(), input.u8());
        let file = numbers
            .get(usize::from(of))
            .copied()
            .unwrap_or_else(|| of.into());
        let answered = match kind % 12 {
            0 => {
                let opened = program.open(NODES[usize::from(of % 4)]);
                let (number, end) = opened.expect("it answers");
                numbers.push(number);
                ends.extend(end);
                continue;
            }
            1 => program.ask(Operation::Pages, file, input.u16().into(), 0, &[], None),
            2 => program.ask(
                Operation::Return,
                file,
                u64::from(input.u16()) << 8,
                0,
                &[],
                None,
            ),
            3 => {
                let (a, b) = (u64::from(input.u16()) << 8, u64::from(input.u16()) << 4);
                program.ask(Operation::Map, file, a, b, &[], None)
            }
            4 => {
                let length = usize::from(input.u8());
                let token = input.bytes(length).to_vec();
                program.ask(Operation::Adopt, file, 0, 0, &token, None)
            }
            5 if !ends.is_empty() => {
                let end = ends.swap_remove(usize::from(of) % ends.len());
                program.ask(Operation::Identify, 0, 0, 0, &[], Some(&end))
            }
            6 => {
                // Whatever it is, it ends the connection or is answered.
                let length = usize::from(input.u8());
                let packet = input.bytes(length).to_vec();
                if packet.is_empty() || program.send(&packet, None).is_err() {
                    break;
                }
                program.receive()
            }
            _ => {
                let command = commands[usize::from(of) % commands.len()];
                let file = numbers[usize::from(input.u8()) % numbers.len()];
                let further = usize::from(input.u8());
                let mut bytes = vec![0; (command >> 16 & 0x3fff) as usize + further];
                if command < 1 << 16 {
                    bytes.resize(usize::from(input.u16()) & 0x3fff, 0);
                }
                for _ in 0..input.u8() % 16 {
                    let (at, value) = (usize::from(input.u16()), input.u16());
                    put(&mut bytes, at, value.into());
                }
                if kind & 0x80 != 0 {
                    put(&mut bytes, 0, client);
                }
                if kind & 0x40 != 0 {
                    put(&mut bytes, 16, 1);
                    let size_at = if command == CONTROL { 24 } else { 32 };
                    put(&mut bytes, size_at, further as u32);
                }
                call(file, command, &bytes, (kind & 0x20 != 0).then_some(&*LENT))
            }
        };
        if answered.is_none() {
            break;
        }
    }
    drop(ends);
    drop(program);
    // Another program is served, and what the stand-in remembers does not grow.
    drop(Program::new());
    let mut state = WORKER.1.0.lock().unwrap_or_else(PoisonError::into_inner);
    let State {
        mapped,
        share_types,
        ranges,
        doorbell,
        ..
    } = &mut *state;
    mapped.clear();
    share_types.clear();
    ranges.clear();
    drop::<Option<File>>(doorbell.take());
});
