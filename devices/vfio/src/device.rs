//! A PCI device in the terms of VFIO, whoever serves it: the kernel or another process.

use std::{io, os::fd::BorrowedFd};

use device_model::memory::HostMemory;
use pci::Bdf;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX,
};
use vmm_sys_util::eventfd::EventFd;

/// Interrupts of one kind.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Irqs {
    /// The interrupt line, one.
    Line = VFIO_PCI_INTX_IRQ_INDEX,
    /// Message-signalled.
    Msi = VFIO_PCI_MSI_IRQ_INDEX,
    /// Message-signalled, with a table in a BAR.
    Msix = VFIO_PCI_MSIX_IRQ_INDEX,
}

/// A device could not be brought back to its state after power-on.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// Nothing resets it.
    #[error(
        "it has no reset of its own (FLR, power management), and its bus cannot be reset: in a \
         slot or behind a port of its own it could be"
    )]
    None,
    /// Others would lose their state with it.
    #[error("it has no reset of its own, and a reset of its bus would reset {0} too")]
    Shared(String),
    /// Others of the VM would lose their state with it.
    #[error(
        "it has no reset of its own, and that of its bus has to wait until {0} leave the VM, too"
    )]
    Later(String),
    /// The reset failed.
    #[error("its reset failed: {0}")]
    Failed(#[from] io::Error),
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

    /// Number of interrupts of a kind.
    fn irq_count(&self, irqs: Irqs) -> u32;

    /// Whether interrupts of a kind can be connected beyond those of the first
    /// [`Device::connect`], without a [`Device::disconnect`] before.
    fn irqs_grow(&self, irqs: Irqs) -> bool;

    /// Raises these eventfds for the interrupts of a kind from `first` on; no eventfd, no
    /// interrupt. The first call switches the kind on, with as many interrupts as it reaches.
    fn connect(&self, irqs: Irqs, first: u16, eventfds: &[Option<&EventFd>]) -> io::Result<()>;

    /// Asserts the interrupt line by `assert`, once, and again when `served` is signalled if the
    /// device still wants it. Switched off with [`Device::disconnect`].
    fn connect_line(&self, assert: &EventFd, served: &EventFd) -> io::Result<()> {
        let _ = (assert, served);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Switches all interrupts of a kind off.
    fn disconnect(&self, irqs: Irqs) -> io::Result<()>;

    /// Lets other devices of the VM reach memory of this one, which the guest sees at an address,
    /// until the result is dropped.
    fn offer(&self, guest: u64, memory: HostMemory) -> Option<Box<dyn Send>> {
        let _ = (guest, memory);
        None
    }

    /// The guest finds it at an address from now on.
    fn plugged(&self, bdf: Bdf) -> io::Result<()> {
        let _ = bdf;
        Ok(())
    }

    /// The guest has it no more, and it is silent.
    fn unplugged(&self) {}

    /// Back to the state after power-on.
    fn reset(&self) -> Result<(), ResetError>;

    /// The guest resets the bus of the device: it does not use it until [`Device::reset_bus`], which
    /// follows when all of the bus have heard this.
    fn prepare_bus_reset(&self) {}

    /// Back to the state after power-on, by a reset of its bus if that can be, else by its own: false
    /// then.
    fn reset_bus(&self) -> Result<bool, ResetError> {
        self.reset().map(|()| false)
    }

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
