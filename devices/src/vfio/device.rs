//! A PCI device in the terms of VFIO, whoever serves it: the kernel or another process.

use std::{io, os::fd::BorrowedFd};

use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
};
use vmm_sys_util::eventfd::EventFd;

/// Interrupts of one kind.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Irqs {
    /// Message-signalled.
    Msi = VFIO_PCI_MSI_IRQ_INDEX,
    /// Message-signalled, with a table in a BAR.
    Msix = VFIO_PCI_MSIX_IRQ_INDEX,
}

/// What of a region can be mapped.
pub struct Mappable<'a> {
    /// The file that has it.
    pub file: BorrowedFd<'a>,
    /// Where the region starts in the file.
    pub offset: u64,
    /// Starts and ends in the region, which need not be multiples of the page size.
    pub areas: Vec<(u64, u64)>,
    /// It can be written.
    pub writable: bool,
}

/// A PCI device in the terms of VFIO: regions, of which the first six are its BARs, and interrupts
/// that arrive as eventfds.
///
/// Accesses that fail are like those to a device that is not there: reads give ones, writes are
/// dropped. Whatever a device answers may be a lie.
pub trait Device: Send + Sync {
    /// What it is called in messages.
    fn name(&self) -> &str;

    /// Bytes of a region; 0 if there is no such region.
    fn region_size(&self, region: u32) -> u64;

    /// What of a region can be mapped into the guest.
    fn mappable(&self, region: u32) -> Option<Mappable<'_>>;

    /// Reads a region.
    fn read(&self, region: u32, offset: u64, data: &mut [u8]);

    /// Writes a region.
    fn write(&self, region: u32, offset: u64, data: &[u8]);

    /// Raises these eventfds for the first interrupts of a kind, and nothing for the others. None
    /// switches all of them off; more than none only follow a call with none.
    fn connect(&self, irqs: Irqs, eventfds: &[&EventFd]) -> io::Result<()>;

    /// Back to the state after power-on.
    fn reset(&self);

    /// Reads configuration space; what is not there reads as ones.
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        data.fill(0xff);
        if self.has_config(offset, data.len()) {
            self.read(VFIO_PCI_CONFIG_REGION_INDEX, offset as u64, data);
        }
    }

    /// Writes configuration space, as far as whoever serves the device allows it.
    fn write_config(&self, offset: usize, data: &[u8]) {
        if self.has_config(offset, data.len()) {
            self.write(VFIO_PCI_CONFIG_REGION_INDEX, offset as u64, data);
        }
    }

    /// Whether an access lies within configuration space.
    fn has_config(&self, offset: usize, len: usize) -> bool {
        let size = self.region_size(VFIO_PCI_CONFIG_REGION_INDEX);
        offset.saturating_add(len) as u64 <= size
    }
}
