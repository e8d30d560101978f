//! Configuration space and segments from the guest's perspective.

use std::sync::{Arc, Mutex};

use device_model::bus::BusDevice;
use proptest::prelude::*;
use serde_json::Value;

use super::{
    BarAddress, BarIndex, BarKind, BarRequest, Bdf, ConfigError, ConfigSpace, HostBridge, Identity,
    LifecycleError, PciError, PciFunction, PciSegment, Seat, SegmentConfig,
};
use crate::testing::{MMIO32, MMIO64, PORTS, Rig};

const BAR: BarIndex = BarIndex::ZERO;
pub const MEMORY64: BarKind = BarKind::Memory64 { prefetchable: true };
pub const MEMORY32: BarKind = BarKind::Memory32 {
    prefetchable: false,
};

/// Responds to every read with a tag.
struct Tag(u8);

impl BusDevice for Tag {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(self.0);
    }
    fn write(&self, _offset: u64, _data: &[u8]) {}
}

/// A function with BARs and no other features.
pub struct Plain {
    config: ConfigSpace,
    tag: u8,
    moves: Arc<Mutex<Vec<Option<u64>>>>,
}

impl Plain {
    pub fn new(tag: u8, bars: &[(u8, BarKind, u64)]) -> Self {
        let mut config = ConfigSpace::new(Identity {
            vendor: 0x1234,
            device: u16::from(tag),
            ..Identity::default()
        });
        for &(index, kind, size) in bars {
            let index = BarIndex::new(index).unwrap();
            config.add_bar(BarRequest { index, kind, size }).unwrap();
        }
        Self {
            config,
            tag,
            moves: Arc::default(),
        }
    }
}

impl PciFunction for Plain {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }
    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }
    fn bar_device(&self, _index: BarIndex) -> Option<Arc<dyn BusDevice>> {
        Some(Arc::new(Tag(self.tag)))
    }
    fn bar_mapped(&mut self, _index: BarIndex, address: Option<u64>) {
        self.moves.lock().unwrap().push(address);
    }
    fn save(&mut self) -> Result<Value, LifecycleError> {
        Ok(serde_json::to_value(self.config.save())?)
    }
    fn restore(&mut self, state: Value) -> Result<(), LifecycleError> {
        Ok(self.config.restore(&serde_json::from_value(state)?)?)
    }
    fn reset(&mut self) -> Result<(), LifecycleError> {
        self.config.reset();
        Ok(())
    }
}

pub fn tag_at(rig: &Rig, address: u64) -> u8 {
    rig.read(address) as u8
}

#[test]
fn ones_written_to_a_bar_read_back_as_its_size() {
    let rig = Rig::new();
    let function = Plain::new(
        1,
        &[
            (0, MEMORY64, 1 << 40),
            (2, MEMORY32, 0x1000),
            (3, BarKind::Io, 0x20),
        ],
    );
    let bdf = rig.plug(function);
    let size = |register: u16| {
        let before = rig.config_read(bdf, register);
        rig.config_write(bdf, register, &[0xff; 4]);
        let size = rig.config_read(bdf, register);
        rig.config_write(bdf, register, &before.to_le_bytes());
        assert_eq!(rig.config_read(bdf, register), before);
        size
    };
    assert_eq!((size(0x10), size(0x14)), (0xc, 0xffff_ff00));
    assert_eq!(size(0x18), 0xffff_f000);
    assert_eq!(size(0x1c), 0xffff_ffe1);
    assert_eq!((size(0x20), size(0x24), size(0x30)), (0, 0, 0));
}

#[test]
fn bars_get_aligned_addresses_in_their_windows_and_decode_once_enabled() {
    let rig = Rig::new();
    let bars = [
        (0, MEMORY64, 1 << 40),
        (2, MEMORY32, 0x100),
        (3, BarKind::Io, 0x20),
    ];
    let bdf = rig.plug(Plain::new(1, &bars));
    let high = rig.bar64(bdf, BAR);
    let low = u64::from(rig.config_read(bdf, 0x18));
    let port = u64::from(rig.config_read(bdf, 0x1c) & !3);
    assert!(high >= MMIO64.first && high + (1 << 40) - 1 <= MMIO64.last);
    assert_eq!(high % (1 << 40), 0);
    assert!((MMIO32.first..=MMIO32.last).contains(&low));
    assert!((PORTS.first..=PORTS.last).contains(&port));
    assert_eq!(tag_at(&rig, high), 0xff, "not enabled yet");
    rig.enable(bdf, true);
    assert_eq!((tag_at(&rig, high), tag_at(&rig, low)), (1, 1));
    let mut byte = [0];
    assert!(rig.pio.read(port, &mut byte));
    rig.enable(bdf, false);
    assert_eq!((tag_at(&rig, high), tag_at(&rig, low)), (0xff, 0xff));
    assert!(!rig.pio.read(port, &mut byte));
}

