//! Tests of a guest's driver with a fake device.

use std::{
    os::fd::AsRawFd,
    sync::{Arc, Mutex, atomic::Ordering, mpsc},
    thread,
    time::Duration,
};

use device_model::testing::FakeSpace;
use pci::{
    BarIndex, Bdf, RootPort, Seat,
    testing::{FakeLines, Rig},
};

use super::{Function, Irqs, Resources};
use crate::testing::FakeDevice;

const MASTER: u16 = 4;
const POWER_CONTROL: u16 = 0x44;
const DEVICE_CONTROL: u16 = 0x58;
const MSI_CONTROL: u16 = 0xa2;
const MSIX_CONTROL: u16 = 0xc2;
const MSIX_ON: u16 = 0x8000;
const MSIX_ON_MASKED: u16 = 0xc000;

struct Plugged {
    rig: Rig,
    bdf: Bdf,
    device: Arc<FakeDevice>,
}

impl Plugged {
    fn new(device: FakeDevice) -> Self {
        Self::on(Rig::new(), Seat::ANY, device)
    }

    /// Behind a root port, whose address is returned, too.
    fn behind_port(device: FakeDevice) -> (Self, Bdf) {
        let rig = Rig::new();
        let port = rig.plug(RootPort::new());
        rig.enable(port, true);
        let seat = Seat {
            bus: 1,
            ..Seat::ANY
        };
        (Self::on(rig, seat, device), port)
    }

    fn on(rig: Rig, seat: Seat, device: FakeDevice) -> Self {
        let device = Arc::new(device);
        let resources = Resources {
            msi: Arc::new(rig.msi.clone()),
            lines: Arc::<FakeLines>::default(),
            space: Arc::new(FakeSpace),
        };
        let function = Function::new(Arc::clone(&device) as Arc<_>, resources, &[]).unwrap();
        let function = Arc::new(Mutex::new(function));
        let bdf = rig.segment.plug(function, seat, &[]).unwrap();
        rig.enable(bdf, true);
        Self { rig, bdf, device }
    }

    fn config(&self, offset: u16, value: u16) {
        self.rig
            .config_write(self.bdf, offset, &value.to_le_bytes());
    }

    fn set_masked(&self, vector: u64, masked: bool) {
        let at = self.rig.bar64(self.bdf, BarIndex::ZERO) + vector * 16;
        self.rig.write(at, &0xfee0_0000_u64.to_le_bytes());
        self.rig.write(at + 8, &(0x40 + vector).to_le_bytes()[..4]);
        self.rig.write(at + 12, &u32::from(masked).to_le_bytes());
    }

    fn msix(&self) -> (usize, Vec<u16>) {
        self.device.connected(Irqs::Msix)
    }
}

#[test]
fn a_sleeping_device_stays_awake_and_its_dma_stops() {
    let plugged = Plugged::new(FakeDevice::new(4));
    assert_eq!(plugged.device.command() & MASTER, MASTER);
    plugged.config(POWER_CONTROL, 3);
    let mut state = [0; 2];
    plugged
        .rig
        .config_read_bytes(plugged.bdf, POWER_CONTROL, &mut state);
    assert_eq!(state[0] & 3, 3, "the guest sees D3hot");
    let mut physical = [0; 2];
    super::Device::read_config(&*plugged.device, POWER_CONTROL.into(), &mut physical);
    assert_eq!(physical[0] & 3, 0, "the device is in D0");
    assert_eq!(plugged.device.command() & (MASTER | 2), 2);
    plugged.config(POWER_CONTROL, 0);
    assert_eq!(plugged.device.command() & MASTER, MASTER);
}

#[test]
fn a_device_with_little_configuration_space_has_what_is_in_it() {
    // Mediated devices that emulate old PCI devices have short ones: the kernel's sample has 255
    // bytes.
    for config_len in [255, 0x80, 0x40] {
        let mut device = FakeDevice::new(4);
        device.config_len = config_len;
        let plugged = Plugged::new(device);
        let mut id = [0; 4];
        plugged.rig.config_read_bytes(plugged.bdf, 0, &mut id);
        assert_eq!(id, [0x34, 0x12, 0xe8, 0x11], "{config_len}");
        plugged.config(POWER_CONTROL, 3);
        let state = plugged.device.command() & MASTER;
        assert_eq!(state == 0, config_len > 0x40, "{config_len}");
    }
}

