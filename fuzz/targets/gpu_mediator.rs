//! Hostile fronts, like those of a compromised `gantry`, against the mediator on the model of the
//! GPU. They send any message in any order, with any file, and have any commands in their memory.
//! Whatever they do, once they are gone a well-behaved front gets all of the memory, and its
//! commands are executed.

#![no_main]

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::{LazyLock, Mutex, PoisonError},
    time::{Duration, Instant},
};

use base::{Access, Mapping};
use gantry_fuzz::{input::Input, scratch};
use gf100::{
    device::{gpu::Delays, server::serve},
    format::{
        Gfn, Target, VramPage,
        push::{GpEntry, Header, Run as Words},
    },
};
use gpu_mediator::{
    gpu::{
        link::Packets,
        server::{Server, Settings},
        wire::{Directory, Event, Request, Run, Size, VERSION},
    },
    policy::Name,
};
use libfuzzer_sys::fuzz_target;

const MIB: u64 = 1 << 20;
/// Size of the model's VRAM, and the part of it that the mediator shares.
const VRAM: u64 = 160 * MIB;
const SHARED: u64 = 140 * MIB;
const SMALLEST: u64 = 64 * MIB;
const FRONTS: usize = 3;
/// Virtual address of the well-behaved front's memory.
const VA: u64 = 0x1000_0000;