#[test]
fn a_moved_bar_leaves_nothing_behind() {
    let rig = Rig::new();
    let function = Plain::new(1, &[(0, MEMORY64, 0x1000)]);
    let moves = Arc::clone(&function.moves);
    let bdf = rig.plug(function);
    rig.enable(bdf, true);
    let (from, to) = (rig.bar64(bdf, BAR), MMIO64.first + 0x10_0000);
    rig.set_bar64(bdf, BAR, to);
    assert_eq!((tag_at(&rig, from), tag_at(&rig, to)), (0xff, 1));
    let moves = moves.lock().unwrap();
    assert_eq!(moves.first(), Some(&Some(from)));
    assert_eq!(moves.last(), Some(&Some(to)));
    assert!(moves.iter().filter(|at| at.is_some()).count() == moves.len().div_ceil(2));
}

#[test]
fn a_bar_over_another_one_waits_until_that_one_moves_away() {
    let rig = Rig::new();
    let one = rig.plug(Plain::new(1, &[(0, MEMORY64, 0x1000)]));
    let two = rig.plug(Plain::new(2, &[(0, MEMORY64, 0x1000)]));
    rig.enable(one, true);
    rig.enable(two, true);
    let (first, second) = (rig.bar64(one, BAR), rig.bar64(two, BAR));
    rig.set_bar64(two, BAR, first);
    assert_eq!(tag_at(&rig, first), 1, "the older one stays");
    assert_eq!(tag_at(&rig, second), 0xff);
    rig.set_bar64(one, BAR, second);
    assert_eq!((tag_at(&rig, first), tag_at(&rig, second)), (2, 1));
}

#[test]
fn a_bar_outside_of_the_windows_is_not_decoded() {
    let rig = Rig::new();
    let bdf = rig.plug(Plain::new(1, &[(0, MEMORY64, 0x1000), (2, BarKind::Io, 8)]));
    rig.enable(bdf, true);
    for address in [0, 0x1000, MMIO64.last + 1, u64::MAX - 0xfff, 0xe000_0000] {
        rig.set_bar64(bdf, BAR, address);
        assert_ne!(tag_at(&rig, address), 1, "{address:#x}");
    }
    rig.config_write(bdf, 0x18, &0xcf8u32.to_le_bytes());
    assert_eq!(rig.config_read(bdf, 0), 0x0001_1234, "still there");
}

#[test]
fn unplugging_frees_slot_and_addresses() {
    let rig = Rig::new();
    let bars = [(0, MEMORY64, 1 << 40)];
    let bdf = rig.plug(Plain::new(1, &bars));
    let address = rig.bar64(bdf, BAR);
    rig.enable(bdf, true);
    rig.segment.unplug(bdf).unwrap();
    assert_eq!(tag_at(&rig, address), 0xff);
    assert!(matches!(
        rig.segment.unplug(bdf),
        Err(PciError::NoFunction(_))
    ));
    let again = rig.plug(Plain::new(2, &bars));
    assert_eq!((again, rig.bar64(again, BAR)), (bdf, address));
}

#[test]
fn new_bars_keep_clear_of_where_the_guest_moved_others() {
    let rig = Rig::new();
    let one = rig.plug(Plain::new(1, &[(0, MEMORY64, 0x1000)]));
    rig.set_bar64(one, BAR, MMIO64.first + 0x1000);
    let two = rig.plug(Plain::new(2, &[(0, MEMORY64, 0x1000)]));
    assert_eq!(rig.bar64(two, BAR), MMIO64.first + 0x2000);
}

#[test]
fn slots_and_addresses_can_be_chosen() {
    let rig = Rig::new();
    let plain = |tag| Arc::new(Mutex::new(Plain::new(tag, &[(0, MEMORY64, 0x1000)])));
    let address = MMIO64.first + 0x5000;
    let given = [BarAddress {
        index: BAR,
        address,
    }];
    let bdf = rig.segment.plug(plain(1), Seat::slot(9), &given).unwrap();
    assert_eq!(bdf.to_string(), "0000:00:09.0");
    assert_eq!(rig.bar64(bdf, BAR), address);
    let taken = rig.segment.plug(plain(2), Seat::slot(9), &[]);
    assert!(matches!(taken, Err(PciError::SlotTaken(_))));
    for slot in [0, 32, 255] {
        let result = rig.segment.plug(plain(2), Seat::slot(slot), &[]);
        assert!(matches!(result, Err(PciError::InvalidSlot { .. })));
    }
    for _ in 0..30 {
        rig.segment.plug(plain(3), Seat::ANY, &[]).unwrap();
    }
    let full = rig.segment.plug(plain(3), Seat::ANY, &[]);
    assert!(matches!(full, Err(PciError::NoSlot(0))));
}