#[test]
fn the_device_gets_the_vectors_that_the_guest_unmasks() {
    for grows in [false, true] {
        let mut device = FakeDevice::new(64);
        device.grows = grows;
        let plugged = Plugged::new(device);
        plugged.config(MSIX_CONTROL, MSIX_ON_MASKED);
        assert_eq!(plugged.msix(), (1, vec![]), "it is on, as a driver expects");
        plugged.set_masked(0, false);
        assert!(plugged.msix().1.is_empty(), "the function is masked");
        plugged.config(MSIX_CONTROL, MSIX_ON);
        assert_eq!(plugged.msix(), (1, vec![0]));
        plugged.set_masked(3, false);
        assert_eq!(plugged.msix().1, [0, 3]);
        plugged.set_masked(2, false);
        assert_eq!(plugged.msix().1, [0, 2, 3]);
        assert_eq!(plugged.msix().0, if grows { 3 } else { 4 }, "not 64");
        plugged.config(MSIX_CONTROL, 0);
        assert_eq!(plugged.msix(), (0, vec![]));
    }
}

#[test]
fn vectors_that_are_connected_anew_are_raised_once() {
    let plugged = Plugged::new(FakeDevice::new(8));
    plugged.config(MSIX_CONTROL, MSIX_ON);
    plugged.set_masked(0, false);
    plugged.rig.msi.take(0);
    // Within the vectors that the host has reserved.
    plugged.set_masked(0, true);
    plugged.set_masked(0, false);
    assert_eq!(plugged.rig.msi.take(0), 0);
    plugged.set_masked(5, false);
    assert_eq!(plugged.rig.msi.take(0), 1, "perhaps one was lost meanwhile");
}

#[test]
fn a_vector_that_a_server_has_filled_is_raised_anew_without_waiting() {
    let plugged = Plugged::new(FakeDevice::new(8));
    plugged.config(MSIX_CONTROL, MSIX_ON);
    plugged.set_masked(0, false);
    let shared = plugged.device.eventfd(0).unwrap();
    plugged.set_masked(0, true);
    shared.write(u64::MAX - 1).unwrap();
    // SAFETY: a plain call.
    unsafe { libc::fcntl(shared.as_raw_fd(), libc::F_SETFL, 0) };
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        plugged.set_masked(5, false);
        let _ = done.send(plugged);
    });
    let plugged = is_done.recv_timeout(Duration::from_secs(20));
    let plugged = plugged.expect("a vCPU waits in write(irqfd)");
    shared.read().unwrap();
    assert_eq!(plugged.rig.msi.take(0), 0, "it is masked");
    plugged.set_masked(0, false);
    assert_eq!(plugged.rig.msi.take(0), 1, "perhaps one was lost meanwhile");
}

#[test]
fn a_host_without_vectors_leaves_those_that_work() {
    let plugged = Plugged::new(FakeDevice::new(8));
    plugged.config(MSIX_CONTROL, MSIX_ON);
    plugged.set_masked(1, false);
    plugged.device.host_vectors.store(4, Ordering::Relaxed);
    plugged.set_masked(6, false);
    assert_eq!(plugged.msix(), (2, vec![1]));
    plugged.device.host_vectors.store(8, Ordering::Relaxed);
    plugged.set_masked(6, false);
    assert_eq!(plugged.msix().1, [1, 6], "tried again");
}

#[test]
fn interrupts_that_could_not_be_switched_on_are_tried_again() {
    let plugged = Plugged::new(FakeDevice::new(8));
    plugged.device.host_vectors.store(0, Ordering::Relaxed);
    plugged.config(MSI_CONTROL, 1);
    assert_eq!(plugged.device.connected(Irqs::Msi).0, 0);
    plugged.device.host_vectors.store(8, Ordering::Relaxed);
    plugged.config(MSI_CONTROL, 1);
    assert_eq!(plugged.device.connected(Irqs::Msi), (1, vec![0]));
    assert_eq!(plugged.device.connected(Irqs::Line).0, 0);
    // A switch from one kind to the other: the host does not allow both at once.
    plugged.config(MSIX_CONTROL, MSIX_ON);
    assert_eq!(plugged.device.connected(Irqs::Msi).0, 0);
    assert_eq!(plugged.msix().0, 1);
}

#[test]
fn a_guest_without_messages_has_the_interrupt_line() {
    let plugged = Plugged::new(FakeDevice::new(4));
    let line = || plugged.device.connected(Irqs::Line).0;
    assert_eq!(line(), 1);
    let mut pin = [0];
    plugged.rig.config_read_bytes(plugged.bdf, 0x3d, &mut pin);
    assert_eq!(pin, [1]);
    plugged.config(MSIX_CONTROL, MSIX_ON);
    assert_eq!(line(), 0);
    plugged.config(MSIX_CONTROL, 0);
    assert_eq!(line(), 1);
    plugged.rig.segment.reset(plugged.bdf).unwrap();
    assert_eq!(line(), 1);
}

