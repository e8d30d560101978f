//! What the server of a vfio-user device may reply, while a guest uses the device.

#![no_main]

use std::{
    io::{IoSlice, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use devices::{
    memory::{GuestMemory, GuestRam},
    pci::{Bdf, Seat},
    testing::{FakeLines, FakeSpace, Rig},
    thread::Unconfined,
    vfio::{
        Function, Resources,
        user::{Patience, Surroundings, UserDevice},
    },
};
use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};

const RAM: usize = 1 << 16;
const CONFIG: usize = 0x100;

/// Guest memory that a server could map.
static MEMORY: LazyLock<GuestMemory> = LazyLock::new(|| {
    let file = tempfile::tempfile().expect("there is room");
    file.set_len(RAM as u64).expect("there is room");
    let region = MmapRegion::from_file(FileOffset::new(file, 0), RAM).expect("there is room");
    let region = GuestRegionMmap::new(region, GuestAddress(0)).expect("it starts at 0");
    GuestMemory::new(GuestRam::from_regions(vec![region]).expect("it is one region"))
});

/// Memory of the BARs.
static BAR: LazyLock<OwnedFd> = LazyLock::new(|| {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("bar", flags).expect("there is room");
    ftruncate(&file, 1 << 16).expect("there is room");
    file
});

/// MSI, MSI-X with its table in BAR 0, PCI Express, vendor-specific.
fn config(input: &mut Input) -> [u8; CONFIG] {
    let mut config = [0; CONFIG];
    config[..8].copy_from_slice(&[0x34, 0x12, 0xe8, 0x11, 0, 0, 0x10, 0]);
    config[0x34] = 0x40;
    config[0x18] = 0xc;
    config[0x3d] = 1;
    config[0x40..0x44].copy_from_slice(&[0x05, 0x50, 0x84, 0]);
    config[0x50..0x60]
        .copy_from_slice(&[0x11, 0x60, 7, 0, 0, 0x10, 0, 0, 0, 0x18, 0, 0, 0, 0, 0, 0]);
    config[0x60..0x64].copy_from_slice(&[0x10, 0xa0, 2, 0]);
    config[0xa0..0xa3].copy_from_slice(&[0x09, 0, 8]);
    for _ in 0..input.u8() % 32 {
        config[usize::from(input.u8())] = input.u8();
    }
    config
}

struct Server<'a> {
    stream: UnixStream,
    input: Input<'a>,
    config: [u8; CONFIG],
}

impl Server<'_> {
    /// Replies until the client or the input ends.
    fn run(mut self) {
        while self.answer().is_some() {}
    }

    fn answer(&mut self) -> Option<()> {
        let mut header = [0; 16];
        self.stream.read_exact(&mut header).ok()?;
        let command = u16::from_ne_bytes([header[2], header[3]]);
        let size = u32::from_ne_bytes([header[4], header[5], header[6], header[7]]) as usize;
        let mut asked = vec![0; size.checked_sub(16)?];
        self.stream.read_exact(&mut asked).ok()?;
        let mut message = header.to_vec();
        message.extend_from_slice(&self.honest(command, &asked));
        let len = message.len() as u32;
        message[4..8].copy_from_slice(&len.to_ne_bytes());
        message[8] = 1;
        let mut descriptors = vec![];
        match self.input.u8() {
            // A correct reply.
            0..=127 => {}
            // A few bytes are changed, half of the time only in the body.
            kind @ 128..=239 => {
                for _ in 0..=kind % 8 {
                    let at = usize::from(self.input.u8()) % message.len();
                    let at = if kind & 16 != 0 { at } else { 16 + at };
                    let value = self.input.u8();
                    if let Some(byte) = message.get_mut(at) {
                        *byte = value;
                    }
                }
            }
            // Too long, with a matching length field.
            240..=247 => {
                message.extend_from_slice(self.input.bytes(64));
                let len = message.len() as u32;
                message[4..8].copy_from_slice(&len.to_ne_bytes());
            }
            // Anything, and then the end.
            _ => {
                let len = usize::from(self.input.u8());
                let _ = self.stream.write_all(self.input.bytes(len));
                return None;
            }
        }
        if command == 5 || self.input.u8() > 250 {
            descriptors.resize(usize::from(self.input.u8() % 8), BAR.as_fd());
        }
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let parts = [IoSlice::new(&message)];
        let sent = sendmsg(&self.stream, &parts, &mut control, SendFlags::NOSIGNAL).ok()?;
        // The client knows from the header what to expect; an incomplete message ends the
        // connection.
        let whole = u32::from_ne_bytes([message[4], message[5], message[6], message[7]]);
        (sent == message.len() && whole as usize == sent && !self.input.is_empty()).then_some(())
    }

    /// The reply of an honest server, without the header.
    fn honest(&mut self, command: u16, asked: &[u8]) -> Vec<u8> {
        let word = |at: usize| {
            let bytes = asked.get(at..at + 4).unwrap_or(&[0; 4]);
            u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        match command {
            1 => b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":4}}\0".to_vec(),
            4 => words(&[16, 3, 9, 5]),
            5 => match word(8) {
                index @ (0 | 2) => words(&[
                    80,
                    0xf,
                    index,
                    32,
                    0x2000,
                    0,
                    0,
                    0, // a capability: one area
                    1 << 16 | 1,
                    0,
                    1,
                    0,
                    0,
                    0,
                    0x1000,
                    0,
                ]),
                1 => words(&[32, 3, 1, 0, 0x100, 0, 0, 0]),
                index @ 7 => words(&[32, 3, index, 0, CONFIG as u32, 0, 0, 0]),
                index => words(&[32, 0, index, 0, 0, 0, 0, 0]),
            },
            7 => words(&[16, 1, word(8), [1, 4, 8, 1, 1][word(8) as usize % 5]]),
            9 => {
                let mut body = asked.to_vec();
                let (at, len) = (word(0) as usize, word(12) as usize % 64);
                let config = self.config.get(at..).filter(|_| word(8) == 7);
                let bytes = config.unwrap_or_default().iter().chain([0; 64].iter());
                body.extend(bytes.take(len));
                body
            }
            10 => asked.get(..16).unwrap_or_default().to_vec(),
            _ => Vec::new(),
        }
    }
}

