use std::fs;
use std::process::Command;

use super::*;
use crate::layout::{AddressRange, GIB, HOLE_END, HOLE_START, MIB};

fn machine<'a>(map: &'a AddressMap, topology: &'a Topology) -> Machine<'a> {
    Machine {
        map,
        topology,
        boot_vcpus: topology.vcpus(),
        pm_timer: true,
        cmos_clock: false,
        watchdog: false,
        numa: &[],
        iommu: None,
        devices: &[],
    }
}

fn map(segments: u16) -> AddressMap {
    AddressMap::new(8 * GIB, 4 * GIB, 46, segments).unwrap()
}

fn two_nodes(map: &AddressMap) -> Vec<NumaNode> {
    vec![
        NumaNode {
            memory: vec![AddressRange::from_bounds(0, HOLE_START)],
            vcpus: vec![0, 1],
            distances: vec![(1, 30)],
            ..Default::default()
        },
        NumaNode {
            memory: vec![AddressRange::from_bounds(HOLE_END, map.high_ram().end())],
            hotplug: vec![map.hotplug()],
            vcpus: vec![2, 3],
            initiators: vec![Initiator {
                segment: 1,
                requester: 0x0118,
            }],
            ..Default::default()
        },
    ]
}

fn iommu(segments: &[u16]) -> VirtualIommu {
    VirtualIommu {
        device: 3,
        segments: segments.to_vec(),
    }
}

fn find<'a>(tables: &'a [(GuestAddress, Vec<u8>)], signature: &[u8; 4]) -> &'a [u8] {
    tables
        .iter()
        .map(|(_, table)| table.as_slice())
        .find(|table| table.starts_with(signature))
        .unwrap()
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

#[test]
fn the_root_pointer_leads_to_every_table_and_all_add_up_to_zero() {
    let (map, topology) = (map(2), Topology::new(2, 2, 1, 1).unwrap());
    let numa = two_nodes(&map);
    let machine = Machine {
        numa: &numa,
        watchdog: true,
        iommu: Some(iommu(&[1])),
        ..machine(&map, &topology)
    };
    let memory =
        vm_memory::GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MIB as usize)]).unwrap();
    let rsdp = write_tables(&memory, &machine).unwrap();
    let read = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    };
    let table = |at: u64| {
        let len = u32::from_le_bytes(read(at + 4, 4).try_into().unwrap());
        let bytes = read(at, len as usize);
        assert_eq!(sum(&bytes), 0);
        bytes
    };
    let address = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let root = read(rsdp.0, 36);
    assert!(root.starts_with(b"RSD PTR "));
    assert_eq!((sum(&root[..20]), sum(&root)), (0, 0));
    let xsdt = table(address(&root[24..32]));
    let names: Vec<Vec<u8>> = xsdt[36..]
        .chunks(8)
        .map(|at| table(address(at))[..4].to_vec())
        .collect();
    assert_eq!(
        names,
        [
            b"FACP", b"APIC", b"MCFG", b"SRAT", b"SLIT", b"VIOT", b"WDAT"
        ]
    );
    let fadt = table(address(&xsdt[36..44]));
    assert!(table(address(&fadt[140..148])).starts_with(b"DSDT"));
}

#[test]
fn only_firmware_is_told_of_the_cmos_clock() {
    let (map, topology) = (map(1), Topology::flat(1).unwrap());
    for (cmos_clock, flags) in [(false, 0x34), (true, 0x14)] {
        let machine = Machine {
            cmos_clock,
            ..machine(&map, &topology)
        };
        let tables = tables(&machine).unwrap();
        assert_eq!(find(&tables, b"FACP")[109..111], [flags, 0]);
    }
}

#[test]
fn vcpus_that_can_be_plugged_are_listed_but_not_enabled() {
    let (map, topology) = (map(1), Topology::new(1, 3, 1, 2).unwrap());
    let machine = Machine {
        boot_vcpus: 2,
        ..machine(&map, &topology)
    };
    let tables = tables(&machine).unwrap();
    let madt = find(&tables, b"APIC");
    let vcpus: Vec<[u8; 3]> = madt[44..44 + 6 * 8]
        .chunks(8)
        .map(|entry| [entry[2], entry[3], entry[4]])
        .collect();
    assert_eq!(
        vcpus,
        [
            [0, 0, 1],
            [1, 1, 1],
            [2, 2, 2],
            [3, 4, 2],
            [4, 5, 2],
            [5, 6, 2]
        ]
    );
}

#[test]
fn each_segment_has_its_configuration_space() {
    let ports = [0, 5, 0];
    let map = AddressMap::with_root_ports(8 * GIB, 4 * GIB, 46, &ports).unwrap();
    let topology = Topology::flat(1).unwrap();
    let tables = tables(&machine(&map, &topology)).unwrap();
    let mcfg = find(&tables, b"MCFG");
    assert_eq!(mcfg.len(), 44 + 3 * 16);
    for (n, entry) in (0u16..).zip(mcfg[44..].chunks(16)) {
        let base = u64::from_le_bytes(entry[..8].try_into().unwrap());
        assert_eq!(base, map.segment(n).unwrap().ecam.start);
        assert_eq!(entry[8..12], [n as u8, 0, 0, ports[usize::from(n)]]);
    }
}

