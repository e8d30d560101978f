//! Address maps of machines of all sizes.

use super::*;
use proptest::prelude::*;

fn fixed_ranges() -> Vec<AddressRange> {
    [
        (CPU_HOTPLUG_START, CPU_HOTPLUG_SIZE),
        (MEMORY_HOTPLUG_START, MEMORY_HOTPLUG_SIZE),
        (GED_START, GED_SIZE),
        (PCI_HOTPLUG_START, PCI_HOTPLUG_SIZE),
        (IOAPIC_START, IOAPIC_SIZE),
        (LAPIC_START, LAPIC_SIZE),
        (KVM_IDENTITY_MAP_START, PAGE_SIZE),
        (KVM_TSS_START, KVM_TSS_SIZE),
    ]
    .into_iter()
    .map(|(start, size)| AddressRange { start, size })
    .collect()
}

fn all_ranges(map: &AddressMap) -> Vec<AddressRange> {
    let mut all = vec![map.low_ram()];
    for n in 0..map.segments() {
        all.push(map.segment(n).unwrap().mmio32);
    }
    for n in 0..map.segments() {
        all.push(map.segment(n).unwrap().ecam);
    }
    all.extend(fixed_ranges());
    all.extend([map.high_ram(), map.hotplug(), map.device_memory()]);
    for n in 0..map.segments() {
        all.push(map.segment(n).unwrap().mmio64);
    }
    all
}

proptest! {
    #[test]
    fn ranges_ascend_without_overlap_within_the_address_width(
        pages in MIB / PAGE_SIZE..=6 * TIB / PAGE_SIZE,
        hotplug in prop_oneof![Just(0), 0..2 * TIB],
        bits in MIN_PHYS_BITS..=52,
        segments in 1..=MAX_PCI_SEGMENTS,
    ) {
        let Ok(map) = AddressMap::new(pages * PAGE_SIZE, hotplug, bits, segments) else {
            // Only address spaces of narrow processors may lack room for these sizes.
            prop_assert!(bits < 44);
            return Ok(());
        };
        let ranges = all_ranges(&map);
        for pair in ranges.windows(2) {
            prop_assert!(pair[0].end() <= pair[1].start, "{pair:x?}");
        }
        prop_assert!(ranges.last().unwrap().end() <= 1 << bits);
        prop_assert_eq!(map.ram().map(|r| r.size).sum::<u64>(), pages * PAGE_SIZE);
        prop_assert!(map.hotplug().size >= hotplug);
        prop_assert_eq!(map.hotplug().start % GIB, 0);
        prop_assert!(!map.mmio64().overlaps(&HYPERTRANSPORT));
        for n in 0..segments {
            let windows = map.segment(n).unwrap();
            prop_assert!(windows.mmio32.size >= MIB && windows.mmio32.start % MIB == 0);
            prop_assert!(windows.mmio64.size >= GIB && windows.mmio64.start % GIB == 0);
        }
        prop_assert!(map.segment(segments).is_none());
        let memory_map = map.memory_map();
        for pair in memory_map.windows(2) {
            prop_assert!(pair[0].range.end() <= pair[1].range.start);
        }
    }

    #[test]
    fn any_arguments_give_a_map_or_an_error(
        ram in any::<u64>(), hotplug in any::<u64>(), bits in any::<u8>(), segments in any::<u16>(),
    ) {
        let _ = AddressMap::new(ram, hotplug, bits, segments);
    }
}

#[test]
fn a_hole_takes_ram_away_and_moves_nothing() {
    let whole = AddressMap::new(256 * MIB, 0, 40, 1).unwrap();
    let hole = AddressRange::from_bounds(64 * MIB, 192 * MIB);
    let map = whole.clone().with_hole(hole).unwrap();
    let ram: Vec<_> = map.ram().map(|range| (range.start, range.end())).collect();
    assert_eq!(ram, [(0, 64 * MIB), (192 * MIB, 256 * MIB)]);
    assert_eq!(map.mmio64(), whole.mmio64());
    let entries = map.memory_map();
    for pair in entries.windows(2) {
        assert!(pair[0].range.end() <= pair[1].range.start, "{pair:x?}");
    }
    let found = entries.iter().find(|entry| entry.range == hole);
    assert_eq!(found.map(|entry| entry.kind), Some(MemoryKind::Reserved));
    for (start, end) in [
        (MIB, 2 * MIB),
        (64 * MIB, 256 * MIB),
        (64 * MIB, 64 * MIB),
        (64 * MIB + 1, 192 * MIB),
        (64 * MIB, u64::MAX),
    ] {
        let hole = AddressRange::from_bounds(start, end);
        assert!(matches!(
            whole.clone().with_hole(hole),
            Err(LayoutError::Hole { .. })
        ));
    }
}