/// The mediator, which all inputs of this process share.
static SERVER: LazyLock<Mutex<(Server, PathBuf)>> = LazyLock::new(|| {
    let (model, socket) = (scratch::path("model"), scratch::path("gpu"));
    let path = model.clone();
    std::thread::spawn(move || {
        let settings = gf100::device::server::Settings {
            vram: VRAM,
            map: false,
            confine: false,
            delays: Delays::default(),
        };
        serve(&path, settings).expect("it serves");
    });
    let settings = Settings {
        policy: Name::Fair,
        limit: Duration::from_millis(20),
    };
    let start = Instant::now();
    loop {
        match Server::new(&model, &socket, settings) {
            Ok(server) => return Mutex::new((server, socket)),
            Err(error) => assert!(start.elapsed() < Duration::from_secs(10), "{error:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
});

/// RAM: a file with a fixed size, one that may shrink, and one that is not memory.
static FILES: LazyLock<[File; 3]> = LazyLock::new(|| {
    let memory = |flags| {
        let file = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC | flags);
        let file = File::from(file.expect("there is room"));
        file.set_len(4 * MIB).expect("there is room");
        file
    };
    let stays = memory(rustix::fs::MemfdFlags::ALLOW_SEALING);
    rustix::fs::fcntl_add_seals(&stays, rustix::fs::SealFlags::SHRINK).expect("it can be sealed");
    let shrinks = memory(rustix::fs::MemfdFlags::ALLOW_SEALING);
    [
        stays,
        shrinks,
        File::open("/dev/null").expect("it is there"),
    ]
});

struct Front {
    packets: Packets,
    memory: Option<Mapping>,
}

impl Front {
    fn new(socket: &Path) -> Self {
        let packets = Packets::connect(socket).expect("it listens");
        rustix::io::ioctl_fionbio(&packets, true).expect("it is a socket");
        Self {
            packets,
            memory: None,
        }
    }

    fn say(&self, request: &Request) {
        self.send(&request.encode(), &[]);
    }

    /// A front that is no longer listened to is sent nothing.
    fn send(&self, message: &[u8], files: &[BorrowedFd<'_>]) {
        let _ = self.packets.send(message, files);
    }

    /// Receives what has arrived. Returns whether there was a completion.
    fn receive(&mut self) -> bool {
        let mut done = false;
        while let Ok(Some(packet)) = self.packets.receive() {
            match Event::parse(&packet.bytes).expect("the mediator makes sense") {
                Event::Welcome { vram, .. } => {
                    let file = packet.files.into_iter().next().expect("its memory");
                    let memory = Mapping::shared(&file, 0, vram as usize, Access::ReadWrite);
                    self.memory = Some(memory.expect("it can be mapped"));
                }
                Event::Done { .. } => done = true,
                _ => {}
            }
        }
        done
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let Some(memory) = &self.memory else { return };
        for (at, byte) in (at as usize..memory.len()).zip(bytes) {
            // SAFETY: within the mapping; the GPU uses volatile accesses.
            unsafe { memory.start().add(at).write_volatile(*byte) };
        }
    }
}

fn hello(vram: u64, channels: u8) -> Request {
    Request::Hello {
        version: VERSION,
        vram,
        channels,
        weight: 1,
    }
}

/// One of the first pages, or any page.
fn target(input: &mut Input) -> Option<Target> {
    let page = match input.u8() % 8 {
        0 => input.u32() % (1 << 28),
        _ => u32::from(input.u8()),
    };
    match input.u8() % 4 {
        0 => None,
        1 => Some(Target::Ram(Gfn(page))),
        _ => Some(Target::Vram(VramPage(page))),
    }
}

fn engines(input: &mut Input) -> [Option<u64>; gf100::format::instance::ENGINE_COUNT] {
    let va = VA + u64::from(input.u16()) * 4096;
    std::array::from_fn(|nth| (nth == 0 && va & 0x1000 != 0).then_some(va))
}

fn request(input: &mut Input) -> Request {
    let (table, space) = (u32::from(input.u8() % 8), u32::from(input.u8() % 4));
    let (channel, size) = (
        input.u8() % 8,
        [Size::Small, Size::Large][table as usize % 2],
    );
    match input.u8() % 16 {
        0 => Request::Table { table, size, space },
        1 => Request::TableGone { table },
        2..5 => {
            let runs = (0..=input.u8() % 3).map(|_| Run {
                index: input.u16() % 0x400,
                count: u16::from(input.u8()) + 1,
                first: target(input),
                read_only: input.u8().is_multiple_of(4),
                kind: input.u8(),
            });
            let runs = runs.collect();
            Request::Map { table, runs }
        }
        5 => Request::Space { space },
        6 => Request::SpaceGone { space },
        7..9 => Request::Link {
            space,
            index: match input.u8() {
                255 => 8191,
                index => u16::from(index % 4),
            },
            entry: Directory {
                small: (table % 2 == 0).then_some(table),
                large: (table % 2 != 0).then_some(table),
                large_shift: input.u8() % 4,
            },
        },
        9 => Request::Bind {
            channel,
            space,
            engines: engines(input),
        },
        10 => Request::Engines {
            channel,
            engines: engines(input),
        },
        11 => Request::Unbind { channel },
        12 => Request::Sync { number: 7 },
        13 => Request::Hold {
            held: input.u8().is_multiple_of(2),
        },
        14 => Request::Stop {
            channel,
            stopped: input.u8().is_multiple_of(2),
        },
        _ => {
            let entry = GpEntry {
                address: u64::from(input.u16()) * 256,
                words: u32::from(input.u8()),
            };
            let entries = vec![entry.encode(); usize::from(input.u8() % 4) + 1];
            Request::Submit { channel, entries }
        }
    }
}

fn act(input: &mut Input, socket: &Path, fronts: &mut Vec<Front>) {
    let (what, which) = (input.u8(), usize::from(input.u8()));
    if fronts.is_empty() || what < 8 && fronts.len() < FRONTS {
        let front = Front::new(socket);
        if what % 8 != 7 {
            front.say(&hello(SMALLEST, which as u8 % 128 + 1));
        }
        fronts.push(front);
        return;
    }
    let at = which % fronts.len();
    let front = &mut fronts[at];
    match what {
        ..16 => drop(fronts.swap_remove(at)),
        16..32 => {
            let mut message = request(input).encode();
            let (at, byte) = (usize::from(input.u8()), input.u8());
            if let Some(its) = message.get_mut(at) {
                *its = byte;
            }
            front.send(&message, &[]);
        }
        32..40 => front.send(input.bytes(usize::from(which as u8)), &[]),
        40..56 => {
            let ram = Request::Ram {
                first: Gfn(u32::from(input.u8())),
                count: u32::from(input.u16() % 2048),
                offset: u64::from(input.u8() % 8) * 4096,
            };
            let file = &FILES[if which < 224 { 0 } else { 1 + which % 2 }];
            front.send(&ram.encode(), &[file.as_fd()]);
        }
        56..120 => {
            // Tables, commands, semaphores.
            let at = u64::from(input.u16()) * 64;
            front.write(at, input.bytes(usize::from(which as u8)));
        }
        120..128 => {
            front.receive();
        }
        _ => front.say(&request(input)),
    }
}

/// A front that gets all memory and whose command is executed.
fn witness(server: &mut Server, socket: &Path) {
    let mut front = Front::new(socket);
    front.say(&hello(SHARED, 1));
    let (table, space) = (1, 1);
    front.say(&Request::Space { space });
    let size = Size::Small;
    front.say(&Request::Table { table, size, space });
    let runs = vec![Run {
        index: (VA >> 12) as u16 % 0x8000,
        count: 2,
        first: Some(Target::Vram(VramPage(0))),
        read_only: false,
        kind: 0,
    }];
    front.say(&Request::Map { table, runs });
    front.say(&Request::Link {
        space,
        index: (VA >> 27) as u16,
        entry: Directory {
            small: Some(table),
            ..Directory::default()
        },
    });
    front.say(&Request::Bind {
        channel: 1,
        space,
        engines: Default::default(),
    });
    let start = Instant::now();
    let mut submitted = false;
    loop {
        server
            .step(Some(Duration::from_millis(1)))
            .expect("the GPU is there");
        let done = front.receive();
        if front.memory.is_some() && !submitted {
            let header = Header::Increasing(Words {
                subchannel: 0,
                address: 0x10,
                count: 4,
            });
            let at = VA + 0x1000;
            let words = [
                header.encode(),
                (at >> 32) as u32,
                at as u32,
                77,
                1 << 24 | 2,
            ];
            for (at, word) in (0..).step_by(4).zip(words) {
                front.write(at, &word.to_le_bytes());
            }
            let entry = GpEntry {
                address: VA,
                words: 5,
            };
            let entries = vec![entry.encode()];
            front.say(&Request::Submit {
                channel: 1,
                entries,
            });
            submitted = true;
        }
        if done {
            let memory = front.memory.as_ref().expect("it was welcomed");
            // SAFETY: within the mapping and aligned.
            let word = unsafe { memory.start().add(0x1000).cast::<u32>().read_volatile() };
            assert_eq!(word, 77);
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "a well-behaved front is not served: welcomed {}",
            front.memory.is_some()
        );
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let mut served = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let (server, socket) = &mut *served;
    let mut fronts = Vec::new();
    let now = Some(Duration::ZERO);
    while !input.is_empty() {
        act(&mut input, socket, &mut fronts);
        server.step(now).expect("the GPU is there");
    }
    drop(fronts);
    // A front is accepted in one step, and its disconnect is noticed in the next.
    for _ in 0..4 {
        server.step(now).expect("the GPU is there");
    }
    witness(server, socket);
});
