//! The interrupt controllers (MADT; ACPI 6.5, 5.2.12).
//!
//! All APIC IDs are below 255 (see [`crate::topology::MAX_APIC_ID`]), so processors have local APIC
//! structures whether or not the guest switches to x2APIC mode.

use super::{AcpiError, Machine, table};
use crate::layout::{IOAPIC_START, LAPIC_START, SERIAL_GSI};

const LOCAL_APIC: u8 = 0;
const IO_APIC: u8 = 1;
const SOURCE_OVERRIDE: u8 = 2;
const LOCAL_APIC_NMI: u8 = 4;
const ENABLED: u32 = 1 << 0;
const ONLINE_CAPABLE: u32 = 1 << 1;
const ISA_BUS: u8 = 0;
const ALL_PROCESSORS: u8 = 0xff;
/// Polarity and trigger mode follow the bus.
const CONFORMS: u16 = 0;

pub(super) fn madt(machine: &Machine) -> Result<Vec<u8>, AcpiError> {
    let max = machine.topology.vcpus();
    if !(1..=max).contains(&machine.boot_vcpus) {
        return Err(AcpiError::Vcpus {
            boot: machine.boot_vcpus,
            max,
        });
    }
    let mut body = Vec::new();
    body.extend_from_slice(&(LAPIC_START as u32).to_le_bytes());
    // No dual 8259: the guest should use only the IOAPIC.
    body.extend_from_slice(&0u32.to_le_bytes());
    for vcpu in 0..max {
        let flags = if vcpu < machine.boot_vcpus {
            ENABLED
        } else {
            ONLINE_CAPABLE
        };
        // Both numbers are at most 254.
        body.extend_from_slice(&[
            LOCAL_APIC,
            8,
            vcpu as u8,
            machine.topology.apic_id(vcpu) as u8,
        ]);
        body.extend_from_slice(&flags.to_le_bytes());
    }
    body.extend_from_slice(&[IO_APIC, 12, 0, 0]);
    body.extend_from_slice(&(IOAPIC_START as u32).to_le_bytes());
    body.extend_from_slice(&0u32.to_le_bytes());
    // Without a legacy controller, Linux knows only the ISA interrupts that are listed here.
    body.extend_from_slice(&[SOURCE_OVERRIDE, 10, ISA_BUS, SERIAL_GSI as u8]);
    body.extend_from_slice(&SERIAL_GSI.to_le_bytes());
    body.extend_from_slice(&CONFORMS.to_le_bytes());
    body.extend_from_slice(&[LOCAL_APIC_NMI, 6, ALL_PROCESSORS]);
    body.extend_from_slice(&CONFORMS.to_le_bytes());
    body.push(1);
    let mut madt = table(*b"APIC", 5);
    madt.append_slice(&body);
    Ok(madt.as_slice().to_vec())
}