#[test]
fn an_iommu_translates_for_its_segments_but_not_for_itself() {
    let (map, topology) = (map(3), Topology::flat(1).unwrap());
    let machine = Machine {
        iommu: Some(iommu(&[2, 0])),
        ..machine(&map, &topology)
    };
    let tables = tables(&machine).unwrap();
    let viot = find(&tables, b"VIOT");
    let word = |at: usize| u16::from_le_bytes(viot[at..at + 2].try_into().unwrap());
    // The number of nodes and their offset; the IOMMU is 0000:00:03.0.
    assert_eq!((word(36), word(38)), (4, 48));
    assert_eq!([48, 50, 52, 54].map(word), [3, 16, 0, 0x18]);
    let ranges: Vec<_> = viot[64..]
        .chunks(24)
        .map(|node| {
            let word = |at: usize| u16::from_le_bytes([node[at], node[at + 1]]);
            assert_eq!((word(0), word(2), word(16)), (1, 24, 48));
            let endpoint = u32::from(word(6)) << 16 | u32::from(word(4));
            (endpoint, word(8)..=word(10), word(12)..=word(14))
        })
        .collect();
    assert_eq!(
        ranges,
        [
            (0x2_0008, 2..=2, 8..=0xffff),
            (0x8, 0..=0, 0x8..=0x17),
            (0x20, 0..=0, 0x20..=0xffff),
        ]
    );
}

#[test]
fn a_device_that_is_a_nodes_initiator_is_named_by_its_place() {
    let (map, topology) = (map(2), Topology::flat(4).unwrap());
    let numa = two_nodes(&map);
    let machine = Machine {
        numa: &numa,
        ..machine(&map, &topology)
    };
    let tables = tables(&machine).unwrap();
    let srat = find(&tables, b"SRAT");
    // Domain 1; segment 1, bus 1, device 3, function 0; enabled.
    let mut expected = vec![5, 32, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0x18];
    expected.resize(24, 0);
    expected.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
    assert!(srat.ends_with(&expected), "{srat:?}");
}

#[test]
fn contradictions_are_refused() {
    let (map, topology) = (map(1), Topology::flat(4).unwrap());
    for boot_vcpus in [0, 5] {
        let machine = Machine {
            boot_vcpus,
            ..machine(&map, &topology)
        };
        assert!(matches!(tables(&machine), Err(AcpiError::Vcpus { .. })));
    }
    let node = |vcpus: &[u32], distances: &[(u32, u8)]| {
        let numa = [NumaNode {
            vcpus: vcpus.to_vec(),
            distances: distances.to_vec(),
            ..Default::default()
        }];
        let machine = Machine {
            numa: &numa,
            ..machine(&map, &topology)
        };
        tables(&machine)
    };
    assert!(node(&[3], &[(0, 10)]).is_ok());
    assert!(matches!(node(&[4], &[]), Err(AcpiError::Numa { .. })));
    assert!(matches!(node(&[], &[(0, 11)]), Err(AcpiError::Numa { .. })));
    assert!(matches!(node(&[], &[(1, 20)]), Err(AcpiError::Numa { .. })));
}

#[test]
fn tables_that_do_not_fit_are_refused() {
    let (map, topology) = (map(1), Topology::flat(255).unwrap());
    let fits = [vec![0xa3; 200 * 1024]];
    let too_large = [vec![0xa3; 128 * 1024], vec![0xa3; 128 * 1024]];
    for (devices, ok) in [(&fits[..], true), (&too_large[..], false)] {
        let machine = Machine {
            devices,
            ..machine(&map, &topology)
        };
        match tables(&machine) {
            Ok(_) => assert!(ok),
            Err(AcpiError::TooLarge { size }) => assert!(!ok && size > 256 * 1024),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Runs the reference compiler (Debian package acpica-tools) on the tables. Without it, nothing is
/// checked.
#[test]
fn the_reference_compiler_takes_the_tables() {
    if Command::new("iasl").arg("-v").output().is_err() {
        eprintln!("iasl is not installed, tables not checked");
        return;
    }
    let (map, topology) = (map(2), Topology::new(2, 2, 1, 1).unwrap());
    let numa = two_nodes(&map);
    let machine = Machine {
        numa: &numa,
        watchdog: true,
        // Debian's compiler does not know the VIOT.
        iommu: None,
        ..machine(&map, &topology)
    };
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let output = Command::new("iasl")
            .args(args)
            .current_dir(folder.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "iasl {args:?}:\n{text}");
        text
    };
    let tables = tables(&machine).unwrap();
    for (_, table) in &tables[..tables.len() - 1] {
        let name = String::from_utf8(table[..4].to_vec()).unwrap();
        fs::write(folder.path().join(format!("{name}.dat")), table).unwrap();
        let text = run(&["-d", &format!("{name}.dat")]);
        let source = fs::read_to_string(folder.path().join(format!("{name}.dsl"))).unwrap();
        for bad in ["Invalid", "Unknown", "incorrect checksum", "Error"] {
            assert!(
                !source.contains(bad) && !text.contains(bad),
                "{name}: {bad}\n{source}\n{text}"
            );
        }
        let text = run(&["-p", "again", &format!("{name}.dsl")]);
        if name == "DSDT" {
            assert!(text.contains(" 0 Errors, 0 Warnings"), "{text}");
        }
        let again = fs::read(folder.path().join("again.aml")).unwrap();
        // The compiler writes its own creator and checksum into the header.
        assert_eq!(again[36..], table[36..], "{name}");
    }
}
