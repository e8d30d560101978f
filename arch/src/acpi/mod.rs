//! ACPI tables of a hardware-reduced platform (ACPI 6.5).
//!
//! There is no SCI, no fixed power button and no PM1 block: events arrive through a generic event
//! device, and reset and soft-off use the FADT's registers. Devices supply their own AML; this
//! module wraps it in the DSDT and adds the description of the machine itself.

mod madt;
mod numa;
mod viot;
pub mod wdat;

use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

pub use numa::{Initiator, NumaNode};
pub use viot::VirtualIommu;

use crate::layout::{
    ACPI_PM_TIMER_PORT, ACPI_RESET_PORT, ACPI_RESET_VALUE, ACPI_SLEEP_CONTROL_PORT,
    ACPI_SLEEP_STATUS_PORT, ACPI_SLEEP_TYPE_S5, ACPI_TABLES_END, ACPI_TABLES_START, AddressMap,
    RSDP_START, align_up,
};
use crate::topology::Topology;

const OEM_ID: [u8; 6] = *b"GANTRY";
const OEM_TABLE_ID: [u8; 8] = *b"GANTRYVM";
const OEM_REVISION: u32 = 1;
/// Tables are aligned to a cache line.
const TABLE_ALIGNMENT: u64 = 64;
/// Size of the header of a system description table.
const TABLE_HEADER_SIZE: u32 = 36;

/// FADT `IAPC_BOOT_ARCH` (ACPI 6.5, table 5.10): no VGA to probe, no ASPM. The bit for a keyboard
/// controller is clear so that the guest does not wait for its replies; its reset line works anyway.
const BOOT_ARCH: u16 = 1 << 2 | 1 << 4;
/// The same field: no CMOS clock.
const NO_CMOS_CLOCK: u16 = 1 << 5;

/// Why the tables cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    /// The tables need more room than there is.
    #[error(
        "the ACPI tables take {size} bytes, there is room for {}; use fewer vCPUs, PCI segments \
         or devices", ACPI_TABLES_END - ACPI_TABLES_START
    )]
    TooLarge {
        /// Total size of all tables in bytes.
        size: u64,
    },
    /// More vCPUs at boot than the topology has.
    #[error("{boot} vCPUs at boot are not 1 to {max}, the number that the CPU topology has")]
    Vcpus {
        /// vCPUs present at boot.
        boot: u32,
        /// vCPUs of the topology.
        max: u32,
    },
    /// A NUMA node refers to something that the machine lacks, or has an invalid value.
    #[error("NUMA node {node}: {what} {value} is invalid")]
    Numa {
        /// Number of the node.
        node: u32,
        /// The invalid item.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Guest memory could not be written.
    #[error("cannot write ACPI tables to guest memory")]
    Write(#[source] GuestMemoryError),
}

/// What the tables describe.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// The address map.
    pub map: &'a AddressMap,
    /// All vCPUs that the machine can ever have.
    pub topology: &'a Topology,
    /// Number of vCPUs present at boot; the others can be hot-plugged.
    pub boot_vcpus: u32,
    /// Whether there is an ACPI power management timer at [`ACPI_PM_TIMER_PORT`].
    pub pm_timer: bool,
    /// Whether the guest is to use the CMOS clock at [`CMOS_PORT`](crate::layout::CMOS_PORT).
    pub cmos_clock: bool,
    /// Whether there is a watchdog at [`ACPI_WATCHDOG_PORT`](crate::layout::ACPI_WATCHDOG_PORT).
    pub watchdog: bool,
    /// NUMA nodes; empty for a machine with uniform memory.
    pub numa: &'a [NumaNode],
    /// The virtual IOMMU, if there is one.
    pub iommu: Option<VirtualIommu>,
    /// AML of the devices, each a sequence of complete terms for the top level of the DSDT.
    pub devices: &'a [Vec<u8>],
}

/// Writes all tables and returns the address of the root pointer (RSDP).
///
/// # Errors
///
/// [`AcpiError`] if the tables do not fit or the description contradicts itself.
pub fn write_tables(
    memory: &impl GuestMemoryBackend,
    machine: &Machine,
) -> Result<GuestAddress, AcpiError> {
    for (address, table) in tables(machine)? {
        memory
            .write_slice(&table, address)
            .map_err(AcpiError::Write)?;
    }
    Ok(GuestAddress(RSDP_START))
}

