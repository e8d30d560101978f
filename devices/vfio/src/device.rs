//! The interface of a PCI device in VFIO's terms, whether the kernel or another process serves it.

use std::{io, os::fd::BorrowedFd};

use device_model::memory::HostMemory;
use pci::Bdf;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX,
};
use vmm_sys_util::eventfd::EventFd;

/// A kind of interrupts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Irqs {
    /// The interrupt line (INTx).
    Line = VFIO_PCI_INTX_IRQ_INDEX,
    /// MSI.
    Msi = VFIO_PCI_MSI_IRQ_INDEX,
    /// MSI-X, with a table in a BAR.
    Msix = VFIO_PCI_MSIX_IRQ_INDEX,
}

/// Why a device could not be returned to its power-on state.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// There is no way to reset it.
    #[error(
        "it has no reset of its own (FLR, power management), and its bus cannot be reset: in a \
         slot or behind a port of its own it could be"
    )]
    None,
    /// Devices that do not belong to the VM would be reset with it.
    #[error("it has no reset of its own, and a reset of its bus would reset {0} too")]
    Shared(String),
    /// Other devices of the VM would be reset with it.
    #[error(
        "it has no reset of its own, and that of its bus has to wait until {0} leave the VM, too"
    )]
    Later(String),
    /// The reset failed.
    #[error("its reset failed: {0}")]
    Failed(#[from] io::Error),
}

/// The mappable parts of a region.
pub struct Mappable<'a> {
    /// The file to map.
    pub file: BorrowedFd<'a>,
    /// Offset of the region in the file.
    pub offset: u64,
    /// (start, end) offsets in the region, which need not be multiples of the page size.
    pub areas: Vec<(u64, u64)>,
    /// The parts may be mapped writable.
    pub writable: bool,
}

/// Eventfds for consecutive interrupts, from an index on; `None` disconnects an interrupt.
pub type IrqRun<'a> = (u16, Vec<Option<&'a EventFd>>);

/// A PCI device in VFIO's terms: regions, of which the first six are its BARs, and interrupts that
/// arrive through eventfds.
///
/// Failed accesses behave as for an absent device: reads return all ones, writes are dropped. Do
/// not trust any value that a device returns.
pub trait Device: Send + Sync {
    /// Name for messages.
    fn name(&self) -> &str;

    /// Size of a region in bytes; 0 if there is no such region.
    fn region_size(&self, region: u32) -> u64;

    /// The parts of a region that can be mapped into the guest.
    fn mappable(&self, region: u32) -> Option<Mappable<'_>>;

    /// Reads a region.
    fn read(&self, region: u32, offset: u64, data: &mut [u8]);

    /// Writes a region.
    fn write(&self, region: u32, offset: u64, data: &[u8]);

    /// Number of interrupts of a kind.
    fn irq_count(&self, irqs: Irqs) -> u32;

    /// Whether more interrupts of a kind can be connected than in the first [`Device::connect`],
    /// without a [`Device::disconnect`] before.
    fn irqs_grow(&self, irqs: Irqs) -> bool;

    /// Connects eventfds to the interrupts of a kind, from index `first` on; `None` disconnects an
    /// interrupt. The first call enables the kind, with as many interrupts as it spans.
    fn connect(&self, irqs: Irqs, first: u16, eventfds: &[Option<&EventFd>]) -> io::Result<()>;

    /// Connects several runs of interrupts, as [`Device::connect`] connects each.
    fn connect_runs(&self, irqs: Irqs, runs: &[IrqRun]) -> io::Result<()> {
        let mut runs = runs.iter();
        runs.try_for_each(|(first, eventfds)| self.connect(irqs, *first, eventfds))
    }

    /// Writes `assert` when the interrupt line is asserted, and again, after `served` was
    /// signalled, if the device still needs it. Undone by [`Device::disconnect`].
    fn connect_line(&self, assert: &EventFd, served: &EventFd) -> io::Result<()> {
        let _ = (assert, served);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Disables all interrupts of a kind.
    fn disconnect(&self, irqs: Irqs) -> io::Result<()>;

    /// Offers memory of this device, at its guest-physical address, to other devices of the VM,
    /// until the result is dropped.
    fn offer(&self, guest: u64, memory: HostMemory) -> Option<Box<dyn Send>> {
        let _ = (guest, memory);
        None
    }

    /// The device was plugged in at an address of the guest's PCI bus.
    fn plugged(&self, bdf: Bdf) -> io::Result<()> {
        let _ = bdf;
        Ok(())
    }

    /// The device was removed from the guest, and has been silenced.
    fn unplugged(&self) {}

    /// Returns to the power-on state.
    fn reset(&self) -> Result<(), ResetError>;

    /// The guest resets the device's bus: it does not use the device until [`Device::reset_bus`],
    /// which follows when all devices on the bus have received this call.
    fn prepare_bus_reset(&self) {}

    /// Returns to the power-on state, by a reset of its bus if possible (`true`), else by its own
    /// (`false`).
    fn reset_bus(&self) -> Result<bool, ResetError> {
        self.reset().map(|()| false)
    }

    /// Reads configuration space; bytes that do not exist read as ones.
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        data.fill(0xff);
        if self.has_config(offset, data.len()) {
            self.read(VFIO_PCI_CONFIG_REGION_INDEX, offset as u64, data);
        }
    }

    /// Writes configuration space, as far as the device's server permits it.
    fn write_config(&self, offset: usize, data: &[u8]) {
        if self.has_config(offset, data.len()) {
            self.write(VFIO_PCI_CONFIG_REGION_INDEX, offset as u64, data);
        }
    }

    /// Whether an access is within configuration space.
    fn has_config(&self, offset: usize, len: usize) -> bool {
        let size = self.region_size(VFIO_PCI_CONFIG_REGION_INDEX);
        offset.saturating_add(len) as u64 <= size
    }
}
