//! The ACPI view of the segments: host bridges, slots and the hot-plug methods.
//!
//! ```text
//!   \_SB.PHPR          registers of the hot-plug controller, mutex BLCK
//!       PCEJ(slots, bus)      ejects the slots in a bit mask
//!       POST(slot, bus, event, status)  reports the outcome of an event
//!       PSCN()                scans every bus; called by the event handler (GED _EVT)
//!   \_SB.PCI0 ...      a host bridge per segment
//!       PCNT()                reads the announcements of its bus
//!       DVNT(mask, what)      notifies the slots in the mask
//!       S001 ... S031         slots: _ADR, _SUN, _EJ0, _OST
//!           S000, PCNT, DVNT      for a root port instead: the slot behind it
//! ```

use acpi::registers::{DEVICE_CHECK, EJECT_REQUEST, FOREVER, Raw, controller};
use acpi_tables::{
    Aml, AmlSink,
    aml::{
        Acquire, AddressSpace, AddressSpaceCacheable, And, Arg, Device, EISAName, Field,
        FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Method, MethodCall,
        Mutex, Name, Notify, OpRegion, OpRegionSpace, Package, PackageBuilder, Path, Release,
        ResourceTemplate, Store, ZERO,
    },
};

use super::{
    access::{CONFIG_PORTS_BASE, CONFIG_PORTS_LEN},
    bdf::{Bdf, SLOTS},
    hotplug::{HOTPLUG_SIZE, PciBuses},
    line::line_of,
    windows::SegmentConfig,
};

const LOCK: &str = "\\_SB_.PHPR.BLCK";

/// The DSDT's description of PCI. The ECAM windows must be reserved elsewhere in the DSDT;
/// otherwise Linux does not use them.
#[derive(Clone, Debug)]
pub struct PciAml {
    /// All segments. An I/O window must exclude the configuration ports.
    pub segments: Vec<SegmentConfig>,
    /// The root ports, as (address, bus behind it).
    pub ports: Vec<(Bdf, u8)>,
    /// The first of the [`LINES`] I/O APIC inputs that are used for INTx.
    pub lines: u32,
    /// Guest-physical address of the [`HotplugController`](super::HotplugController) registers.
    pub hotplug: u64,
    /// The NUMA nodes of segments that have one, as (segment, node).
    pub nodes: Vec<(u16, u32)>,
}

/// Name of a segment's host bridge: four characters.
fn bridge_name(segment: u16) -> String {
    match segment {
        0..=9 => format!("PCI{segment}"),
        10..=0xff => format!("PC{segment:02X}"),
        _ => format!("P{segment:03X}"),
    }
}

impl Aml for PciAml {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        self.controller(sink);
        for segment in &self.segments {
            self.bridge(segment, sink);
        }
    }
}

impl PciAml {
    fn controller(&self, sink: &mut dyn AmlSink) {
        let fields = [
            *b"PCIU", *b"PCID", *b"B0EJ", *b"PBUS", *b"OEVT", *b"OSTA", *b"OSLT",
        ];
        let bridges = self
            .segments
            .iter()
            .map(|config| bridge_name(config.segment));
        let ports = self.ports.iter().map(|(at, _)| {
            let bridge = bridge_name(at.segment);
            format!("{bridge}.{}", slot_name(at.device))
        });
        let scans: Vec<_> = bridges
            .chain(ports)
            .map(|bus| MethodCall::new(Path::new(&format!("\\_SB_.{bus}.PCNT")), vec![]))
            .collect();
        controller(
            "_SB_.PHPR",
            "PCI Hotplug Controller",
            (self.hotplug, HOTPLUG_SIZE),
            &[
                &Mutex::new(Path::new("BLCK"), 0),
                &OpRegion::new(
                    Path::new("PCST"),
                    OpRegionSpace::SystemMemory,
                    &self.hotplug,
                    &HOTPLUG_SIZE,
                ),
                &Field::new(
                    Path::new("PCST"),
                    FieldAccessType::DWord,
                    FieldLockRule::NoLock,
                    FieldUpdateRule::WriteAsZeroes,
                    fields.map(|name| FieldEntry::Named(name, 32)).to_vec(),
                ),
                &Method::new(
                    Path::new("PCEJ"),
                    2,
                    true,
                    vec![
                        &Acquire::new(Path::new("BLCK"), FOREVER),
                        &Store::new(&Path::new("PBUS"), &Arg(1)),
                        &Store::new(&Path::new("B0EJ"), &Arg(0)),
                        &Release::new(Path::new("BLCK")),
                    ],
                ),
                &Method::new(
                    Path::new("POST"),
                    4,
                    true,
                    vec![
                        &Acquire::new(Path::new("BLCK"), FOREVER),
                        &Store::new(&Path::new("PBUS"), &Arg(1)),
                        &Store::new(&Path::new("OEVT"), &Arg(2)),
                        &Store::new(&Path::new("OSTA"), &Arg(3)),
                        &Store::new(&Path::new("OSLT"), &Arg(0)),
                        &Release::new(Path::new("BLCK")),
                    ],
                ),
                &Method::new(
                    Path::new("PSCN"),
                    0,
                    true,
                    scans.iter().map(|scan| scan as &dyn Aml).collect(),
                ),
            ],
            sink,
        );
    }
}