/// All tables with their addresses; the root pointer is last.
fn tables(machine: &Machine) -> Result<Vec<(GuestAddress, Vec<u8>)>, AcpiError> {
    let mut placed = Placed::default();
    let dsdt = placed.push(dsdt(machine));
    let mut listed = vec![
        placed.push(fadt(machine, dsdt)),
        placed.push(madt::madt(machine)?),
    ];
    listed.push(placed.push(mcfg(machine.map)));
    if !machine.numa.is_empty() {
        listed.push(placed.push(numa::srat(machine)?));
        listed.push(placed.push(numa::slit(machine.numa)?));
    }
    if let Some(iommu) = &machine.iommu {
        listed.push(placed.push(viot::viot(iommu)));
    }
    if machine.watchdog {
        listed.push(placed.push(wdat::wdat()));
    }
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for address in listed {
        xsdt.add_entry(address);
    }
    let xsdt = placed.push(bytes_of(&xsdt));
    let mut tables = placed.finish()?;
    tables.push((GuestAddress(RSDP_START), bytes_of(&Rsdp::new(OEM_ID, xsdt))));
    Ok(tables)
}

/// Tables in ascending order of their addresses.
#[derive(Default)]
struct Placed {
    tables: Vec<(GuestAddress, Vec<u8>)>,
    /// Bytes taken so far.
    used: u64,
}

impl Placed {
    /// Appends a table and returns its address.
    fn push(&mut self, table: Vec<u8>) -> u64 {
        let address = ACPI_TABLES_START + self.used;
        let end = self.used.saturating_add(table.len() as u64);
        self.used = align_up(end, TABLE_ALIGNMENT).unwrap_or(u64::MAX / 2);
        self.tables.push((GuestAddress(address), table));
        address
    }

    fn finish(self) -> Result<Vec<(GuestAddress, Vec<u8>)>, AcpiError> {
        if self.used > ACPI_TABLES_END - ACPI_TABLES_START {
            return Err(AcpiError::TooLarge { size: self.used });
        }
        Ok(self.tables)
    }
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// Creates an empty table with this signature and revision.
fn table(signature: [u8; 4], revision: u8) -> Sdt {
    Sdt::new(
        signature,
        TABLE_HEADER_SIZE,
        revision,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    )
}

/// The soft-off state, the reservation of the PCI configuration space (without which Linux does not
/// trust the MCFG), and the devices.
fn dsdt(machine: &Machine) -> Vec<u8> {
    let ecam = machine.map.ecam();
    let mut body = Vec::new();
    aml::Name::new(
        "_S5_".into(),
        &aml::Package::new(vec![
            &ACPI_SLEEP_TYPE_S5,
            &aml::ZERO,
            &aml::ZERO,
            &aml::ZERO,
        ]),
    )
    .to_aml_bytes(&mut body);
    aml::Device::new(
        "_SB_.MBRD".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0C02")),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new(
                "_CRS".into(),
                // ECAM ends below 4 GiB.
                &aml::ResourceTemplate::new(vec![&aml::Memory32Fixed::new(
                    true,
                    ecam.start as u32,
                    ecam.size as u32,
                )]),
            ),
        ],
    )
    .to_aml_bytes(&mut body);
    for device in machine.devices {
        body.extend_from_slice(device);
    }
    let mut dsdt = table(*b"DSDT", 6);
    dsdt.append_slice(&body);
    dsdt.as_slice().to_vec()
}

fn fadt(machine: &Machine, dsdt: u64) -> Vec<u8> {
    let byte_port = |port: u16| {
        GAS::new(
            AddressSpace::SystemIo,
            8,
            0,
            AccessSize::ByteAccess,
            u64::from(port),
        )
    };
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        // Buttons, if there are any, are devices in the namespace.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        // There is no CMOS clock that wakes the machine.
        .flag(Flags::FixRtc);
    fadt.reset_reg = byte_port(ACPI_RESET_PORT);
    fadt.reset_value = ACPI_RESET_VALUE;
    fadt.sleep_control_reg = byte_port(ACPI_SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = byte_port(ACPI_SLEEP_STATUS_PORT);
    let clock = if machine.cmos_clock { 0 } else { NO_CMOS_CLOCK };
    fadt.iapc_boot_arch = (BOOT_ARCH | clock).into();
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"GANTRY\0\0").into();
    if machine.pm_timer {
        fadt = fadt.flag(Flags::TmrValExt);
        fadt.pm_tmr_blk = u32::from(ACPI_PM_TIMER_PORT).into();
        fadt.pm_tmr_len = 4;
        fadt.x_pm_tmr_blk = GAS::new(
            AddressSpace::SystemIo,
            32,
            0,
            AccessSize::DwordAccess,
            u64::from(ACPI_PM_TIMER_PORT),
        );
    }
    bytes_of(&fadt.finalize())
}

fn mcfg(map: &AddressMap) -> Vec<u8> {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let segments = (0..).zip(map.root_ports());
    for (n, last_bus) in segments {
        if let Some(windows) = map.segment(n) {
            mcfg.add_ecam(windows.ecam.start, n, 0, *last_bus);
        }
    }
    bytes_of(&mcfg)
}

#[cfg(test)]
mod tests;
