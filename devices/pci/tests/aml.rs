//! All AML of these devices in one table, read back by ACPICA where it is installed.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{fs, process::Command};

use acpi::{CpuHotplug, GenericEventDevice, MemoryHotplug, Notification};
use acpi_tables::{Aml, aml, sdt::Sdt};
use legacy::SerialAml;
use pci::{
    PciAml, SegmentConfig,
    testing::{MMIO32, MMIO64, PORTS},
};
use vmm_sys_util::eventfd::EventFd;

fn dsdt(boot: u32, max: u32) -> Vec<u8> {
    let irq = EventFd::new(0).unwrap();
    let ged = GenericEventDevice::new(irq, 5, 0xfe80_2000, Notification::all());
    let cpus = CpuHotplug::new(0xfe80_0000, boot, max, |n| 3 * n, Box::new(|_| ()));
    let cpus = cpus.unwrap().with_nodes(|vcpu| Some(vcpu % 2));
    let memory = MemoryHotplug::new(0xfe80_1000);
    let serial = SerialAml {
        port: 0x3f8,
        gsi: 4,
    };
    let segment = |segment| SegmentConfig {
        segment,
        mmio32: Some(MMIO32),
        mmio64: Some(MMIO64),
        io: (segment == 0).then_some(PORTS),
        ..SegmentConfig::default()
    };
    let pci = PciAml {
        segments: vec![segment(0), segment(1)],
        ports: Vec::new(),
        lines: 16,
        hotplug: 0xfe80_3000,
        nodes: vec![(1, 1)],
    };
    let mut body = Vec::new();
    let parts: [&dyn Aml; 5] = [&ged, &cpus, &memory, &serial, &pci];
    for part in parts {
        part.to_aml_bytes(&mut body);
    }
    let mut table = Sdt::new(*b"DSDT", 36, 6, *b"GANTRY", *b"GANTRYVM", 1);
    table.append_slice(&body);
    table.as_slice().to_vec()
}

/// Runs a tool of ACPICA (Debian: acpica-tools) on a table and returns its output; `None` if it
/// is not installed.
fn run(tool: &str, arguments: &[&str], table: &[u8]) -> Option<(tempfile::TempDir, String)> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("dsdt.aml"), table).unwrap();
    let mut command = Command::new(tool);
    let output = match command.args(arguments).current_dir(&dir).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("{tool} (Debian package acpica-tools) does not run, skipped: {error}");
            return None;
        }
    };
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Some((dir, text))
}

#[test]
fn the_aml_disassembles_and_compiles_again_without_errors() {
    for (boot, max) in [(1, 1), (2, 4), (1, 255)] {
        let table = dsdt(boot, max);
        let Some((dir, text)) = run("iasl", &["-d", "dsdt.aml"], &table) else {
            return;
        };
        assert!(!text.contains("Error"), "{text}");
        let source = fs::read(dir.path().join("dsdt.dsl")).unwrap();
        let source = String::from_utf8_lossy(&source);
        for part in [
            "Device (\\_SB.GED)",
            "Method (_EVT, 1, Serialized)",
            "Method (ESCN, 0, Serialized)",
            "\\_SB.CPUS.CSCN ()",
            "\\_SB.MHPC.MSCN ()",
            "\\_SB.PHPR.PSCN ()",
            "Notify (\\_SB.PWRB, 0x80)",
            "Device (\\_SB.PWRB)",
            "Device (C000)",
            "Method (CSCN, 0, Serialized)",
            "Device (M007)",
            "Method (MSCN, 0, Serialized)",
            "Device (\\_SB.COM1)",
        ] {
            assert!(source.contains(part), "{part} is missing in\n{source}");
        }
        let ejectable = source.matches("Method (_EJ0, 1, NotSerialized)").count();
        assert_eq!(ejectable, max as usize - 1);
        fs::write(dir.path().join("again.dsl"), source.as_bytes()).unwrap();
        let again = Command::new("iasl")
            .args(["-p", "again", "again.dsl"])
            .current_dir(&dir)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&again.stdout);
        assert!(text.contains("0 Errors, 0 Warnings"), "{text}");
    }
}

#[test]
fn an_interpreter_runs_the_event_handler_and_reads_status_and_resources() {
    // The interpreter's registers are plain memory; this method initializes them.
    let mut prepare = Vec::new();
    for (register, value) in [
        ("\\_SB_.GEC_.GDAT", 0x0f),
        ("\\_SB_.PRES.CNXT", u32::MAX),
        ("\\_SB_.PRES.CPEN", 1),
        ("\\_SB_.MHPC.MNXT", u32::MAX),
        ("\\_SB_.MHPC.MBAL", 0x4000_0000),
        ("\\_SB_.MHPC.MBAH", 0x12),
        ("\\_SB_.MHPC.MLNL", 0x8000_0000),
        ("\\_SB_.MHPC.MLNH", 0x1),
        ("\\_SB_.MHPC.MEN_", 1),
        ("\\_SB_.MHPC.MPXM", 7),
    ] {
        let register = aml::Path::new(register);
        aml::Store::new(&register, &value).to_aml_bytes(&mut prepare);
    }
    let prepare = acpi::registers::Raw(&prepare);
    let prepare = aml::Method::new("\\PREP".into(), 0, true, vec![&prepare]);
    let mut table = Sdt::new(*b"DSDT", 36, 6, *b"GANTRY", *b"GANTRYVM", 1);
    table.append_slice(&dsdt(2, 4)[36..]);
    let mut method = Vec::new();
    prepare.to_aml_bytes(&mut method);
    table.append_slice(&method);

    let evaluations = [
        "\\PREP",
        "\\_SB.GED._EVT 5",
        "\\_SB.CPUS.C001._STA",
        "\\_SB.CPUS.C003._MAT",
        "\\_SB.CPUS.C002._PXM",
        "\\_SB.CPUS.C002._EJ0 1",
        "\\_SB.CPUS.CTFY 3 3",
        "\\_SB.MHPC.M003._STA",
        "\\_SB.MHPC.M003._PXM",
        "\\_SB.MHPC.M003._CRS",
        "\\_SB.MHPC.MTFY 7 1",
    ];
    let batch = evaluations.map(|name| format!("evaluate {name}")).join(";");
    let Some((_dir, text)) = run("acpiexec", &["-b", &batch, "dsdt.aml"], table.as_slice()) else {
        return;
    };
    assert!(
        !text.contains("ACPI Error") && !text.contains("AE_"),
        "{text}"
    );
    for found in [
        "Notify on [PWRB]",
        "Notify on [C003]",
        "Value 0x03 (Eject Request)",
        "Notify on [M007]",
        "Value 0x01 (Device Check)",
        // Status of the processor and of the memory, and the memory's NUMA node.
        "[Integer] = 000000000000000F",
        "[Integer] = 0000000000000007",
        // The processor's local APIC structure.
        "00 08 03 09 01 00 00 00",
        // The memory's descriptor: from 0x12_4000_0000 to 0x13_bfff_ffff, 0x1_8000_0000 bytes.
        "8A 2B 00 00 0C 03 00 00 00 00 00 00 00 00 00 00",
        "00 40 12 00 00 00 FF FF FF BF 13 00 00 00 00 00",
        "00 00 00 00 00 00 00 00 00 80 01 00 00 00 79 00",
    ] {
        assert!(text.contains(found), "{found} is missing in\n{text}");
    }
}