/// `_PRT` (ACPI 6.5, 6.2.13): the I/O APIC input to which pin A of each slot is wired.
struct Routes<'a> {
    first: u32,
    slots: &'a [Bdf],
}

impl Aml for Routes<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let mut routes = PackageBuilder::new();
        for slot in self.slots {
            // All functions of the slot; pin A; no link device, but a fixed interrupt.
            let address = u32::from(slot.device) << 16 | 0xffff;
            let line = self.first + u32::from(line_of(*slot));
            routes.add_element(&Package::new(vec![&address, &ZERO, &ZERO, &line]));
        }
        Name::new(Path::new("_PRT"), &routes).to_aml_bytes(sink);
    }
}

impl PciAml {
    /// Writes a host bridge with its slots and root ports.
    fn bridge(&self, config: &SegmentConfig, sink: &mut dyn AmlSink) {
        let resources = resources(config);
        let resources = resources.iter().map(AsRef::as_ref).collect();
        let mut children = Vec::new();
        let mut add = |child: &dyn Aml| child.to_aml_bytes(&mut children);
        add(&Name::new(Path::new("_HID"), &EISAName::new("PNP0A08")));
        add(&Name::new(Path::new("_CID"), &EISAName::new("PNP0A03")));
        add(&Name::new(Path::new("_UID"), &config.segment));
        add(&Name::new(Path::new("_SEG"), &config.segment));
        add(&Name::new(Path::new("_BBN"), &ZERO));
        add(&Name::new(Path::new("_CCA"), &1u8));
        let mut nodes = self.nodes.iter();
        if let Some((_, node)) = nodes.find(|(segment, _)| *segment == config.segment) {
            add(&Name::new(Path::new("_PXM"), node));
        }
        add(&Name::new(
            Path::new("_CRS"),
            &ResourceTemplate::new(resources),
        ));
        let at = |bus, device| Bdf {
            segment: config.segment,
            bus,
            device,
            function: 0,
        };
        let slots: Vec<_> = (1..SLOTS).map(|slot| at(0, slot)).collect();
        self.slots(&slots, &mut children);
        for (port, bus) in &self.ports {
            if port.segment == config.segment {
                self.port(*port, at(*bus, 0), &mut children);
            }
        }
        let name = format!("_SB_.{}", bridge_name(config.segment));
        Device::new(Path::new(&name), vec![&Raw(&children)]).to_aml_bytes(sink);
    }

    /// Writes a root port with the slot behind it.
    fn port(&self, port: Bdf, slot: Bdf, sink: &mut dyn AmlSink) {
        let mut children = Vec::new();
        self.slots(&[slot], &mut children);
        Device::new(
            Path::new(&slot_name(port.device)),
            vec![
                &Name::new(Path::new("_ADR"), &(u32::from(port.device) << 16)),
                &Raw(&children),
            ],
        )
        .to_aml_bytes(sink);
    }

