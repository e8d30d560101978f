//! The I/O page tables of a VM's devices, which the kernel offers in two ways.

use std::{collections::BTreeSet, io, os::fd::RawFd, sync::Arc};

use vfio_ioctls::{VfioDevice, VfioDeviceFd, VfioError};

use super::{
    Error,
    groups::Groups,
    iommufd::Iommufd,
    place::{Place, Way},
    reach::Reach,
};

/// One address space, and the devices that are in it.
pub trait Tables: Send + Sync {
    /// Opens a device, which can reach from then on what is mapped.
    fn open_device(&self, place: &Place) -> Result<VfioDevice, Error>;

    /// What can be mapped. Depends on the devices that there are.
    fn reach(&self) -> io::Result<Reach>;

    /// Lets the devices read and write `len` bytes at `host`, at `guest` in their address space.
    ///
    /// # Safety
    /// Until it is unmapped again, the memory stays mapped in this process, and is accessed only
    /// as bytes that may change at any time.
    unsafe fn map(&self, guest: u64, len: u64, host: *mut u8) -> Result<(), VfioError>;

    /// Takes back what was mapped by one call of [`Tables::map`].
    fn unmap(&self, guest: u64, len: u64) -> Result<(), VfioError>;

    /// Takes everything back, after the last device has gone.
    fn clear(&self);

    /// Of what the limit of locked memory is, for people.
    fn limit_of(&self) -> &'static str;

    /// Descriptors that prove to the kernel that the devices of groups are this VM's.
    fn proof(&self, groups: &BTreeSet<&str>) -> Vec<RawFd>;
}

/// An address space without devices. Through `hypervisor`, its VFIO device, the hypervisor learns
/// which devices the VM uses.
pub fn open(way: Way, hypervisor: VfioDeviceFd) -> Result<Box<dyn Tables>, Error> {
    let hypervisor = Arc::new(hypervisor);
    Ok(match way {
        Way::Groups => Box::new(Groups::new(hypervisor)?),
        Way::Iommufd => Box::new(Iommufd::new(hypervisor)?),
    })
}

/// The kernel's error number, of a mapping that failed.
pub fn errno(error: &VfioError) -> Option<i32> {
    use iommufd_ioctls::IommufdError::IommuIoasMap;
    match error {
        VfioError::IommuDmaMap(error) | VfioError::IommufdIoctlError(IommuIoasMap(error)) => {
            Some(error.errno())
        }
        _ => None,
    }
}

/// What failed, in words: vfio-ioctls says of iommufd's calls only that one did.
pub fn reason(error: &VfioError) -> String {
    match error {
        VfioError::IommufdIoctlError(source) => source.to_string(),
        other => other.to_string(),
    }
}
