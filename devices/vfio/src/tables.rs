//! The I/O page tables of devices, which the kernel offers in two ways.

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

/// One address space, and the devices that are in it.
pub trait Tables: Send + Sync {
    /// Opens a device, which can reach from then on what is mapped.
    fn open_device(&self, host_device: &HostDevice) -> Result<VfioDevice, Error>;

    /// What can be mapped. Depends on the devices that there are.
    fn reach(&self) -> io::Result<Reach>;

    /// Lets the devices reach `len` bytes at `host`, at `at` in their address space.
    ///
    /// # Safety
    /// Until it is unmapped again, the memory stays mapped in this process, and is accessed only
    /// as bytes that may change at any time.
    unsafe fn map(&self, at: u64, len: u64, host: *mut u8, access: Access) -> io::Result<()>;

    /// Takes back what was mapped by one or more whole calls of [`Tables::map`], without gaps.
    fn unmap(&self, at: u64, len: u64) -> io::Result<()>;

    /// Takes back all that was mapped, in one call. An error where the kernel has no such call, or
    /// has not taken back all of it.
    fn clear(&self) -> io::Result<()>;
}

/// Makes address spaces, all of them in the same way.
pub enum Provider {
    /// Containers.
    Groups(Arc<VfioDeviceFd>),
    /// Address spaces of this iommufd: a reset of a bus asks for all devices on it to be there.
    Iommufd(Arc<IommuFd>, Arc<VfioDeviceFd>),
}

impl Provider {
    /// Through `hypervisor`, its VFIO device, the hypervisor learns which devices the VM uses.
    pub fn new(way: Way, hypervisor: VfioDeviceFd) -> Result<Self, Error> {
        let hypervisor = Arc::new(hypervisor);
        Ok(match way {
            Way::Groups => Self::Groups(hypervisor),
            Way::Iommufd => Self::Iommufd(iommufd::open()?, hypervisor),
        })
    }

    /// An address space without devices, in which nothing is mapped.
    pub fn tables(&self) -> Result<Box<dyn Tables>, Error> {
        Ok(match self {
            Self::Groups(hypervisor) => Box::new(Groups::new(Arc::clone(hypervisor))?),
            Self::Iommufd(file, hypervisor) => {
                Box::new(Iommufd::new(Arc::clone(file), Arc::clone(hypervisor))?)
            }
        })
    }

    /// Of what the limit of locked memory is, for people.
    pub fn limit_of(&self) -> &'static str {
        match self {
            Self::Groups(_) => "this process",
            Self::Iommufd(..) => "all processes of this user together",
        }
    }

    /// Descriptors that prove to the kernel that the devices of groups are this VM's.
    pub fn proof(&self, groups: &BTreeSet<&str>) -> Vec<RawFd> {
        match self {
            Self::Groups(_) => groups::descriptors(groups),
            // The kernel knows whose devices they are.
            Self::Iommufd(..) => Vec::new(),
        }
    }
}

/// What the kernel says of an unmapping that failed.
pub fn unmap_error(error: VfioError) -> io::Error {
    use iommufd_ioctls::IommufdError::IommuIoasUnmap;
    match error {
        VfioError::IommuDmaUnmap(error) | VfioError::IommufdIoctlError(IommuIoasUnmap(error)) => {
            io::Error::from_raw_os_error(error.errno())
        }
        other => io::Error::other(other),
    }
}
