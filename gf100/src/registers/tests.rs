//! Uses registers as a driver does.

use proptest::prelude::*;

use super::*;
use crate::format::{Gfn, VramPage};

/// The effects that registers caused.
#[derive(Default)]
struct Seen {
    calls: Vec<String>,
}

impl Effects for Seen {
    fn window_read(&mut self, at: u64) -> u32 {
        self.calls.push(format!("read {at:#x}"));
        7
    }
    fn window_write(&mut self, at: u64, value: u32) {
        self.calls.push(format!("write {at:#x} {value:#x}"));
    }
    fn window_base(&mut self, at: u64) {
        self.calls.push(format!("base {at:#x}"));
    }
    fn bar(&mut self, bar: Bar, instance: Option<Target>) {
        self.calls.push(format!("{bar:?} {instance:?}"));
    }
    fn flush(&mut self, flush: Flush) {
        self.calls.push(format!("{flush:?}"));
    }
    fn pending_flushes(&self) -> u8 {
        0
    }
    fn has_pending_run_list(&self) -> bool {
        false
    }
    fn bar_flush(&mut self) {
        self.calls.push("bar flush".to_owned());
    }
    fn user_window(&mut self, window: Option<Window>) {
        self.calls.push(format!("{window:?}"));
    }
    fn channel(&mut self, channel: u8, entry: ChannelEntry) {
        self.calls.push(format!("{channel} {entry:?}"));
    }
    fn run_list(&mut self, list: RunList) {
        self.calls.push(format!("{list:?}"));
    }
    fn kick(&mut self, channel: u8) {
        self.calls.push(format!("kick {channel}"));
    }
    fn command_error_seen(&mut self) {
        self.calls.push("seen".to_owned());
    }
}

fn registers() -> (Registers, Seen) {
    (Registers::new(256 << 20, 0), Seen::default())
}

#[test]
fn the_chip_names_itself_and_its_memory() {
    let (mut registers, mut seen) = registers();
    assert_eq!(registers.read(0, 0, &mut seen) >> 20 & 0x1ff, 0xc0);
    assert_eq!(registers.read(0x11_020c, 0, &mut seen), 256);
    assert_eq!(registers.read(prom::START, 0, &mut seen) & 0xffff, 0xaa55);
}

#[test]
fn the_window_shows_memory_at_its_base() {
    let (mut registers, mut seen) = registers();
    registers.write(0x00_1700, 0xff0, 0, &mut seen);
    registers.write(0x70_0010, 3, 0, &mut seen);
    assert_eq!(registers.read(0x70_0014, 0, &mut seen), 7);
    assert_eq!(
        seen.calls,
        ["base 0xff00000", "write 0xff00010 0x3", "read 0xff00014"]
    );
}

#[test]
fn a_flush_names_its_space() {
    let (mut registers, mut seen) = registers();
    registers.write(0x10_0cb8, 0x123 << 4 | 2, 0, &mut seen);
    registers.write(0x10_0cbc, 1 << 31 | 1, 0, &mut seen);
    registers.write(0x10_0cbc, 1 << 31 | 7, 0, &mut seen);
    let of = |directory, hub_only| {
        format!(
            "{:?}",
            Flush {
                directory,
                hub_only
            }
        )
    };
    let one = Some(Target::Ram(Gfn(0x123)));
    assert_eq!(seen.calls, [of(one, false), of(None, true)]);
}

#[test]
fn a_run_list_is_taken_and_tells_so() {
    let (mut registers, mut seen) = registers();
    registers.write(0x00_0140, 1, 0, &mut seen);
    registers.write(0x00_2140, 1 << 30, 0, &mut seen);
    registers.write(0x00_2270, 0x55, 0, &mut seen);
    assert!(!registers.line(0));
    registers.write(0x00_2274, 0x01f0_0003, 0, &mut seen);
    let at = Target::Vram(VramPage(0x55));
    assert_eq!(seen.calls, [format!("{:?}", RunList { at, count: 3 })]);
    assert!(registers.line(0));
    assert_eq!(registers.read(0x00_0100, 0, &mut seen), 1 << 8);
    registers.write(0x00_2a00, 1 << 28, 0, &mut seen);
    assert!(!registers.line(0));
}

#[test]
fn a_fault_is_told_until_it_is_seen() {
    let (mut registers, mut seen) = registers();
    registers.write(0x00_0140, 1, 0, &mut seen);
    registers.write(0x00_2140, u32::MAX, 0, &mut seen);
    registers.interrupts.fault(Fault {
        unit: interrupts::unit::COPY0,
        instance: 0x77,
        address: 0x12_3456_7000,
        write: true,
        reason: interrupts::Reason::NoPage,
    });
    assert!(registers.line(0));
    assert_eq!(registers.read(0x00_259c, 0, &mut seen), 1 << 0x15);
    let words = [0, 4, 8, 12].map(|at| registers.read(0x00_2950 + at, 0, &mut seen));
    assert_eq!(words, [0x77, 0x3456_7000, 0x12, 0xc2]);
    registers.write(0x00_259c, 1 << 0x15, 0, &mut seen);
    assert!(!registers.line(0));
}

