//! Slots with several functions, and functions behind root ports.

use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use serde_json::Value;

use super::{
    BarIndex, BarKind, Bdf, PciError, PciFunction, PciSegment, RootPort, Seat, SegmentConfig,
    tests::{MEMORY32, MEMORY64, Plain, tag_at},
};
use crate::testing::{PORT_WINDOWS, Rig};

const BAR: BarIndex = BarIndex::ZERO;
const HEADER: u16 = 0x0c;
const MULTIFUNCTION: u32 = 0x80_0000;
const BUSES: u16 = 0x18;
const MEMORY: u16 = 0x20;
const CONTROL: u16 = 0x3e;

fn plug(rig: &Rig, function: impl PciFunction + 'static, seat: Seat) -> Result<Bdf, PciError> {
    let function = Arc::new(Mutex::new(function));
    rig.segment.plug(function, seat, &[])
}

fn behind(bus: u8, function: u8) -> Seat {
    Seat {
        bus,
        device: None,
        function,
    }
}

/// A forwarding port in slot 4, with two functions behind it.
fn topology() -> (Rig, Bdf, [Bdf; 2]) {
    let rig = Rig::new();
    let port = plug(&rig, RootPort::new(), Seat::slot(4)).unwrap();
    let bars = [(0, MEMORY64, 0x1000), (2, MEMORY32, 0x1000)];
    let functions = [0, 1].map(|function| {
        let plain = Plain::new(function + 1, &bars);
        plug(&rig, plain, behind(1, function)).unwrap()
    });
    for bdf in [port, functions[0], functions[1]] {
        rig.enable(bdf, true);
    }
    (rig, port, functions)
}

#[test]
fn functions_of_a_slot_say_that_there_are_others() {
    let rig = Rig::new();
    let seat = |function| Seat {
        function,
        ..Seat::slot(9)
    };
    let zero = plug(&rig, Plain::new(1, &[]), seat(0)).unwrap();
    assert_eq!(rig.config_read(zero, HEADER) & MULTIFUNCTION, 0);
    let five = plug(&rig, Plain::new(2, &[]), seat(5)).unwrap();
    assert_eq!(five.to_string(), "0000:00:09.5");
    for bdf in [zero, five] {
        assert_eq!(rig.config_read(bdf, HEADER) & MULTIFUNCTION, MULTIFUNCTION);
        let mut byte = [0];
        rig.config_read_bytes(bdf, HEADER + 2, &mut byte);
        assert_eq!(byte, [0x80]);
    }
    assert_eq!(rig.config_read(five, 0), 0x0002_1234);
    let absent = Bdf {
        function: 1,
        ..zero
    };
    assert_eq!(rig.config_read(absent, 0), u32::MAX);
    assert!(matches!(
        plug(&rig, Plain::new(3, &[]), seat(5)),
        Err(PciError::SlotTaken(_))
    ));
    assert!(matches!(
        plug(&rig, Plain::new(3, &[]), seat(8)),
        Err(PciError::InvalidFunction { function: 8 })
    ));
    let somewhere = Seat {
        function: 1,
        ..Seat::ANY
    };
    assert!(matches!(
        plug(&rig, Plain::new(3, &[]), somewhere),
        Err(PciError::NoDevice { function: 1 })
    ));
    let next = plug(&rig, Plain::new(3, &[]), Seat::ANY).unwrap();
    assert_eq!(next.device, 1, "a slot in which nothing is");
    rig.segment.unplug(five).unwrap();
    assert_eq!(rig.config_read(zero, HEADER) & MULTIFUNCTION, 0);
}