    /// Writes the slots of a bus, and its methods.
    fn slots(&self, slots: &[Bdf], sink: &mut dyn AmlSink) {
        let Some(bus) = slots.first().and_then(|slot| self.buses().number_of(*slot)) else {
            return;
        };
        let is_port = |slot: Bdf| self.ports.iter().any(|(port, _)| *port == slot);
        let empty = slots.iter().copied().filter(|slot| !is_port(*slot));
        let numbers: Vec<_> = empty.map(|slot| slot.device).collect();
        for &slot in &numbers {
            SlotAml { bus, slot }.to_aml_bytes(sink);
        }
        Routes {
            first: self.lines,
            slots,
        }
        .to_aml_bytes(sink);
        NotifyAml { slots: &numbers }.to_aml_bytes(sink);
        ScanAml { bus }.to_aml_bytes(sink);
    }

    fn buses(&self) -> PciBuses {
        let last: Vec<_> = self.segments.iter().map(SegmentConfig::last_bus).collect();
        PciBuses::new(&last)
    }
}

/// `_CRS`: the resources that the bridge forwards.
fn resources(config: &SegmentConfig) -> Vec<Box<dyn Aml>> {
    let mut resources: Vec<Box<dyn Aml>> = vec![Box::new(AddressSpace::<u16>::new_bus_number(
        0,
        config.last_bus().into(),
    ))];
    if config.segment == 0 {
        let (base, len) = (CONFIG_PORTS_BASE as u16, CONFIG_PORTS_LEN as u8);
        resources.push(Box::new(IO::new(base, base, 1, len)));
    }
    let narrow = |address: u64| u32::try_from(address).ok();
    if let Some(window) = config.io
        && let (Some(first), Some(last)) = (narrow(window.first), narrow(window.last))
    {
        resources.push(Box::new(AddressSpace::<u32>::new_io(first, last, None)));
    }
    let cacheable = AddressSpaceCacheable::NotCacheable;
    if let Some(window) = config.mmio32
        && let (Some(first), Some(last)) = (narrow(window.first), narrow(window.last))
    {
        resources.push(Box::new(AddressSpace::<u32>::new_memory(
            cacheable, true, first, last, None,
        )));
    }
    if let Some(window) = config.mmio64 {
        resources.push(Box::new(AddressSpace::<u64>::new_memory(
            cacheable,
            true,
            window.first,
            window.last,
            None,
        )));
    }
    resources
}

fn slot_name(slot: u8) -> String {
    format!("S{slot:03}")
}

/// The device object for a slot.
struct SlotAml {
    bus: u16,
    slot: u8,
}

impl Aml for SlotAml {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        // Unique within the VM, so that the guest need not make up names for its slots.
        let number = u32::from(self.bus) * u32::from(SLOTS) + u32::from(self.slot);
        let bit = 1u32 << (self.slot % SLOTS);
        Device::new(
            Path::new(&slot_name(self.slot)),
            vec![
                &Name::new(Path::new("_SUN"), &number),
                &Name::new(Path::new("_ADR"), &(u32::from(self.slot) << 16)),
                &Method::new(
                    Path::new("_EJ0"),
                    1,
                    true,
                    vec![&MethodCall::new(
                        Path::new("\\_SB_.PHPR.PCEJ"),
                        vec![&bit, &self.bus],
                    )],
                ),
                &Method::new(
                    Path::new("_OST"),
                    3,
                    true,
                    vec![&MethodCall::new(
                        Path::new("\\_SB_.PHPR.POST"),
                        vec![&self.slot, &self.bus, &Arg(0), &Arg(1)],
                    )],
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// `DVNT(mask, what)`: notifies the slots in the mask.
struct NotifyAml<'a> {
    slots: &'a [u8],
}

impl Aml for NotifyAml<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let slots: Vec<_> = self
            .slots
            .iter()
            .map(|&slot| (1u32 << slot, Path::new(&slot_name(slot))))
            .collect();
        let tests: Vec<_> = slots
            .iter()
            .map(|(bit, path)| (And::new(&ZERO, &Arg(0), bit), Notify::new(path, &Arg(1))))
            .collect();
        let branches: Vec<_> = tests
            .iter()
            .map(|(test, notify)| If::new(test, vec![notify]))
            .collect();
        let branches = branches.iter().map(|branch| branch as &dyn Aml).collect();
        Method::new(Path::new("DVNT"), 2, true, branches).to_aml_bytes(sink);
    }
}

/// `PCNT()`: reads the announcements of a bus and notifies its slots.
struct ScanAml {
    bus: u16,
}

impl Aml for ScanAml {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let notify = |register: &dyn Aml, what: u8, sink: &mut dyn AmlSink| {
            MethodCall::new(Path::new("DVNT"), vec![register, &what]).to_aml_bytes(sink);
        };
        let mut calls = Vec::new();
        notify(&Path::new("\\_SB_.PHPR.PCIU"), DEVICE_CHECK, &mut calls);
        notify(&Path::new("\\_SB_.PHPR.PCID"), EJECT_REQUEST, &mut calls);
        Method::new(
            Path::new("PCNT"),
            0,
            true,
            vec![
                &Acquire::new(Path::new(LOCK), FOREVER),
                &Store::new(&Path::new("\\_SB_.PHPR.PBUS"), &self.bus),
                &Raw(&calls),
                &Release::new(Path::new(LOCK)),
            ],
        )
        .to_aml_bytes(sink);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use acpi_tables::sdt::Sdt;