#[test]
fn a_reset_by_the_guest_leaves_registers_as_after_power_on() {
    let plugged = Plugged::new(FakeDevice::new(4));
    plugged.config(MSIX_CONTROL, MSIX_ON);
    plugged.set_masked(0, false);
    let bar = plugged.rig.bar64(plugged.bdf, BarIndex::ZERO);
    plugged.config(DEVICE_CONTROL, 0x8000);
    assert_eq!(plugged.msix(), (0, vec![]));
    assert_eq!(plugged.device.command() & MASTER, 0);
    assert_eq!(plugged.rig.read(bar), u32::MAX, "the BAR is not decoded");
    plugged.rig.reset(plugged.bdf);
    assert_eq!(plugged.rig.config_read(plugged.bdf, 4) & 7, 0);
    assert_eq!(plugged.rig.bar64(plugged.bdf, BarIndex::ZERO), 0);
}

#[test]
fn a_vcpu_does_not_wait_for_a_reset_and_the_device_answers_when_it_is_over() {
    let (plugged, port) = Plugged::behind_port(FakeDevice::new(4));
    let (told, asked) = mpsc::channel();
    let handler = move |at| told.send(at).unwrap();
    plugged.rig.segment.on_reset(Box::new(handler));
    let before = plugged.device.resets.load(Ordering::Relaxed);
    let id = || plugged.rig.config_read(plugged.bdf, 0);
    let vcpu = || {
        plugged.config(DEVICE_CONTROL, 0x8000);
        assert_eq!(id(), u32::MAX, "it does not answer");
        // None of this reaches the device.
        plugged.rig.enable(plugged.bdf, true);
        for command in [2_u16, 6] {
            plugged.rig.config_write(port, 4, &command.to_le_bytes());
        }
    };
    let (rig, bdf) = (&plugged.rig, plugged.bdf);
    let is_under_way = || plugged.device.resetting.load(Ordering::Relaxed);
    thread::scope(|scope| {
        let busy = plugged.device.busy.lock().unwrap();
        let (over, waited) = mpsc::channel();
        let (vcpu, is_under_way) = (&vcpu, &is_under_way);
        scope.spawn(move || {
            vcpu();
            scope.spawn(move || rig.reset(bdf));
            while !is_under_way() {
                thread::yield_now();
            }
            vcpu();
            over.send(()).unwrap();
        });
        let waited = waited.recv_timeout(Duration::from_secs(20));
        drop(busy);
        waited.unwrap();
    });
    assert_eq!(asked.try_iter().collect::<Vec<_>>(), [plugged.bdf]);
    assert_eq!(plugged.device.resets.load(Ordering::Relaxed), before + 1);
    assert_eq!(id(), 0x11e8_1234);
    assert_eq!(plugged.rig.config_read(plugged.bdf, 4) & 7, 0);
    plugged.rig.enable(plugged.bdf, true);
    assert_eq!(plugged.device.command() & MASTER, MASTER);
    // No reset was requested.
    plugged.rig.reset(plugged.bdf);
    assert_eq!(plugged.device.resets.load(Ordering::Relaxed), before + 1);
}

#[test]
fn a_port_that_is_no_bus_master_stops_the_dma_of_what_is_behind_it() {
    let (plugged, port) = Plugged::behind_port(FakeDevice::new(4));
    let master = || plugged.device.command() & MASTER != 0;
    assert!(master());
    let set_port = |command: u16| plugged.rig.config_write(port, 4, &command.to_le_bytes());
    set_port(2);
    assert!(!master());
    // Its own bus master bit is unchanged and has no effect.
    assert_eq!(plugged.rig.config_read(plugged.bdf, 4) & 7, 6);
    plugged.rig.enable(plugged.bdf, true);
    assert!(!master());
    set_port(6);
    assert!(master());
    plugged.rig.enable(plugged.bdf, false);
    set_port(2);
    set_port(6);
    assert!(!master(), "it is none itself");
}

