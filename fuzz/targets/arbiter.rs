//! The arbiter's two sockets: pools that introduce anything or nothing, workers that send anything
//! in any order and write anything into their accounts, and readers of its status.

#![no_main]

use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    path::PathBuf,
    process::{Child, Command},
    sync::{LazyLock, Mutex, PoisonError},
    time::Duration,
};

use gantry_fuzz::{input::Input, scratch};
use gpu_mediator::{
    arbiter::Arbiter,
    policy::Name,
    status::{self, Status},
};
use libfuzzer_sys::fuzz_target;
use remoting_transport::socket;
use remoting_turns::message::{First, Join, Word};

/// Number of processes that workers can have at a time, and number of connections.
const PROCESSES: usize = 3;
const CONNECTIONS: usize = 8;

/// The arbiter kills processes whose connections are closed.
static WORKERS: LazyLock<Mutex<Vec<Child>>> = LazyLock::new(Mutex::default);

fn start() -> Child {
    let sleep = Command::new("sleep").arg("100000").spawn();
    sleep.expect("there are processes")
}

/// Returns a handle of a running process.
fn handle(which: usize) -> OwnedFd {
    let mut workers = WORKERS.lock().unwrap_or_else(PoisonError::into_inner);
    while workers.len() <= which {
        workers.push(start());
    }
    let worker = &mut workers[which];
    if !matches!(worker.try_wait(), Ok(None)) {
        *worker = start();
    }
    let pid = rustix::process::Pid::from_child(worker);
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("it is there")
}

struct Peer {
    stream: UnixStream,
    /// The files that it received: its grants, which it may only read, and its account.
    files: Vec<File>,
}

impl Peer {
    fn receive(&mut self) {
        let mut bytes = [0; 64];
        if let Ok((1.., files)) = socket::receive(&self.stream, &mut bytes) {
            self.files.extend(files.into_iter().map(File::from));
        }
    }
}

fn act(input: &mut Input, path: &PathBuf, peers: &mut Vec<Peer>) {
    let (what, which) = (input.u8(), usize::from(input.u8()));
    if what < 48 && peers.len() < CONNECTIONS {
        let path = if what == 0 { &status::path(path) } else { path };
        let stream = UnixStream::connect(path).expect("it listens");
        stream.set_nonblocking(true).expect("it is a socket");
        let files = Vec::new();
        peers.push(Peer { stream, files });
        return;
    }
    if peers.is_empty() {
        return;
    }
    let at = which % peers.len();
    let peer = &mut peers[at];
    // A peer that no longer listens is sent nothing.
    match what {
        ..112 => {
            let process = handle(which % PROCESSES);
            let _ = socket::send(&peer.stream, &[0], &[process.as_fd()]);
        }
        112..120 => {
            let other = peer
                .stream
                .as_fd()
                .try_clone_to_owned()
                .expect("it is open");
            let _ = socket::send(&peer.stream, &[0], &[other.as_fd()]);
        }
        120..168 => {
            let weight = u32::from(input.u8());
            let sliced = which & 8 != 0;
            let name = ["a", "b", "\u{e9}"][which % 3].to_owned();
            let join = Join {
                name,
                weight,
                latency: u32::from(input.u8()),
                sliced,
            };
            let first = match which & 48 {
                16 => First::Trial(join.name),
                48 => First::Weight(join),
                32 => First::Latency(join),
                _ => First::Worker(join),
            };
            let _ = (&peer.stream).write_all(&first.to_bytes());
        }
        168..184 => {
            let length = usize::from(input.u8());
            let _ = (&peer.stream).write_all(input.bytes(length));
        }
        184..224 => {
            let words = [Word::Want, Word::Again, Word::Done];
            let _ = words[which % 3].say(&peer.stream);
        }
        224..248 => {
            peer.receive();
            let (offset, length) = (u64::from(input.u8()) * 8, usize::from(input.u8() % 33));
            for file in &peer.files {
                let written = file.write_at(input.bytes(length), offset % 4096);
                assert!(written.is_err() || file.metadata().is_ok_and(|file| file.len() == 4096));
            }
        }
        _ => drop(peers.swap_remove(at)),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let path = scratch::path("arbiter");
    let policy = [Name::Fifo, Name::Credit, Name::Band, Name::Fair][usize::from(input.u8() % 4)];
    let limit = (input.u8() & 1 != 0).then_some(Duration::from_millis(1));
    let mut arbiter = Arbiter::new(&path, policy, limit).expect("nobody else listens");
    let mut peers = Vec::new();
    while !input.is_empty() {
        act(&mut input, &path, &mut peers);
        arbiter.step(Some(Duration::ZERO)).expect("it can wait");
    }
    // Whatever the peers have sent, the arbiter still reports its status.
    let mut reader = UnixStream::connect(status::path(&path)).expect("it listens");
    reader.set_nonblocking(true).expect("it is a socket");
    let mut text = Vec::new();
    while reader.read_to_end(&mut text).is_err() {
        arbiter.step(Some(Duration::ZERO)).expect("it can wait");
    }
    let status: Status = serde_json::from_slice(&text).expect("it is whole");
    assert!(status.clients.len() <= 3, "{status:?}");
});
