//! Accesses to a BAR that are trapped: the MSI-X table, and what cannot be mapped.

use std::{ops::Range, sync::Arc};

use vfio_ioctls::VfioDevice;

use crate::{bus::BusDevice, pci::MsixTable};

/// The MSI-X table and pending bits in a BAR.
pub struct TrappedVectors {
    /// The table's place, if it is in this BAR.
    pub table: Option<Range<u64>>,
    /// The pending bits' place, if they are in this BAR.
    pub pending: Option<Range<u64>>,
    /// What the guest sees there.
    pub msix: Arc<MsixTable>,
}

/// A BAR of a physical device.
pub struct Bar {
    /// The device.
    pub device: Arc<VfioDevice>,
    /// Number of the BAR, which is also its VFIO region.
    pub index: u32,
    /// Its interrupt vectors.
    pub vectors: Option<TrappedVectors>,
}

enum Target<'a> {
    Table(&'a MsixTable, u64),
    Pending(&'a MsixTable, u64),
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
            Target::Table(&vectors.msix, at)
        } else if let Some(at) = within(&vectors.pending) {
            Target::Pending(&vectors.msix, at)
        } else {
            Target::Device
        }
    }
}

impl BusDevice for Bar {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.target(offset) {
            Target::Table(msix, at) => msix.read_table(at, data),
            Target::Pending(msix, at) => msix.read_pending(at, data),
            Target::Device => {
                data.fill(0xff);
                self.device.region_read(self.index, data, offset);
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match self.target(offset) {
            Target::Table(msix, at) => msix.write_table(at, data),
            // Read-only (PCI 3.0, 6.8.2.10).
            Target::Pending(..) => {}
            Target::Device => self.device.region_write(self.index, data, offset),
        }
    }
}
