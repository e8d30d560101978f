//! A whole worker on an OpenCL mock that only checks the types of its handles, with a hostile
//! application. The worker has a thread of its own, or runs when the application delegates to it.

#![no_main]

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{Arc, LazyLock},
    time::Duration,
};

use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use remoting_opencl::{OpenClBackend, Server, driver::Api};
use remoting_proto::wire::{Flags, Header};
use remoting_session::{
    drain::{Cpu, Drained},
    quota::Quota,
    server::{Nudge, Tuning},
};
use remoting_transport::{
    bell::Futex,
    endpoint::Receiver,
    mapping,
    port_bell::Waker,
    ring::{Consumer, Producer},
    window::{self, Window},
};

const RING: u64 = 1 << 16;
/// Size of the control words of a ring.
const CONTROL: u64 = 5 * 64;
/// Offset of the reply ring's control words.
const ANSWERS: u64 = 4096;

static API: LazyLock<Arc<Api>> = LazyLock::new(|| Arc::new(Api::typed()));

fuzz_target!(|bytes: &[u8]| {
    let bell = Futex {
        patience: Duration::from_millis(1),
    };
    let file = mapping::create(window::SMALLEST).expect("there is memory");
    let window = Window::map(&file, window::SMALLEST, RING).expect("it is a window");
    let file = File::from(file);
    // The choice takes no input byte of its own, so that earlier findings keep their meaning.
    let passive = bytes.len() % 2 == 1;
    let tuning = Tuning {
        spin: Duration::ZERO,
        waker: if passive {
            Waker::Passive
        } else {
            Waker::Futex(bell)
        },
        quota: Quota::new(1 << 30),
    };
    let nudge = Nudge(Box::new(|| {}));
    let backend = OpenClBackend::new(Arc::clone(&API), &Default::default());
    let (mut server, mut calls) = Server::new(backend, Arc::clone(&window), tuning, nudge);
    let mut producer = Producer::new(window.calls(), bell);
    let mut answers = Receiver::new(Consumer::new(window.answers(), bell));
    let (mut body, mut answer) = (Vec::new(), Vec::new());
    let mut input = Input::new(bytes);
    let mut sequence = 0;
    while !input.is_empty() {
        let written = match input.u8() {
            0..=239 => {
                let (opcode, flags) = (u16::from(input.u8() % 100), input.u8());
                let message = input.bytes(usize::from(flags >> 3) * 4);
                sequence += 1;
                let header = Header {
                    length: message.len() as u32,
                    opcode,
                    flags: Flags(u16::from(flags & 7)),
                    sequence,
                };
                producer.push(&header.to_bytes(), message)
            }
            240..=249 => {
                let length = usize::from(input.u8());
                producer.push(&[], input.bytes(length))
            }
            _ => {
                let at = u64::from(input.u16()) % (2 * CONTROL);
                let at = if at < CONTROL {
                    at
                } else {
                    at - CONTROL + ANSWERS
                };
                file.write_all_at(input.bytes(4), at).expect("it is there");
                Ok(true)
            }
        };
        // The application itself may be confused by what it has done to the ring.
        let Ok(true) = written else {
            return;
        };
        if passive {
            // Nothing else writes meanwhile, so no calls are left after at most a ring's worth.
            let most = RING as usize;
            let mut cpu = Cpu::Caller;
            for round in 0.. {
                assert!(round < most, "delegations have no end");
                match server.drain(&mut calls, &mut body, cpu) {
                    Ok(Drained::Empty) => break,
                    Ok(Drained::More) => cpu = Cpu::Caller,
                    Ok(Drained::Own) => {
                        assert_eq!(cpu, Cpu::Caller);
                        cpu = Cpu::Own;
                    }
                    Err(_) => return,
                }
            }
            while let Ok(Some(_)) = answers.poll(&mut answer) {}
            continue;
        }
        loop {
            match server.turn(&mut calls, &mut body) {
                Ok(true) => while let Ok(Some(_)) = answers.poll(&mut answer) {},
                Ok(false) => break,
                Err(_) => return,
            }
        }
    }
});