#[test]
fn one_segment_gets_two_tebibytes_for_bars_where_the_width_allows() {
    for (ram, bits) in [(GIB, 42), (6 * TIB, 46), (512 * GIB, 43)] {
        let map = AddressMap::new(ram, 0, bits, 1).unwrap();
        assert!(map.mmio64().size >= 2 * TIB, "{ram:#x} {bits}");
        assert_eq!(map.mmio64().start % TIB, 0);
    }
}

#[test]
fn narrow_processors_get_the_room_that_memory_leaves() {
    let map = AddressMap::new(4 * GIB, 0, 36, 2).unwrap();
    assert!(map.mmio64().size >= 48 * GIB, "{map:x?}");
    let map = AddressMap::new(16 * GIB, 0, 39, 2).unwrap();
    assert!(map.mmio64().size >= 400 * GIB && map.mmio64().end() <= 1 << 39);
    let map = AddressMap::new(16 * GIB, 0, 40, 1).unwrap();
    assert!(map.mmio64().size >= 800 * GIB);
    assert!(matches!(
        AddressMap::new(63 * GIB, 0, 36, 1),
        Err(LayoutError::NoRoom { .. })
    ));
}

#[test]
fn arguments_out_of_range_are_refused_by_name() {
    let new = AddressMap::new;
    assert_eq!(
        new(MIB - PAGE_SIZE, 0, 40, 1),
        Err(LayoutError::RamTooSmall {
            size: MIB - PAGE_SIZE
        })
    );
    assert_eq!(
        new(GIB + 1, 0, 40, 1),
        Err(LayoutError::RamNotPageAligned { size: GIB + 1 })
    );
    for bits in [0, 35, 53, 255] {
        assert_eq!(new(GIB, 0, bits, 1), Err(LayoutError::PhysBits { bits }));
    }
    for segments in [0, 97] {
        assert_eq!(
            new(GIB, 0, 40, segments),
            Err(LayoutError::Segments {
                segments: segments.into()
            })
        );
    }
    let one_too_many = [&[32][..], &[31, 31, 31, 0], &[1; 49]];
    for ports in one_too_many {
        let error = AddressMap::with_root_ports(GIB, 0, 46, ports);
        let segments = ports.len();
        let ports = ports.iter().map(|ports| usize::from(*ports)).sum();
        assert_eq!(error, Err(LayoutError::RootPorts { ports, segments }));
    }
}

#[test]
fn the_first_root_ports_share_half_of_the_io_ports() {
    let shares = |ports: u8, segment: u16| -> Vec<_> {
        let map = AddressMap::with_root_ports(GIB, 0, 46, &[ports, 2]).unwrap();
        let shares = (0..=ports + 1).map(|bus| map.io(segment, bus));
        let shares = shares.filter(|share| !share.is_empty());
        shares.map(|share| (share.start, share.end())).collect()
    };
    assert_eq!(shares(0, 0), []);
    assert_eq!(shares(2, 0), [(0xe000, 0xf000), (0xf000, 0x1_0000)]);
    let most = shares(31, 0);
    assert_eq!((most.len(), most[0].0), (8, 0x8000));
    assert!(most.windows(2).all(|pair| pair[0].1 == pair[1].0));
    assert_eq!(shares(2, 1), []);
}

#[test]
fn every_bus_has_its_share_of_its_segment() {
    for ports in [&[3][..], &[0, 31, 2], &[1; 48]] {
        let map = AddressMap::with_root_ports(GIB, 0, 46, ports).unwrap();
        let mut ecam = ECAM_START;
        let (mut low, mut high) = (map.mmio32().start, map.mmio64().start);
        for (segment, last) in (0..).zip(ports) {
            let windows = map.segment(segment).unwrap();
            assert_eq!(windows.ecam.start, ecam);
            for bus in 0..=*last {
                let share = map.bus(segment, bus).unwrap();
                assert_eq!([share.mmio32.start, share.mmio64.start], [low, high]);
                assert!(windows.mmio32.contains(&share.mmio32));
                assert!(windows.mmio64.contains(&share.mmio64));
                (low, high) = (share.mmio32.end(), share.mmio64.end());
            }
            assert_eq!([windows.mmio32.end(), windows.mmio64.end()], [low, high]);
            assert!(map.bus(segment, last + 1).is_none());
            ecam += u64::from(last + 1) * ECAM_BUS_SIZE;
            assert_eq!(windows.ecam.end(), ecam);
        }
        assert_eq!(map.ecam().end(), ecam);
        assert!(ecam <= CPU_HOTPLUG_START && high <= map.mmio64().end());
    }
}