#[test]
fn functions_are_found_in_any_segment() {
    let rig = Rig::new();
    let config = SegmentConfig {
        segment: 3,
        ..rig.segment.config().clone()
    };
    let segment = PciSegment::new(config, Arc::clone(&rig.mmio), Arc::clone(&rig.pio));
    let plug = |function: Plain, seat| {
        let function = Arc::new(Mutex::new(function));
        segment.plug(function, seat, &[]).unwrap()
    };
    segment
        .plug(Arc::new(Mutex::new(RootPort::new())), Seat::ANY, &[])
        .unwrap();
    for (tag, function) in [(1, 0), (2, 6)] {
        let bdf = plug(Plain::new(tag, &[]), behind(1, function));
        assert_eq!(bdf.to_string(), format!("0003:01:00.{function}"));
    }
    // Configuration accesses carry no segment number.
    let read = |function, offset| {
        let at = Bdf {
            segment: 0,
            bus: 1,
            device: 0,
            function,
        };
        let mut data = [0; 4];
        segment.read_config(at, offset, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!([read(0, 0), read(6, 0)], [0x0001_1234, 0x0002_1234]);
    for function in [0, 6] {
        assert_eq!(read(function, HEADER.into()) & MULTIFUNCTION, MULTIFUNCTION);
    }
}

#[test]
fn a_port_starts_with_a_bus_and_windows() {
    let (rig, port, [zero, one]) = topology();
    assert_eq!(rig.config_read(port, HEADER) >> 16 & 0xff, 1, "a bridge");
    assert_eq!(rig.config_read(port, BUSES), 0x0001_0100);
    assert_eq!(rig.config_read(port, MEMORY), 0xd7f0_d000);
    assert_eq!([zero, one].map(|bdf| bdf.bus), [1, 1]);
    let windows = PORT_WINDOWS[0];
    for (tag, bdf) in [(1, zero), (2, one)] {
        let high = rig.bar64(bdf, BAR);
        let low = u64::from(rig.config_read(bdf, 0x18));
        assert!(windows.mmio64.unwrap().contains(high, 0x1000));
        assert!(windows.mmio32.unwrap().contains(low, 0x1000));
        assert_eq!([tag_at(&rig, high), tag_at(&rig, low)], [tag; 2]);
        assert_eq!(rig.config_read(bdf, HEADER) & MULTIFUNCTION, MULTIFUNCTION);
    }
    let second = plug(&rig, RootPort::new(), Seat::ANY).unwrap();
    assert_eq!(rig.config_read(second, BUSES) >> 8 & 0xff, 2);
    assert!(matches!(
        plug(&rig, RootPort::new(), Seat::ANY),
        Err(PciError::NoPort(0))
    ));
    assert_eq!(rig.segment.ports(), [(second, 2), (port, 1)]);
}

#[test]
fn a_port_gets_a_bus_that_no_other_has() {
    let rig = Rig::new();
    let bus = |port| rig.config_read(port, BUSES) >> 8 & 0xff;
    let [first, second] = [4, 5].map(|slot| plug(&rig, RootPort::new(), Seat::slot(slot)).unwrap());
    assert_eq!([first, second].map(bus), [1, 2]);
    rig.segment.unplug(first).unwrap();
    let third = plug(&rig, RootPort::new(), Seat::slot(6)).unwrap();
    assert_eq!([second, third].map(bus), [2, 1]);
}

#[test]
fn there_is_one_slot_behind_a_port_and_none_without() {
    let (rig, ..) = topology();
    let seat = |bus, device| Seat {
        bus,
        device: Some(device),
        function: 2,
    };
    assert!(matches!(
        plug(&rig, Plain::new(3, &[]), seat(1, 1)),
        Err(PciError::BehindPort { slot: 1 })
    ));
    assert!(matches!(
        plug(&rig, Plain::new(3, &[]), seat(2, 0)),
        Err(PciError::NoBus { bus: 2, .. })
    ));
    plug(&rig, Plain::new(3, &[]), seat(1, 0)).unwrap();
}

#[test]
fn bars_on_bus_0_stay_out_of_the_windows_of_ports() {
    let rig = Rig::new();
    let windows = PORT_WINDOWS;
    for tag in 0..8 {
        // Half a TiB of the two that do not belong to a port.
        let bars = [(0, MEMORY64, 1 << 39), (2, MEMORY32, 1 << 26)];
        let Ok(bdf) = plug(&rig, Plain::new(tag, &bars), Seat::ANY) else {
            assert!(tag > 2);
            return;
        };
        let places = [rig.bar64(bdf, BAR), u64::from(rig.config_read(bdf, 0x18))];
        for at in places {
            let is_in = |window: Option<super::Window>| window.unwrap().contains(at, 1);
            assert!(
                !windows
                    .iter()
                    .any(|port| is_in(port.mmio32) || is_in(port.mmio64))
            );
        }
    }
    panic!("there was room for all");
}

#[test]
fn what_a_port_does_not_forward_is_not_decoded() {
    let (rig, port, [zero, one]) = topology();
    let at = [zero, one].map(|bdf| rig.bar64(bdf, BAR));
    let low = u64::from(rig.config_read(one, 0x18));
    rig.enable(port, false);
    assert_eq!(at.map(|at| tag_at(&rig, at)), [0xff; 2]);
    rig.enable(port, true);
    assert_eq!(at.map(|at| tag_at(&rig, at)), [1, 2]);
    // A window for 32-bit memory that begins after the BARs.
    rig.config_write(port, MEMORY, &0xd7f0_d400_u32.to_le_bytes());
    assert_eq!(tag_at(&rig, low), 0xff);
    rig.config_write(one, 0x18, &0xd400_0000_u32.to_le_bytes());
    assert_eq!(tag_at(&rig, 0xd400_0000), 2);
    // Windows that end before they begin.
    for register in [MEMORY, MEMORY + 4] {
        rig.config_write(port, register, &0x0000_fff0_u32.to_le_bytes());
    }
    rig.config_write(port, 0x2c, &[0; 4]);
    assert_eq!(tag_at(&rig, 0xd400_0000), 0xff);
    assert_eq!(at.map(|at| tag_at(&rig, at)), [0xff; 2]);
    // The power-on state.
    rig.segment.reset(port).unwrap();
    assert_eq!(rig.config_read(port, MEMORY), 0xd7f0_d000);
    assert_eq!(at.map(|at| tag_at(&rig, at)), [0xff; 2]);
    rig.enable(port, true);
    assert_eq!(at.map(|at| tag_at(&rig, at)), [1, 2]);
}

#[test]
fn a_bus_that_the_guest_resets_comes_back_when_what_is_on_it_has_been_reset() {
    let (rig, port, functions) = topology();
    let resets = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&resets);
    let handler = move |port| log.lock().unwrap().push(port);
    rig.segment.on_reset(Box::new(handler));
    let at = functions.map(|bdf| rig.bar64(bdf, BAR));
    let is_there = || functions.map(|bdf| rig.config_read(bdf, 0) != u32::MAX);
    let hold = |held: bool| rig.config_write(port, CONTROL, &[u8::from(held) << 6]);
    for _ in 0..3 {
        hold(true);
        hold(false);
    }
    assert_eq!(*resets.lock().unwrap(), [port], "one reset, and no more");
    assert_eq!(is_there(), [false; 2]);
    assert_eq!(at.map(|at| tag_at(&rig, at)), [0xff; 2]);
    // A function that is plugged in now does not respond before the others.
    plug(&rig, Plain::new(3, &[]), behind(1, 2)).unwrap();
    rig.reset(port);
    assert_eq!(is_there(), [true; 2]);
    for bdf in functions {
        assert_eq!(rig.config_read(bdf, 4) & 7, 0);
        assert_eq!(rig.bar64(bdf, BAR), 0);
    }
    // While the guest holds the bit, it is a single reset.
    rig.enable(functions[0], true);
    hold(true);
    rig.reset(port);
    assert_eq!(is_there(), [false; 2]);
    hold(false);
    assert_eq!(is_there(), [true; 2]);
    assert_eq!(*resets.lock().unwrap(), [port; 2]);
    // No reset has been requested.
    rig.enable(functions[0], true);
    rig.reset(port);
    rig.reset(functions[0]);
    assert_eq!(rig.config_read(functions[0], 4) & 7, 7 & !1);
}

#[test]
fn a_guest_that_ends_a_reset_does_not_wait_for_it() {
    let rig = Rig::new();
    let port = plug(&rig, RootPort::new(), Seat::slot(4)).unwrap();
    let bars = [(0, MEMORY64, 0x1000)];
    let function = Arc::new(Mutex::new(Plain::new(1, &bars)));
    let bdf = rig
        .segment
        .plug(Arc::clone(&function) as _, behind(1, 0), &[])
        .unwrap();
    rig.enable(port, true);
    rig.enable(bdf, true);
    let hold = |held: bool| rig.config_write(port, CONTROL, &[u8::from(held) << 6]);
    hold(true);
    thread::scope(|scope| {
        // As during a reset of it.
        let being_reset = function.lock().unwrap();
        let (told, done) = mpsc::channel();
        scope.spawn(move || {
            hold(false);
            hold(true);
            hold(false);
            told.send(()).unwrap();
        });
        let waited = done.recv_timeout(Duration::from_secs(20));
        drop(being_reset);
        waited.unwrap();
    });
    rig.reset(port);
    assert_ne!(rig.config_read(bdf, 0), u32::MAX);
}

#[test]
fn a_guest_may_number_its_buses_itself() {
    let (rig, port, [zero, one]) = topology();
    rig.config_write(port, BUSES, &0x0002_0200_u32.to_le_bytes());
    assert_eq!(rig.config_read(zero, 0), u32::MAX, "bus 1 is gone");
    let called = Bdf { bus: 2, ..one };
    assert_eq!(rig.config_read(called, 0), 0x0002_1234);
    assert_eq!(
        rig.config_read(called, HEADER) & MULTIFUNCTION,
        MULTIFUNCTION
    );
    rig.config_write(called, 4, &[0, 0]);
    assert_eq!(tag_at(&rig, rig.bar64(called, BAR)), 0xff);
    for bus in [0, 255] {
        rig.config_write(port, BUSES + 1, &[bus]);
        assert_eq!(rig.config_read(called, 0), u32::MAX);
    }
    // In the VMM's numbering it is where it was.
    assert_eq!(
        rig.segment
            .unplug(one)
            .unwrap()
            .lock()
            .unwrap()
            .config()
            .command(),
        0
    );
}

#[test]
fn ports_answer_odd_accesses() {
    let (rig, port, _) = topology();
    for offset in 0..0x100 {
        for len in [1, 2, 3, 4, 8] {
            let mut data = [0; 8];
            rig.config_write(port, offset, &[0xff; 8][..len]);
            rig.config_read_bytes(port, offset, &mut data[..len]);
        }
    }
    assert_eq!(rig.config_read(port, 0), 0x000c_1b36);
    assert_eq!(rig.config_read(port, HEADER) >> 16 & 0xff, 1);
    assert_eq!(rig.config_read(port, 0x1c) & 0xffff, 0xf0f0);
}

#[test]
fn a_saved_port_forwards_what_it_did() {
    let (rig, port, [zero, _]) = topology();
    let high = rig.bar64(zero, BAR);
    rig.config_write(port, BUSES, &0x0002_0200_u32.to_le_bytes());
    let save = |bdf| {
        let function = rig.segment.function(bdf).unwrap();
        function.lock().unwrap().save().unwrap()
    };
    let saved = [port, zero].map(save);
    let target = Rig::new();
    let restore = |function: Arc<Mutex<dyn PciFunction>>, bdf, state: &Value| {
        target
            .segment
            .plug_saved(function, Seat::from(bdf), state.clone())
            .unwrap()
    };
    restore(Arc::new(Mutex::new(RootPort::new())), port, &saved[0]);
    let bars = [(0, MEMORY64, 0x1000), (2, MEMORY32, 0x1000)];
    restore(Arc::new(Mutex::new(Plain::new(9, &bars))), zero, &saved[1]);
    assert_eq!(tag_at(&target, high), 9);
    let called = Bdf { bus: 2, ..zero };
    assert_eq!(target.config_read(called, 0), 0x0009_1234);
}

#[test]
fn a_device_has_io_ports_behind_a_port_that_forwards_some() {
    let rig = Rig::new();
    let ports = [4, 5].map(|slot| plug(&rig, RootPort::new(), Seat::slot(slot)).unwrap());
    let bars = [(0, BarKind::Io, 0x20)];
    let [with, without] = [1, 2].map(|bus| {
        let bdf = plug(&rig, Plain::new(bus, &bars), behind(bus, 0)).unwrap();
        rig.enable(bdf, true);
        bdf
    });
    assert_eq!(rig.config_read(without, 0x10), 1);
    assert_eq!(rig.config_read(with, 0x10), 0xf001);
    let answers = |port| {
        let mut data = [0xff];
        rig.pio.read(port, &mut data);
        data == [1]
    };
    assert!(!answers(0xf000), "the port forwards nothing yet");
    rig.enable(ports[0], true);
    assert!(answers(0xf000));
    // First a window of other ports, then the device moves, too.
    rig.config_write(ports[0], 0x1c, &[0x80, 0x90]);
    assert!(!answers(0xf000));
    rig.config_write(with, 0x10, &0x9fe0_u32.to_le_bytes());
    assert!(answers(0x9fe0));
    // Memory decoding only.
    rig.config_write(ports[0], 4, &[6]);
    assert!(!answers(0x9fe0));
    let bus_0 = plug(&rig, Plain::new(3, &bars), Seat::ANY).unwrap();
    assert_eq!(rig.config_read(bus_0, 0x10), 0x1001);
}
