//! The accelerator port between two hostile sides: a guest that writes to registers, doorbells and
//! configuration space, and workers that reply anything, or end.

#![no_main]

use std::{
    io::Write,
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{Arc, LazyLock},
    thread,
    time::Duration,
};

use devices::{
    accel::{Accel, ApiId, Apis, Options, Resources},
    pci::{BarIndex, Bdf},
    testing::{FakeLines, FakeSpace, Rig},
    thread::Unconfined,
};
use gantry_fuzz::{input::Input, scratch};
use libfuzzer_sys::fuzz_target;
use remoting_proto::{
    apis::{self, nvidia::PageRequest},
    port::{ATTACHMENT, Attachment, DOORBELL, registers},
    wire::hello::{self, Hello},
};
use remoting_transport::{socket, window::SMALLEST};

const SLICES: u32 = 4;

/// The socket on which workers would wait.
static POOL: LazyLock<UnixListener> = LazyLock::new(|| {
    let pool = UnixListener::bind(scratch::path("pool")).expect("the folder is new");
    pool.set_nonblocking(true).expect("it is a socket");
    pool
});

/// A worker, and the files that it received.
type Worker = (UnixStream, Vec<std::os::fd::OwnedFd>);

fn bar(rig: &Rig, bdf: Bdf, bar: u8) -> u64 {
    let bar = BarIndex::new(bar).expect("there are six");
    u64::from(rig.config_read(bdf, bar.offset() as u16) & !0xf)
}

/// A connection from the port becomes a worker if its attachment is complete.
fn accept(workers: &mut Vec<Worker>) {
    let Ok((stream, _)) = POOL.accept() else {
        return;
    };
    let mut bytes = [0; ATTACHMENT];
    // A guest can also cause an end of file here, by closing the slice.
    let Ok(files) = socket::receive_exact(&stream, &mut bytes) else {
        return;
    };
    let attachment = Attachment::from_bytes(&bytes).expect("the port sends attachments only");
    assert!(attachment.slice < SLICES);
    assert_eq!(files.len(), 4);
    workers.push((stream, files));
    assert!(
        workers.len() <= SLICES as usize,
        "a worker for each slice at most"
    );
}

/// What a worker of a port for native contexts sends, and a file that is none of a device that it may show.
fn ask_for_pages(stream: &UnixStream, input: &mut Input) {
    let mut bytes = [0; PageRequest::SIZE];
    // Kind, offset and length.
    for (word, bits) in bytes.chunks_exact_mut(8).zip([3, 0xf000, 0xf000]) {
        word[..2].copy_from_slice(&(input.u16() & bits).to_le_bytes());
    }
    let files = [stream.as_fd()];
    let _ = socket::send(stream, &bytes, &files[..usize::from(input.u8() & 1)]);
}

fn step(rig: &Rig, lines: &FakeLines, bdf: Bdf, workers: &mut Vec<Worker>, input: &mut Input) {
    let kind = input.u8();
    let len = [1, 2, 4, 8][usize::from(kind >> 4) % 4];
    let mut data = [0; 8];
    match kind & 0xf {
        // Commands, most of them valid.
        0..=4 => {
            let slice = u64::from(kind >> 4) % u64::from(2 * SLICES);
            let address = bar(rig, bdf, 0) + registers::SLICE + 4 * slice;
            let command = u32::from(kind & 1) + 1;
            rig.write(address, &command.to_le_bytes());
        }
        5 | 6 => {
            let address = bar(rig, bdf, 0).wrapping_add(u64::from(input.u16() % 0x4000));
            rig.write(address, input.bytes(len));
            rig.mmio.read(address, &mut data[..len]);
        }
        7 => {
            let address = bar(rig, bdf, 1).wrapping_add(u64::from(input.u16()) % (DOORBELL * 8));
            rig.doorbells.ring(address);
            rig.write(address, input.bytes(len));
        }
        8 => {
            let offset = u16::from(input.u8());
            rig.config_write(bdf, offset, input.bytes(len));
            rig.config_read_bytes(bdf, offset, &mut data[..len]);
        }
        9 => rig.enable(bdf, kind & 0x40 != 0),
        10 => {
            let register = if kind & 0x80 == 0 {
                registers::RESET
            } else {
                registers::LINE
            };
            rig.write(bar(rig, bdf, 0) + register, &[kind >> 4 & 1, 0, 0, 0]);
        }
        // What a worker reads before it serves: the guest's hello, and the machine's attachment.
        11 => {
            let mut bytes = [0; ATTACHMENT];
            let some = input.bytes(ATTACHMENT);
            bytes[..some.len()].copy_from_slice(some);
            let _ = Attachment::from_bytes(&bytes);
            let mut hello = [0; hello::SIZE];
            hello.copy_from_slice(&bytes[..hello::SIZE]);
            let _ = Hello::check(&hello, &apis::ALL);
        }
        12 => accept(workers),
        13 => {
            if let Some((stream, files)) = workers.first_mut() {
                match kind >> 6 {
                    // Its interrupt, which the guest may have serviced.
                    0 => drop(rustix::io::write(&files[2], &1u64.to_le_bytes())),
                    1 => lines.serve(),
                    2 => ask_for_pages(stream, input),
                    _ => drop(stream.write(input.bytes(len))),
                }
            }
        }
        14 if !workers.is_empty() => {
            workers.remove(usize::from(kind >> 4) % workers.len());
        }
        // Gives the port's thread time to run.
        _ => thread::sleep(Duration::from_micros(u64::from(kind >> 4) * 100)),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    LazyLock::force(&POOL);
    let rig = Rig::new();
    // The last byte, so that older inputs mean what they did.
    let native = bytes.last().is_some_and(|last| last & 1 != 0);
    let (apis, slices, pages) = match native {
        true => (Apis::one(ApiId::Nvidia), 1, 1 << 20),
        false => (Apis::ALL, SLICES, 0),
    };
    let options = Options {
        thread_name: "accel".to_owned(),
        apis,
        socket: scratch::path("pool"),
        slices,
        slice_size: SMALLEST,
        device: String::new(),
        weight: 1,
        latency: 0,
        memory: 1 << 20,
        pages,
        client: "guest".to_owned(),
        compiled: "guest".to_owned(),
        archive: None,
    };
    let lines = FakeLines::default();
    let resources = Resources {
        msi: Arc::new(rig.msi.clone()),
        lines: Arc::new(lines.clone()),
        doorbells: Arc::new(rig.doorbells.clone()),
        space: Arc::new(FakeSpace),
        spawner: Arc::new(Unconfined),
    };
    let port = Accel::new(options, resources).expect("there is memory");
    let bdf = rig.plug(port);
    rig.enable(bdf, true);
    let mut workers = Vec::new();
    while !input.is_empty() {
        step(&rig, &lines, bdf, &mut workers, &mut input);
    }
    rig.segment.unplug(bdf).expect("it is where it was plugged");
    assert!(rig.doorbells.addresses().is_empty(), "no doorbell is left");
    // Connections that were not accepted belong to this port.
    while POOL.accept().is_ok() {}
});