#[test]
fn a_bar_that_fits_nowhere_is_refused() {
    let rig = Rig::new();
    let function = Plain::new(1, &[(0, MEMORY64, 1 << 43)]);
    let result = rig
        .segment
        .plug(Arc::new(Mutex::new(function)), Seat::ANY, &[]);
    assert!(matches!(result, Err(PciError::NoAddress { .. })));
}

#[test]
fn small_bars_below_4_gib_leave_room_for_a_large_one() {
    let rig = Rig::new();
    for tag in 1..20 {
        rig.plug(Plain::new(tag, &[(0, MEMORY32, 0x1_0000)]));
    }
    // Half of what bus 0 has.
    let bdf = rig.plug(Plain::new(99, &[(0, MEMORY32, 1 << 27)]));
    assert_eq!(u64::from(rig.config_read(bdf, 0x10)), MMIO32.first);
}

#[test]
fn a_device_does_without_ports_where_there_are_none() {
    let rig = Rig::new();
    let config = SegmentConfig {
        io: None,
        ..rig.segment.config().clone()
    };
    let segment = PciSegment::new(config, Arc::clone(&rig.mmio), Arc::clone(&rig.pio));
    let function = Plain::new(1, &[(0, MEMORY32, 0x1000), (2, BarKind::Io, 0x20)]);
    let bdf = segment
        .plug(Arc::new(Mutex::new(function)), Seat::ANY, &[])
        .unwrap();
    let register = |offset| {
        let mut data = [0; 4];
        segment.read_config(bdf, offset, &mut data);
        u32::from_le_bytes(data)
    };
    assert_ne!(register(0x10), 0);
    assert_eq!(register(0x18), 1, "an I/O BAR without an address");
    segment.write_config(bdf, 4, &[7, 0]);
    assert_eq!(tag_at(&rig, u64::from(register(0x10))), 1);
    assert!(!rig.pio.read(0, &mut [0]));
    assert_eq!(rig.segment.functions().len(), 1, "the host bridge");
}

#[test]
fn impossible_bars_are_refused() {
    let mut config = ConfigSpace::new(Identity::default());
    let mut add = |index, kind, size| {
        let index = BarIndex::new(index).unwrap();
        config.add_bar(BarRequest { index, kind, size })
    };
    assert!(matches!(
        add(0, MEMORY32, 0x18),
        Err(ConfigError::BarSize { .. })
    ));
    assert!(matches!(
        add(0, MEMORY32, 1 << 32),
        Err(ConfigError::BarSize { .. })
    ));
    assert!(matches!(
        add(5, MEMORY64, 0x1000),
        Err(ConfigError::BarTaken(5))
    ));
    add(0, MEMORY64, 0x1000).unwrap();
    assert!(matches!(
        add(1, BarKind::Io, 8),
        Err(ConfigError::BarTaken(1))
    ));
}

#[test]
fn configuration_space_survives_odd_accesses() {
    let rig = Rig::new();
    let bdf = rig.plug(Plain::new(1, &[(0, MEMORY64, 0x1000)]));
    for offset in (0..0x48).chain(0xff0..0x1000) {
        for len in [1, 2, 3, 4, 8] {
            let mut data = [0; 8];
            rig.config_write(bdf, offset, &[0xff; 8][..len]);
            rig.config_read_bytes(bdf, offset, &mut data[..len]);
        }
    }
    assert_eq!(rig.config_read(bdf, 0), 0x0001_1234);
    let mut data = [0; 2];
    rig.config_read_bytes(bdf, 1, &mut data);
    assert_eq!(data, [0x12, 0x01]);
}

