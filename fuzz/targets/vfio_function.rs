//! Configuration space and vector table of a passed-through device with arbitrary extended
//! capabilities, whose host refuses requests at times.

#![no_main]

use std::sync::{Arc, atomic::Ordering};

use devices::{
    pci::{BarIndex, Bdf},
    testing::{FakeDevice, FakeLines, FakeSpace, Rig},
    vfio::{Function, Irqs, Resources},
};
use gantry_fuzz::input::Input;
use libfuzzer_sys::fuzz_target;

const KINDS: [Irqs; 3] = [Irqs::Line, Irqs::Msi, Irqs::Msix];

fn step(rig: &Rig, bdf: Bdf, device: &FakeDevice, input: &mut Input) {
    let kind = input.u8();
    let len = [1, 2, 4, 8][usize::from(kind >> 4) % 4];
    let mut data = [0; 8];
    match kind & 0xf {
        0..=4 => {
            // Usually the header and the capabilities.
            let offset = match kind & 1 {
                0 => u16::from(input.u8()),
                _ => input.u16() % 4096,
            };
            rig.config_write(bdf, offset, input.bytes(len));
            rig.config_read_bytes(bdf, offset, &mut data[..len]);
        }
        5 => rig.enable(bdf, kind & 0x40 != 0),
        6 => rig.set_bar64(bdf, BarIndex::ZERO, input.u64()),
        7 => device
            .host_vectors
            .store(u32::from(input.u8()), Ordering::Relaxed),
        8 => device.stubborn.store(kind & 0x40 != 0, Ordering::Relaxed),
        // Resets the VM.
        9 => rig
            .segment
            .reset(bdf)
            .expect("a device without a reset is no error"),
        // What the machine does when the guest has reset the function; here also when it has not.
        10 => rig.reset(bdf),
        // The vector table, the pending bits, and what follows them.
        _ => {
            let offset = u64::from(input.u16() % 4096);
            let address = rig.bar64(bdf, BarIndex::ZERO).wrapping_add(offset);
            rig.write(address, input.bytes(len));
            rig.mmio.read(address, &mut data[..len]);
        }
    }
    let on = KINDS.map(|kind| device.connected(kind).0 > 0);
    assert!(
        on.into_iter().filter(|on| *on).count() < 2,
        "one kind at a time"
    );
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let rig = Rig::new();
    let mut device = FakeDevice::new(u16::from(input.u8()));
    device.grows = input.u8() & 1 != 0;
    // Extended capabilities: headers at any offset, and lengths.
    for _ in 0..input.u8() % 16 {
        let at = 0x100 + usize::from(input.u8()) * 4;
        device.set_config(at, input.bytes(8));
    }
    let device = Arc::new(device);
    let resources = Resources {
        msi: Arc::new(rig.msi.clone()),
        lines: Arc::<FakeLines>::default(),
        space: Arc::new(FakeSpace),
    };
    let function = Function::new(Arc::clone(&device) as Arc<_>, resources, &[])
        .expect("the device is one that can be given to a guest");
    let bdf = rig.plug(function);
    rig.enable(bdf, true);
    while !input.is_empty() {
        step(&rig, bdf, &device, &mut input);
    }
    rig.segment.unplug(bdf).expect("it is where it was plugged");
    for kind in KINDS {
        assert_eq!(device.connected(kind).0, 0, "nothing is left");
    }
    assert_eq!(device.command() & 4, 0, "it uses no DMA");
});