#[test]
fn a_reset_of_its_bus_leaves_a_device_as_after_power_on() {
    let (plugged, port) = Plugged::behind_port(FakeDevice::new(4));
    plugged.config(MSIX_CONTROL, MSIX_ON);
    plugged.set_masked(0, false);
    let bar = plugged.rig.bar64(plugged.bdf, BarIndex::ZERO);
    let before = plugged.device.resets.load(Ordering::Relaxed);
    for control in [0x40_u8, 0] {
        plugged.rig.config_write(port, 0x3e, &[control]);
        assert_eq!(
            plugged.device.command() & MASTER,
            0,
            "its DMA stops at once"
        );
        assert_eq!(plugged.rig.config_read(plugged.bdf, 0), u32::MAX);
        assert_eq!(plugged.rig.read(bar), u32::MAX);
    }
    plugged.rig.reset(port);
    assert_eq!(plugged.device.resets.load(Ordering::Relaxed), before + 1);
    assert_eq!(plugged.msix(), (0, vec![]));
    assert_eq!(plugged.rig.config_read(plugged.bdf, 4) & 7, 0);
    assert_eq!(plugged.rig.bar64(plugged.bdf, BarIndex::ZERO), 0);
    plugged.rig.set_bar64(plugged.bdf, BarIndex::ZERO, bar);
    plugged.rig.enable(plugged.bdf, true);
    assert_eq!(plugged.device.command() & MASTER, MASTER);
    assert_ne!(plugged.rig.read(bar), u32::MAX);
}

#[test]
fn extended_capabilities_are_the_devices_own_where_it_is_the_guests_to_write() {
    let device = FakeDevice::new(4);
    // A serial number, an SR-IOV capability that the guest does not see, and a vendor-specific one.
    let registers = [
        (0x100, 0x1401_0003_u32),
        (0x104, 0x1234_5678),
        (0x140, 0x2001_0010),
        (0x200, 0x0001_000b),
        (0x204, 0x00c0_0000),
        (0x208, 1),
    ];
    for (at, value) in registers {
        device.set_config(at, &value.to_le_bytes());
    }
    let plugged = Plugged::new(device);
    let read = |at| plugged.rig.config_read(plugged.bdf, at);
    assert_eq!(
        [0x100, 0x104, 0x140].map(read),
        [0x2001_0003, 0x1234_5678, 0]
    );
    assert_eq!(
        [0x200, 0x204, 0x208].map(read),
        [0x0001_000b, 0x00c0_0000, 1]
    );
    for at in [0x100, 0x104, 0x140, 0x144, 0x200, 0x208, 0x20c] {
        plugged.rig.config_write(plugged.bdf, at, &[0xff; 4]);
    }
    assert_eq!(
        [0x100, 0x104, 0x140].map(read),
        [0x2001_0003, 0x1234_5678, 0]
    );
    assert_eq!([0x200, 0x208, 0x20c].map(read), [0x0001_000b, u32::MAX, 0]);
    let mut physical = [0; 4];
    for (at, value) in [(0x144, 0), (0x208, u32::MAX), (0x20c, 0)] {
        super::Device::read_config(&*plugged.device, at, &mut physical);
        assert_eq!(u32::from_le_bytes(physical), value, "{at:#x}");
    }
}

#[test]
fn a_device_is_reset_when_it_comes_and_when_it_goes() {
    let plugged = Plugged::new(FakeDevice::new(4));
    let device = Arc::clone(&plugged.device);
    assert_eq!(device.resets.load(Ordering::Relaxed), 1);
    plugged.config(MSIX_CONTROL, MSIX_ON);
    plugged.rig.segment.unplug(plugged.bdf).unwrap();
    assert_eq!(device.resets.load(Ordering::Relaxed), 2);
    for irqs in [Irqs::Line, Irqs::Msi, Irqs::Msix] {
        assert_eq!(device.connected(irqs).0, 0);
    }
    assert_eq!(device.command() & MASTER, 0);
}

#[test]
fn a_device_that_cannot_be_reset_can_be_used_all_the_same() {
    let device = FakeDevice::new(4);
    device.stubborn.store(true, Ordering::Relaxed);
    let plugged = Plugged::new(device);
    plugged.rig.segment.reset(plugged.bdf).unwrap();
    assert_eq!(plugged.device.command() & MASTER, 0);
}

#[test]
fn the_rom_is_there_while_the_guest_enables_it_and_stays_as_it_is() {
    let plugged = Plugged::new(FakeDevice::new(4));
    let register = || plugged.rig.config_read(plugged.bdf, 0x30);
    let address = register();
    assert!(address > 0 && address & 0xfff == 0, "placed, and off");
    let read = || plugged.rig.read(address.into());
    assert_eq!(read(), u32::MAX);
    let set = |value: u32| {
        plugged
            .rig
            .config_write(plugged.bdf, 0x30, &value.to_le_bytes());
    };
    set(!0x7ff);
    assert_eq!(register(), 0xffff_f000, "its size");
    set(address | 1);
    assert_eq!(read(), 0x5a5a_5a5a);
    plugged.rig.write(address.into(), &[0; 4]);
    assert_eq!(read(), 0x5a5a_5a5a);
    plugged.rig.enable(plugged.bdf, false);
    assert_eq!(read(), u32::MAX, "memory is off");
}