#[test]
fn the_configuration_ports_show_the_same_space() {
    let rig = Rig::new();
    let bdf = rig.plug(Plain::new(5, &[]));
    let select = |register: u32| {
        let address = 1 << 31 | u32::from(bdf.device) << 11 | register;
        rig.pio.write(0xcf8, &address.to_le_bytes());
    };
    let mut data = [0; 4];
    select(0);
    rig.pio.read(0xcfc, &mut data);
    assert_eq!(data, [0x34, 0x12, 0x05, 0x00]);
    rig.pio.read(0xcfe, &mut data[..2]);
    assert_eq!(data[..2], [0x05, 0x00]);
    select(0x3c);
    rig.pio.write(0xcfc, &[0x42]);
    assert_eq!(rig.config_read(bdf, 0x3c), 0x42);
    // A byte at 0xcf9 is for the reset register of some chipsets.
    rig.pio.write(0xcf9, &[6]);
    rig.pio.read(0xcf9, &mut data[..1]);
    assert_eq!(data[0], 0xff);
    rig.pio.read(0xcfc, &mut data[..1]);
    assert_eq!(data[0], 0x42, "still selected");
    rig.pio.write(0xcf8, &0u32.to_le_bytes());
    rig.pio.read(0xcfc, &mut data);
    assert_eq!(data, [0xff; 4], "not enabled");
}

#[test]
fn firmware_finds_the_host_bridge_that_it_supports() {
    let rig = Rig::new();
    let at = Bdf::default();
    assert_eq!(rig.config_read(at, 0), 0x0008_1b36);
    rig.segment.set_host_bridge(HostBridge::for_firmware());
    assert_eq!(rig.config_read(at, 0), 0x0d57_8086);
    assert_eq!(rig.config_read(at, 8), 0x0600_0000);
}

#[test]
fn error_bits_of_the_status_are_cleared_by_writing_ones() {
    let mut config = ConfigSpace::new(Identity::default());
    config.set(6, &0x8000u16.to_le_bytes());
    config.write(6, &0u16.to_le_bytes());
    assert_eq!(config.read_u16(6), 0x8000);
    config.write(6, &0xffffu16.to_le_bytes());
    assert_eq!(config.read_u16(6), 0);
}

#[test]
fn capabilities_form_a_list() {
    let mut config = ConfigSpace::new(Identity::default());
    let first = config.add_capability(9, &[1, 2], &[]).unwrap();
    let second = config.add_capability(0x11, &[0; 10], &[0xff]).unwrap();
    assert_eq!((first, second), (0x40, 0x44));
    assert_eq!(config.read_u16(0x34) & 0xff, 0x40);
    assert_eq!(config.read_u32(0x40), 0x0201_4409);
    assert_eq!(config.read_u16(6) & 0x10, 0x10);
    assert!(matches!(
        config.add_capability(9, &[0; 200], &[]),
        Err(ConfigError::NoRoom(202))
    ));
    let first = config
        .add_extended_capability(0xb, 1, &[0; 8], &[])
        .unwrap();
    let second = config.add_extended_capability(3, 1, &[0; 8], &[]).unwrap();
    assert_eq!((first, second), (0x100, 0x10c));
    assert_eq!(config.read_u32(0x100), 0x10c1_000b);
    assert_eq!(config.read_u32(0x10c), 0x0001_0003);
}

#[test]
fn saved_functions_return_to_their_places_in_any_order() {
    let bars = [(0, MEMORY64, 1 << 40)];
    let small = [(0, MEMORY64, 0x1000)];
    let rig = Rig::new();
    let one = rig.plug(Plain::new(1, &small));
    let two = rig.plug(Plain::new(2, &bars));
    rig.enable(one, true);
    rig.enable(two, true);
    let places = [rig.bar64(one, BAR), rig.bar64(two, BAR)];
    let saved = [one, two].map(|bdf| {
        let function = rig.segment.function(bdf).unwrap();
        function.lock().unwrap().save().unwrap()
    });

    let target = Rig::new();
    let plug = |function, at, state: &Value| {
        let function = Arc::new(Mutex::new(function));
        target
            .segment
            .plug_saved(function, Seat::from(at), state.clone())
    };
    plug(Plain::new(2, &bars), two, &saved[1]).unwrap();
    plug(Plain::new(1, &small), one, &saved[0]).unwrap();
    assert_eq!([one, two].map(|bdf| target.bar64(bdf, BAR)), places);
    assert_eq!(places.map(|at| tag_at(&target, at)), [1, 2]);
    assert!(
        plug(
            Plain::new(3, &small),
            Bdf { device: 5, ..one },
            &Value::Null
        )
        .is_err()
    );
    assert_eq!(target.segment.functions().len(), 3);
    target.segment.reset(two).unwrap();
    assert_eq!(target.bar64(two, BAR), places[1]);
}

