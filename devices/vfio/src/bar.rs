//! Trapped accesses to a BAR: the MSI-X table, and parts that cannot be mapped.

use std::{ops::Range, sync::Arc};

use device_model::bus::BusDevice;
use pci::{BarIndex, MsixTable, TABLE_ENTRY_SIZE};

use super::{device::Device, interrupts::Interrupts};

/// The MSI-X table and pending bits in a BAR.
pub struct TrappedVectors {
    /// Range of the table, if it is in this BAR.
    pub table: Option<Range<u64>>,
    /// Range of the pending bits, if they are in this BAR.
    pub pending: Option<Range<u64>>,
    /// The emulated table that the guest sees there.
    pub msix: Arc<MsixTable>,
    /// The interrupts of the device.
    pub interrupts: Arc<Interrupts>,
}

/// A BAR of a device.
pub struct Bar {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Index of the BAR, which is also its VFIO region.
    pub index: u32,
    /// Its MSI-X table and pending bits, if any.
    pub vectors: Option<TrappedVectors>,
}

enum Target<'a> {
    Table(&'a TrappedVectors, u64),
    Pending(&'a TrappedVectors, u64),
    Device,
}

impl Bar {
    fn target(&self, offset: u64) -> Target<'_> {
        let Some(vectors) = &self.vectors else {
            return Target::Device;
        };
        let within = |range: &Option<Range<u64>>| {
            let range = range.as_ref().filter(|range| range.contains(&offset))?;
            Some(offset - range.start)
        };
        if let Some(at) = within(&vectors.table) {
            Target::Table(vectors, at)
        } else if let Some(at) = within(&vectors.pending) {
            Target::Pending(vectors, at)
        } else {
            Target::Device
        }
    }
}

impl BusDevice for Bar {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.target(offset) {
            Target::Table(vectors, at) => vectors.msix.read_table(at, data),
            Target::Pending(vectors, at) => vectors.msix.read_pending(at, data),
            Target::Device => self.device.read(self.index, offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match self.target(offset) {
            Target::Table(
                TrappedVectors {
                    msix, interrupts, ..
                },
                at,
            ) => {
                msix.write_table(at, data);
                // A write that has an effect is within one entry. The table has at most 2,048
                // entries.
                interrupts.vector_changed(msix, (at / TABLE_ENTRY_SIZE) as u16);
            }
            // Read-only (PCI 3.0, 6.8.2.10).
            Target::Pending(..) => {}
            // Read-only as well.
            Target::Device if self.index == u32::from(BarIndex::ROM.get()) => {}
            Target::Device => self.device.write(self.index, offset, data),
        }
    }
}
