//! The guest agent's socket, in a guest without a port. Applications send anything, in pieces, with
//! files or without, and leave at any time. Whatever they do, the next application is served.

#![no_main]

use std::{
    io::{Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::PathBuf,
    sync::{LazyLock, mpsc},
    thread,
    time::Duration,
};

use gantry_fuzz::{input::Input, scratch};
use libfuzzer_sys::fuzz_target;
use remoting_proto::{apis::opencl::OpenCl, wire::hello::Hello};
use remoting_transport::socket;

// The agent is a program and not a library.
#[allow(dead_code)]
#[path = "../../guest/agent/src/children.rs"]
mod children;
#[allow(dead_code)]
#[path = "../../guest/agent/src/file_error.rs"]
mod file_error;
#[allow(dead_code)]
#[path = "../../guest/agent/src/holders.rs"]
mod holders;
#[allow(dead_code)]
#[path = "../../guest/agent/src/interrupts.rs"]
mod interrupts;
#[allow(dead_code)]
#[path = "../../guest/agent/src/local_pool.rs"]
mod local_pool;
#[allow(dead_code)]
#[path = "../../guest/agent/src/native/mod.rs"]
mod native;
#[allow(dead_code)]
#[path = "../../guest/agent/src/port.rs"]
mod port;
#[allow(dead_code)]
#[path = "../../guest/agent/src/removals.rs"]
mod removals;
#[allow(dead_code)]
#[path = "../../guest/agent/src/seats.rs"]
#[rustfmt::skip]
mod seats;
#[allow(dead_code)]
#[path = "../../guest/agent/src/server.rs"]
#[rustfmt::skip]
mod server;
#[allow(dead_code)]
#[path = "../../guest/agent/src/tracked.rs"]
mod tracked;

/// Number of simultaneous connections: less than one user's limit.
const CONNECTIONS: usize = 8;

static AGENT: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = scratch::path("agent");
    let at = path.clone();
    let (listens, is_listening) = mpsc::channel();
    thread::spawn(move || {
        let seats = seats::Seats::new("", at.clone());
        let server = server::Server::new(&at, Some("none".to_owned()), None, seats);
        let server = server.expect("it can listen");
        listens.send(()).expect("it is waited for");
        panic!("the agent has ended: {}", server.run())
    });
    is_listening.recv().expect("it listens");
    path
});

fn connect() -> UnixStream {
    let stream = UnixStream::connect(&*AGENT).expect("it listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .expect("it is a socket");
    stream
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let mut peers = vec![connect()];
    let hello = Hello::client::<OpenCl>().to_bytes();
    while !input.is_empty() {
        let (what, which) = (input.u8(), usize::from(input.u8()));
        let at = which % peers.len();
        let peer = &peers[at];
        // A peer that is no longer served is sent nothing.
        match what {
            ..32 if peers.len() < CONNECTIONS => peers.push(connect()),
            ..64 => {
                let mut hello = hello;
                hello[which % hello.len()] ^= input.u8();
                let _ = socket::send(peer, &hello, &[]);
            }
            64..128 => {
                let _ = socket::send(peer, &hello[..which % hello.len()], &[]);
            }
            128..192 => {
                let length = usize::from(input.u8()).max(1);
                let _ = (&mut &*peer).write_all(input.bytes(length));
            }
            192..224 => {
                // Kernels that can refuse files do so.
                let files = vec![peer.as_fd(); which % 8];
                let _ = socket::send(peer, &[input.u8()], &files);
            }
            _ if peers.len() > 1 => drop(peers.swap_remove(at)),
            _ => {}
        }
    }
    drop(peers);
    // The agent's reply is that there is no port.
    let mut honest = connect();
    honest.write_all(&hello).expect("it listens");
    let heard = honest.read(&mut [0]);
    assert!(matches!(heard, Ok(0)), "{heard:?}");
});