#[test]
fn a_reset_brings_bars_back_and_stops_decoding() {
    let rig = Rig::new();
    let bdf = rig.plug(Plain::new(1, &[(0, MEMORY64, 0x1000)]));
    let home = rig.bar64(bdf, BAR);
    rig.enable(bdf, true);
    rig.set_bar64(bdf, BAR, home + 0x5000);
    rig.segment.reset(bdf).unwrap();
    assert_eq!(rig.bar64(bdf, BAR), home);
    assert_eq!(tag_at(&rig, home + 0x5000), 0xff);
    assert_eq!(tag_at(&rig, home), 0xff);
    rig.enable(bdf, true);
    assert_eq!(tag_at(&rig, home), 1);
}

/// A function that implements only the required methods.
struct Bare(ConfigSpace);

impl PciFunction for Bare {
    fn config(&self) -> &ConfigSpace {
        &self.0
    }
    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.0
    }
}

#[test]
fn functions_refuse_what_they_do_not_implement() {
    let mut function = Bare(ConfigSpace::new(Identity::default()));
    assert!(function.pause().is_err());
    assert!(function.resume().is_err());
    assert!(function.save().is_err());
    assert!(function.restore(Value::Null).is_err());
    assert!(function.reset().is_err());
}

#[test]
fn an_address_in_another_segment_is_not_here() {
    let rig = Rig::new();
    let bdf = Bdf {
        segment: 1,
        ..Bdf::default()
    };
    assert!(rig.segment.function(bdf).is_none());
}

/// An action of the guest on one of three functions.
#[derive(Clone, Debug)]
enum Step {
    Enable(u8, bool),
    Low(u8, u32),
    High(u8, u32),
    Replug(u8),
}

fn step() -> impl Strategy<Value = Step> {
    // Few addresses, so that BARs collide; some of them are invalid.
    let low = prop_oneof![0u32..5, Just(u32::MAX >> 12)].prop_map(|page| page << 12);
    let high = prop_oneof![Just(MMIO64.first >> 32), Just(0), Just(u64::from(u32::MAX))];
    prop_oneof![
        (1u8..4, any::<bool>()).prop_map(|(slot, on)| Step::Enable(slot, on)),
        (1u8..4, low).prop_map(|(slot, low)| Step::Low(slot, low)),
        (1u8..4, high).prop_map(|(slot, high)| Step::High(slot, high as u32)),
        (1u8..4).prop_map(Step::Replug),
    ]
}

fn plug_in(rig: &Rig, slot: u8) {
    // Sizes of 4, 8 and 16 KiB.
    let bars = [(0, MEMORY64, 0x800u64 << slot)];
    let function = Arc::new(Mutex::new(Plain::new(slot, &bars)));
    rig.segment.plug(function, Seat::slot(slot), &[]).unwrap();
}

proptest! {
    #[test]
    fn whatever_a_guest_does_the_bus_decodes_what_the_registers_say(
        steps in proptest::collection::vec(step(), 0..60)
    ) {
        let rig = Rig::new();
        let bdf = |device| Bdf { device, ..Bdf::default() };
        for slot in 1..4 {
            plug_in(&rig, slot);
        }
        for step in steps {
            match step {
                Step::Enable(slot, on) => rig.enable(bdf(slot), on),
                Step::Low(slot, low) => rig.config_write(bdf(slot), 0x10, &low.to_le_bytes()),
                Step::High(slot, high) => rig.config_write(bdf(slot), 0x14, &high.to_le_bytes()),
                Step::Replug(slot) => {
                    rig.segment.unplug(bdf(slot)).unwrap();
                    plug_in(&rig, slot);
                }
            }
            // The ranges that each function claims to decode, if they are inside the window.
            let claims: Vec<_> = (1..4u8)
                .filter(|&slot| rig.config_read(bdf(slot), 4) & 2 != 0)
                .map(|slot| (slot, rig.bar64(bdf(slot), BAR), 0x800u64 << slot))
                .filter(|(_, base, len)| {
                    *base >= MMIO64.first && *base <= MMIO64.last - (len - 1)
                })
                .collect();
            for page in (0..16).map(|page| MMIO64.first + (page << 12)) {
                let claimants: Vec<u8> = claims
                    .iter()
                    .filter(|(_, base, len)| (*base..base + len).contains(&page))
                    .map(|(slot, _, _)| *slot)
                    .collect();
                let answer = tag_at(&rig, page);
                if answer == 0xff {
                    // No function, or a BAR that is blocked here by another one elsewhere.
                    let alone = claims.iter().all(|one| claims.iter().all(|other| {
                        one.0 == other.0 || one.1 + one.2 <= other.1 || other.1 + other.2 <= one.1
                    }));
                    prop_assert!(claimants.is_empty() || !alone, "{page:#x} is lost");
                } else {
                    prop_assert!(claimants.contains(&answer), "{page:#x} is stale: {answer}");
                }
            }
        }
    }
}
