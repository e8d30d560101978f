//! The I/O page tables of devices, for which the kernel has two interfaces.

use std::{collections::BTreeSet, io, os::fd::RawFd, sync::Arc};

use iommufd_ioctls::IommuFd;
use vfio_ioctls::{VfioDevice, VfioDeviceFd, VfioError};
use virtio::iommu::Access;

use super::{
    Error,
    groups::{self, Groups},
    host_device::{HostDevice, Way},
    iommufd::{self, Iommufd},
    reach::Reach,
};

/// One address space, and the devices in it.
pub trait Tables: Send + Sync {
    /// Opens a device, which from then on can reach what is mapped.
    fn open_device(&self, host_device: &HostDevice) -> Result<VfioDevice, Error>;

    /// The addresses that can be mapped. They depend on the devices present.
    fn reach(&self) -> io::Result<Reach>;

    /// Maps `len` bytes at `host` to `at` in the devices' address space.
    ///
    /// # Safety
    /// Until it is unmapped again, the memory must stay mapped in this process, and be accessed
    /// only as bytes that may change at any time.
    unsafe fn map(&self, at: u64, len: u64, host: *mut u8, access: Access) -> io::Result<()>;

    /// Unmaps a gapless range that consists of one or more complete [`Tables::map`] calls.
    fn unmap(&self, at: u64, len: u64) -> io::Result<()>;

    /// Removes all mappings with one call. An error if the kernel has no such call, or has not
    /// removed all of them.
    fn clear(&self) -> io::Result<()>;
}

/// Creates address spaces of one kind.
pub enum Provider {
    /// Containers.
    Groups(Arc<VfioDeviceFd>),
    /// Address spaces of this one iommufd: a bus reset requires all devices on the bus to be bound
    /// to it.
    Iommufd(Arc<IommuFd>, Arc<VfioDeviceFd>),
}

impl Provider {
    /// `hypervisor` is KVM's VFIO device, through which KVM learns which devices the VM uses.
    pub fn new(way: Way, hypervisor: VfioDeviceFd) -> Result<Self, Error> {
        let hypervisor = Arc::new(hypervisor);
        Ok(match way {
            Way::Groups => Self::Groups(hypervisor),
            Way::Iommufd => Self::Iommufd(iommufd::open()?, hypervisor),
        })
    }

    /// Creates an address space without devices and mappings.
    pub fn tables(&self) -> Result<Box<dyn Tables>, Error> {
        Ok(match self {
            Self::Groups(hypervisor) => Box::new(Groups::new(Arc::clone(hypervisor))?),
            Self::Iommufd(file, hypervisor) => {
                Box::new(Iommufd::new(Arc::clone(file), Arc::clone(hypervisor))?)
            }
        })
    }

    /// What the limit of locked memory applies to, for messages.
    pub fn limit_of(&self) -> &'static str {
        match self {
            Self::Groups(_) => "this process",
            Self::Iommufd(..) => "all processes of this user together",
        }
    }

    /// Descriptors that prove to the kernel that the devices of these groups belong to this VM.
    pub fn proof(&self, groups: &BTreeSet<&str>) -> Vec<RawFd> {
        match self {
            Self::Groups(_) => groups::descriptors(groups),
            // The kernel knows the owner of each device.
            Self::Iommufd(..) => Vec::new(),
        }
    }
}

/// Converts the kernel's error for a failed unmapping.
pub fn unmap_error(error: VfioError) -> io::Error {
    use iommufd_ioctls::IommufdError::IommuIoasUnmap;
    match error {
        VfioError::IommuDmaUnmap(error) | VfioError::IommufdIoctlError(IommuIoasUnmap(error)) => {
            io::Error::from_raw_os_error(error.errno())
        }
        other => io::Error::other(other),
    }
}
