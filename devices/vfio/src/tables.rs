//! The I/O page tables of devices.

use std::io;

use vfio_ioctls::{VfioDevice, VfioError};
use virtio::iommu::Access;

use super::{Error, host_device::HostDevice, reach::Reach};

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