fn step(rig: &Rig, bdf: Bdf, input: &mut Input) {
    let kind = input.u8();
    let len = [1, 2, 4, 8][usize::from(kind >> 4) % 4];
    let mut data = [0; 8];
    match kind & 7 {
        0..=2 => rig.config_write(bdf, input.u16() % 256, input.bytes(len)),
        3 => rig.config_read_bytes(bdf, input.u16() % 256, &mut data[..len]),
        4 => rig.enable(bdf, kind & 0x40 != 0),
        // Enables MSI-X and writes one of its vectors.
        5 => {
            rig.config_write(bdf, 0x52, &[7, 0x80]);
            let at = 0x1000 + u64::from(input.u8() % 8) * 16;
            let bar = u64::from(rig.config_read(bdf, 0x10) & !0xf);
            rig.write(bar + at, &0xfee0_0000_u64.to_ne_bytes());
            rig.write(bar + at + 8, &[0; 8]);
        }
        _ => {
            let bar = u64::from(rig.config_read(bdf, 0x10) & !0xf);
            let address = bar + u64::from(input.u16() % 0x2000);
            rig.write(address, input.bytes(len));
            rig.mmio.read(address, &mut data[..len]);
        }
    }
}

/// A guest uses the device as the bytes say.
fn plug(device: UserDevice, done: &[u8]) {
    let rig = Rig::new();
    let resources = Resources {
        msi: Arc::new(rig.msi.clone()),
        lines: Arc::<FakeLines>::default(),
        space: Arc::new(FakeSpace),
    };
    let Ok(function) = Function::new(Arc::new(device), resources, &[]) else {
        return;
    };
    let Ok(bdf) = rig
        .segment
        .plug(Arc::new(Mutex::new(function)), Seat::ANY, &[])
    else {
        return;
    };
    let mut input = Input::new(done);
    while !input.is_empty() {
        step(&rig, bdf, &mut input);
    }
    rig.segment.unplug(bdf).expect("it is where it was plugged");
}

fuzz_target!(|bytes: &[u8]| {
    let (said, done) = bytes.split_at(bytes.len() / 2);
    let (client, stream) = UnixStream::pair().expect("there are descriptors");
    let patience = Duration::from_secs(5);
    let surroundings = Surroundings {
        memory: MEMORY.clone(),
        spawner: &Unconfined,
        thread: "_user0",
        patience: Patience {
            open: patience,
            answer: patience,
        },
        lost: Box::new(|_| {}),
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(move || {
            let mut input = Input::new(said);
            let config = config(&mut input);
            Server {
                stream,
                input,
                config,
            }
            .run();
        });
        if let Ok(device) = UserDevice::new("fuzz", client, surroundings) {
            plug(device, done);
        }
        // The connection is closed. Joining also frees what the thread itself has allocated, since
        // leaks are checked.
        server.join().expect("it does not panic");
    });
});