#[test]
fn each_fault_of_a_unit_is_told_after_the_one_before_was_seen() {
    let (mut registers, mut seen) = registers();
    for (unit, instance) in [(0, 1), (7, 2), (0, 3), (0, 4)] {
        registers.interrupts.fault(Fault {
            unit,
            instance,
            address: 0,
            write: false,
            reason: interrupts::Reason::NoPage,
        });
    }
    // Of a BAR, as many as a guest likes.
    for _ in 0..1000 {
        registers.interrupts.fault(Fault {
            unit: interrupts::unit::BAR1,
            instance: 0,
            address: 0,
            write: true,
            reason: interrupts::Reason::NoPage,
        });
    }
    registers.write(0x00_259c, 1 << 4, 0, &mut seen);
    registers.interrupts.fault(Fault {
        unit: 7,
        instance: 5,
        address: 0,
        write: false,
        reason: interrupts::Reason::NoPage,
    });
    let mut told = |unit: u32| registers.read(0x00_2800 + 16 * unit, 0, &mut seen);
    assert_eq!((told(0), told(7)), (1, 2));
    registers.write(0x00_259c, 1 << 7, 0, &mut seen);
    assert_eq!(registers.read(0x00_2870, 0, &mut seen), 5);
    for (left, instance) in [(0x81, 3), (0x81, 4), (0x80, 4)] {
        registers.write(0x00_259c, 1, 0, &mut seen);
        assert_eq!(registers.read(0x00_259c, 0, &mut seen), left);
        assert_eq!(registers.read(0x00_2800, 0, &mut seen), instance);
    }
}

proptest! {
    #[test]
    fn no_access_panics(accesses: Vec<(bool, u32, u32, u64)>) {
        let (mut registers, mut seen) = registers();
        for (write, at, value, now) in accesses {
            match write {
                true => registers.write(at, value, now, &mut seen),
                false => { registers.read(at, now, &mut seen); }
            }
            registers.line(now);
        }
    }
}

proptest! {
    #[test]
    fn plain_registers_contain_the_same_until_they_are_written(
        steps in prop::collection::vec(
            (
                prop_oneof![
                    0_u32..0x10_0000,
                    prop::sample::select(vec![
                        0x10_0c80, 0x10_0cbc, 0x07_0000, 0x40_4170, 0x02_2500, 0x30_0000, 0x00_2634,
                        0x00_2270, 0x00_2274, 0x00_1700, 0x00_1704, 0x00_2100, 0x04_0108, 0x10_a1c4,
                    ]),
                    0_u32..BAR0_BYTES,
                ],
                any::<u32>(),
                any::<bool>(),
            ),
            1..60,
        ),
    ) {
        let (mut registers, mut seen) = registers();
        let mut contents: std::collections::BTreeMap<_, _> = registers.plain_values().collect();
        for (nth, (at, value, writes)) in steps.iter().enumerate() {
            let (at, now) = (at & !3, nth as u64 * 1000);
            if *writes {
                registers.write(at, *value, now, &mut seen);
                if is_plain(at) {
                    contents.insert(at, registers.read(at, now, &mut seen));
                }
            } else {
                registers.read(at, now, &mut seen);
            }
        }
        for (at, _, _) in steps.iter().filter(|(at, _, _)| is_plain(*at)) {
            contents.entry(at & !3).or_insert(0);
        }
        for (at, value) in contents {
            prop_assert_eq!(registers.read(at, 1 << 40, &mut seen), value, "{:#x}", at);
        }
    }
}

#[test]
fn what_is_plain_is_known_after_power_on() {
    let (mut registers, mut seen) = registers();
    let contents: std::collections::BTreeMap<_, _> = registers.plain_values().collect();
    for page in (0..BAR0_BYTES).step_by(0x1000).filter(|at| is_plain(*at)) {
        for at in (page..page + 0x1000).step_by(4) {
            let known = contents.get(&at).copied().unwrap_or(0);
            assert_eq!(registers.read(at, 7, &mut seen), known, "{at:#x}");
        }
    }
}

proptest! {
    #[test]
    fn quiet_registers_contain_what_was_written_and_nothing_else_happens(
        at in 0_u32..BAR0_BYTES,
        value: u32,
    ) {
        let (mut registers, mut seen) = registers();
        let at = at & !3;
        if is_quiet(at) {
            prop_assert!(is_plain(at));
            registers.write(at, value, 0, &mut seen);
            prop_assert_eq!(registers.read(at, 0, &mut seen), value);
            prop_assert!(seen.calls.is_empty());
            prop_assert!(!registers.line(0));
        }
    }
}

#[test]
fn quiet_pages_have_no_register_that_does_something() {
    for page in (0..BAR0_BYTES).step_by(0x1000).filter(|at| is_quiet(*at)) {
        let (mut registers, mut seen) = registers();
        for at in (page..page + 0x1000).step_by(4) {
            registers.write(at, u32::MAX, 0, &mut seen);
        }
        for at in (page..page + 0x1000).step_by(4) {
            assert_eq!(registers.read(at, 0, &mut seen), u32::MAX, "{at:#x}");
        }
        assert!(seen.calls.is_empty(), "{:?}", seen.calls);
    }
}
