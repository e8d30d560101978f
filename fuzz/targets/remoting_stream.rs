//! A whole worker that is reached by a stream, on an OpenCL mock, with a hostile client: what it
//! may send, and what is returned.

#![no_main]

use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, LazyLock},
    thread,
    time::Duration,
};

use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use remoting_opencl::{OpenClBackend, Server, driver::Api};
use remoting_proto::{
    apis::opencl::OpenCl,
    wire::{Flags, Header},
};
use remoting_session::{
    quota::Quota,
    server::{Nudge, Tuning},
};
use remoting_stream::{
    bridge::Bridge,
    channel::{Channel, Socket},
    frame::{BATCH, DATA},
};
use remoting_transport::{
    bell::Futex,
    mapping,
    port_bell::Waker,
    window::{self, Window},
};

const RING: u64 = 1 << 16;

static API: LazyLock<Arc<Api>> = LazyLock::new(|| Arc::new(Api::null()));

/// What the client sends, in parts.
fn sent(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut input = Input::new(bytes);
    let mut parts = vec![Vec::new()];
    let mut sequence = 0;
    while !input.is_empty() {
        let header = match input.u8() {
            0..=199 => {
                let (opcode, flags) = (u16::from(input.u8() % 100), input.u8());
                sequence += 1;
                Header {
                    length: u32::from(flags >> 3) * 4,
                    opcode,
                    flags: Flags(u16::from(flags & 7)),
                    sequence,
                }
            }
            200..=229 => Header {
                length: u32::from(input.u8()),
                opcode: DATA,
                flags: Flags::default(),
                // Around the ends of the window's data.
                sequence: [0, 2 << 20, window::SMALLEST, u64::MAX][usize::from(input.u8() % 4)]
                    .wrapping_add(u64::from(input.u16()))
                    .wrapping_sub(1 << 15),
            },
            230..=239 => Header {
                length: u32::from(input.u16()) << 8,
                opcode: u16::from(input.u8()),
                flags: Flags(u16::from(input.u8())),
                sequence: 0,
            },
            _ => {
                parts.push(Vec::new());
                continue;
            }
        };
        let part = parts.last_mut().expect("there is one");
        part.extend(header.to_bytes());
        part.extend_from_slice(input.bytes(header.length as usize));
    }
    parts
}

fuzz_target!(|bytes: &[u8]| {
    let bell = Futex {
        patience: Duration::from_millis(1),
    };
    let file = mapping::create(window::SMALLEST).expect("there is memory");
    let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker: Waker::Futex(bell),
        quota: Quota::new(1 << 30),
    };
    let nudge = Nudge(Box::new(|| {}));
    let backend = OpenClBackend::new(Arc::clone(&API), &Default::default());
    let (mut server, mut calls) = Server::new(backend, Arc::clone(&window), tuning, nudge);
    let (here, there) = UnixStream::pair().expect("there are sockets");
    let channel = Channel::plain(Socket::new(there.into()));
    let Bridge {
        mut outward,
        mut inward,
    } = Bridge::<OpenCl>::worker(&window, channel.split());
    let mut body = Vec::new();
    thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let mut taken = vec![0; BATCH];
            while matches!((&here).read(&mut taken), Ok(1..)) {}
        });
        'sending: for part in sent(bytes) {
            if part.is_empty() || (&here).write_all(&part).is_err() {
                continue;
            }
            let mut left = part.len();
            while left > 0 {
                let Ok(count) = inward.step() else {
                    break 'sending;
                };
                left -= count;
            }
            loop {
                match server.turn(&mut calls, &mut body) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(_) => break 'sending,
                }
                if outward.step().is_err() {
                    break 'sending;
                }
            }
        }
        here.shutdown(Shutdown::Both).expect("it is connected");
        // This also frees what the thread itself has allocated, since leaks are checked.
        taking.join().expect("it does not panic");
    });
});