    use super::*;
    use crate::{
        PortWindows,
        testing::{MMIO32, MMIO64, PORTS},
    };

    fn aml(segments: u16) -> Vec<u8> {
        let segment = |segment| SegmentConfig {
            segment,
            mmio32: Some(MMIO32),
            mmio64: Some(MMIO64),
            io: (segment == 0).then_some(PORTS),
            ports: vec![PortWindows::default(); if segment == 1 { 2 } else { 0 }],
        };
        let port = |device| Bdf {
            segment: 1,
            device,
            ..Bdf::default()
        };
        let mut bytes = Vec::new();
        PciAml {
            segments: (0..segments).map(segment).collect(),
            ports: vec![(port(4), 1), (port(9), 2)],
            lines: 16,
            hotplug: 0xfe80_3000,
            nodes: vec![(1, 7)],
        }
        .to_aml_bytes(&mut bytes);
        bytes
    }

    fn count(bytes: &[u8], needle: &[u8]) -> usize {
        bytes
            .windows(needle.len())
            .filter(|at| *at == needle)
            .count()
    }

    #[test]
    fn every_segment_has_a_bridge_with_31_slots_that_can_be_ejected() {
        let bytes = aml(12);
        assert_eq!(
            count(&bytes, b"_EJ0"),
            12 * 31,
            "less two ports, and theirs"
        );
        assert_eq!(count(&bytes, b"_SEG"), 12);
        assert_eq!(count(&bytes, b"_PRT"), 12 + 2);
        assert_eq!(count(&bytes, b"_PXM\x0a\x07"), 1, "of one segment");
        assert_eq!(count(&bytes, b"S000"), 2 * 2);
        assert_eq!(count(&bytes, b"S031"), 2 * 12, "a device, a notification");
        assert_eq!(count(&bytes, b"PC0B"), 2, "a device, a scan");
    }

    #[test]
    fn acpica_loads_the_tables_and_runs_the_methods() {
        let mut table = Sdt::new(*b"DSDT", 36, 6, *b"GANTRY", *b"GANTRYVM", 1);
        table.append_slice(&aml(2));
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("dsdt.aml"), table.as_slice()).unwrap();
        for method in [
            "\\_SB.PHPR.PSCN",
            "\\_SB.PCI1._PRT",
            "\\_SB.PCI1.S003._OST 3 81 0",
            "\\_SB.PCI1.S003._EJ0 1",
            "\\_SB.PCI1.S009.S000._EJ0 1",
            "\\_SB.PCI1.S004._PRT",
        ] {
            let mut command = Command::new("acpiexec");
            let batch = format!("evaluate {method}");
            command.args(["-b", &batch, "dsdt.aml"]).current_dir(&dir);
            let output = match command.output() {
                Ok(output) => output,
                Err(error) => {
                    eprintln!("acpiexec (Debian package acpica-tools) is missing: {error}");
                    return;
                }
            };
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("Evaluating"), "{text}");
            assert!(!text.contains("AE_"), "{text}");
        }
    }
}
