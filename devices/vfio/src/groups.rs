//! Opens devices by IOMMU group, in a container. Every kernel with VFIO supports this.

use std::{collections::BTreeSet, fs, io, os::fd::RawFd, path::Path, sync::Arc};

use vfio_ioctls::{VfioContainer, VfioDevice, VfioDeviceFd, VfioError};
use virtio::iommu::Access;

use super::{
    Error,
    host_device::HostDevice,
    ioctl,
    reach::Reach,
    tables::{self, Tables},
};

/// A container.
pub struct Groups {
    container: Arc<VfioContainer>,
}

impl Groups {
    /// Creates an empty container.
    pub fn new(hypervisor: Arc<VfioDeviceFd>) -> Result<Self, Error> {
        let container = VfioContainer::new(Some(hypervisor)).map_err(|source| match source {
            VfioError::OpenContainer(source) => Error::Open {
                path: "/dev/vfio/vfio".into(),
                source,
            },
            source => Error::Vfio {
                action: "use the IOMMU",
                source,
            },
        })?;
        Ok(Self {
            container: Arc::new(container),
        })
    }
}

impl Tables for Groups {
    fn open_device(&self, host_device: &HostDevice) -> Result<VfioDevice, Error> {
        let container = Arc::clone(&self.container) as Arc<_>;
        let device = VfioDevice::new(&host_device.path, container, true)
            .map_err(|source| explain(host_device, source))?;
        let HostDevice { address, group, .. } = host_device;
        log::info!("{address} comes through its IOMMU group, /dev/vfio/{group}");
        Ok(device)
    }

    fn reach(&self) -> io::Result<Reach> {
        ioctl::reach_of_container(&*self.container)
    }

    unsafe fn map(&self, at: u64, len: u64, host: *mut u8, access: Access) -> io::Result<()> {
        // SAFETY: upheld by the caller.
        unsafe { ioctl::map_in_container(&*self.container, at, len, host, access) }
    }

    fn unmap(&self, at: u64, len: u64) -> io::Result<()> {
        let unmapped = self.container.vfio_dma_unmap(at, len as usize);
        unmapped.map_err(tables::unmap_error)
    }

    fn clear(&self) -> io::Result<()> {
        ioctl::clear_container(&*self.container)
    }
}

/// Descriptors of those IOMMU groups that this process has opened.
pub fn descriptors(groups: &BTreeSet<&str>) -> Vec<RawFd> {
    groups.iter().copied().filter_map(descriptor).collect()
}

/// Translates a VFIO error for a device.
fn explain(host_device: &HostDevice, error: VfioError) -> Error {
    let device = host_device.address.clone();
    let group = host_device.group.clone();
    match error {
        VfioError::OpenGroup(source, _) if source.raw_os_error() == Some(libc::EBUSY) => {
            Error::Busy { device, group }
        }
        VfioError::OpenGroup(source, group) => Error::Open {
            path: Path::new("/dev/vfio").join(group),
            source,
        },
        VfioError::GroupViable => Error::GroupNotViable { device, group },
        VfioError::ContainerSetIOMMU(error) if error.errno() == libc::EPERM => {
            Error::UnsafeInterrupts {
                device,
                module: "vfio_iommu_type1",
            }
        }
        VfioError::GroupGetDeviceFD(error) => refused(host_device, error.into()),
        source => not_opened(host_device, source),
    }
}

/// Explains why a driver refuses to open its device.
pub fn refused(host_device: &HostDevice, source: io::Error) -> Error {
    let device = host_device.address.clone();
    match host_device.function_of_vfio() {
        Some(physical) if source.raw_os_error() == Some(libc::EACCES) => {
            Error::NeedsToken { device, physical }
        }
        _ => Error::Withheld {
            device,
            driver: host_device.driver(),
            source,
        },
    }
}

/// Translates a VFIO error for a device that its driver has opened.
pub fn not_opened(host_device: &HostDevice, error: VfioError) -> Error {
    match error {
        VfioError::VfioDeviceGetInfoOther | VfioError::VfioDeviceGetInfoPCI => Error::NotPci {
            device: host_device.address.clone(),
            driver: host_device.driver(),
        },
        source => Error::Vfio {
            action: "open the device",
            source,
        },
    }
}

/// The descriptor of an IOMMU group that this process has opened: vfio-ioctls does not expose it,
/// and a group cannot be opened twice.
fn descriptor(group: &str) -> Option<RawFd> {
    /// More files than a VM with hundreds of sockets and queues has open.
    const MOST: RawFd = 0x1_0000;
    let path = Path::new("/dev/vfio").join(group);
    (0..MOST).find(|fd| fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|file| file == path))
}
