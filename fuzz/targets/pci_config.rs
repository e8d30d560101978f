//! Configuration space, BAR and ports of a virtio function, up to a running device, and of the root
//! port above it, if any.

#![no_main]

use std::sync::{Arc, Mutex};

use devices::{
    pci::{BarIndex, Bdf, RootPort, Seat},
    testing::{Rig, resources},
    thread::Unconfined,
    virtio::{
        pci::VirtioPciFunction,
        rng::{Options, Rng},
    },
};
use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;

fn step(rig: &Rig, port: Bdf, bdf: Bdf, input: &mut Input) {
    let kind = input.u8();
    let len = [1, 2, 4, 8][usize::from(kind >> 4) % 4];
    let mut data = [0; 8];
    match kind & 0xf {
        0..=3 => {
            let offset = input.u16() % 4096;
            let written = input.bytes(len);
            rig.config_write(bdf, offset, written);
            rig.config_read_bytes(bdf, offset, &mut data[..len]);
        }
        4 => {
            let offset = input.u16() % 256;
            rig.config_read_bytes(bdf, offset, &mut data[..len]);
        }
        5 => rig.enable(bdf, kind & 0x40 != 0),
        6 => rig.set_bar64(bdf, BarIndex::ZERO, input.u64()),
        // The PCI configuration ports.
        7 => {
            let port = 0xcf8 + u64::from(input.u8() % 8);
            rig.pio.write(port, input.bytes(len));
            rig.pio.read(port, &mut data[..len]);
        }
        // The root port, mostly its header.
        9 => {
            let offset = match input.u8() {
                short @ 0..=127 => u16::from(short),
                _ => input.u16() % 4096,
            };
            rig.config_write(port, offset, input.bytes(len));
            rig.config_read_bytes(port, offset, &mut data[..len]);
        }
        // What the machine does when the port's bus was reset; here also when it was not.
        11 => rig.reset(port),
        // A function that does not exist, or is on a bus with another number.
        10 => {
            let bdf = Bdf {
                segment: 0,
                bus: input.u8() % 3,
                device: input.u8() % 32,
                function: input.u8() % 8,
            };
            rig.config_write(bdf, input.u16() % 4096, input.bytes(len));
        }
        // Any address.
        8 => {
            let address = input.u64();
            rig.write(address, input.bytes(len));
            rig.mmio.read(address, &mut data[..len]);
        }
        // The BAR, wherever it is; mostly the common configuration.
        _ => {
            let offset = match input.u8() {
                short @ 0..=127 => u64::from(short),
                _ => u64::from(input.u16()),
            };
            let address = rig.bar64(bdf, BarIndex::ZERO).wrapping_add(offset);
            rig.write(address, input.bytes(len));
            rig.mmio.read(address, &mut data[..len]);
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let rig = Rig::new();
    let options = Options {
        thread_name: "_rng0".to_owned(),
        source: "/dev/zero".into(),
    };
    let rng = Rng::new(options, Arc::new(Unconfined)).expect("/dev/zero is there");
    let function = VirtioPciFunction::new(Box::new(rng), resources(&rig))
        .expect("one queue of 256 is possible");
    let mut input = Input::new(bytes);
    let port = rig.plug(RootPort::new());
    rig.enable(port, true);
    let seat = Seat {
        bus: input.u8() & 1,
        ..Seat::ANY
    };
    let bdf = rig
        .segment
        .plug(Arc::new(Mutex::new(function)), seat, &[])
        .expect("there is room for it");
    rig.enable(bdf, true);
    while !input.is_empty() {
        step(&rig, port, bdf, &mut input);
    }
    rig.segment.unplug(bdf).expect("it is where it was plugged");
});
