//! Opens devices by their device files, in an address space of iommufd (Linux 6.6 and newer).
//!
//! Devices share an address space, and also the page tables as far as their IOMMUs are alike: the
//! kernel manages that. A device leaves the address space when it is closed.

use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    path::Path,
    sync::{Arc, atomic::Ordering},
};

use iommufd_bindings::iommufd::{
    IOMMUFD_CMD_IOAS_IOVA_RANGES, IOMMUFD_TYPE, iommu_ioas_iova_ranges, iommu_ioas_map,
    iommu_ioas_unmap, iommu_iova_range, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
};
use iommufd_ioctls::{IommuFd, IommufdError};
use vfio_bindings::bindings::vfio::{VFIO_BASE, VFIO_TYPE, vfio_device_bind_iommufd};
use vfio_ioctls::{VfioDevice, VfioDeviceFd, VfioError, VfioIommufd};
use virtio::iommu::Access;
use vmm_sys_util::{ioctl::ioctl_with_mut_ref, ioctl_io_nr};

use super::{
    Error, groups,
    host_device::{self, HostDevice},
    ioctl::done,
    reach::Reach,
    tables::{self, Tables},
};

ioctl_io_nr!(VFIO_DEVICE_BIND_IOMMUFD, VFIO_TYPE.into(), VFIO_BASE + 18);
ioctl_io_nr!(
    IOMMU_IOAS_IOVA_RANGES,
    IOMMUFD_TYPE.into(),
    IOMMUFD_CMD_IOAS_IOVA_RANGES
);

/// An address space of iommufd.
pub struct Iommufd {
    space: Arc<VfioIommufd>,
}

impl Iommufd {
    /// Creates an empty address space of the iommufd `file`.
    pub fn new(file: Arc<IommuFd>, hypervisor: Arc<VfioDeviceFd>) -> Result<Self, Error> {
        let space =
            VfioIommufd::new(file, None, Some(hypervisor)).map_err(|source| Error::Vfio {
                action: "make an address space of iommufd",
                source,
            })?;
        Ok(Self {
            space: Arc::new(space),
        })
    }
}

impl Iommufd {
    /// Binds a device's file to the iommufd, if this process has not done so. Numbers of address spaces are small and
    /// count in each iommufd: with a file that is bound to another one, the device would get an address space there,
    /// which may be another VM's.
    fn bind(&self, file: &File, host_device: &HostDevice) -> Result<(), Error> {
        let iommufd = &**self.space.iommufd();
        let given = host_device.given.as_ref();
        if let Some(given) = given {
            let is_same = given.is_of(iommufd).map_err(|source| Error::Host {
                action: "compare descriptors of iommufds",
                source,
            })?;
            if !is_same {
                let device = host_device.address.clone();
                return Err(Error::OtherIommufd { device });
            }
            // At the last boot.
            if given.bound.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        match (bind(file, iommufd), given) {
            (Ok(()), _) => {}
            (Err(error), Some(_)) if error.raw_os_error() == Some(libc::EINVAL) => {
                let device = host_device.address.clone();
                return Err(Error::Bound { device });
            }
            (Err(source), _) => return Err(explain(host_device, source)),
        }
        if let Some(given) = given {
            given.bound.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Tables for Iommufd {
    fn open_device(&self, host_device: &HostDevice) -> Result<VfioDevice, Error> {
        let node = host_device.own_file()?;
        let file = match &host_device.given {
            Some(given) => given.device.try_clone(),
            None => host_device::open(node),
        };
        let file = file.map_err(|source| Error::OpenIommufd {
            path: node.to_owned(),
            source,
        })?;
        // vfio-ioctls would register the file with KVM first, and leave it open there if the device
        // is refused.
        self.bind(&file, host_device)?;
        let device = VfioDevice::new_from_bound_fd(file, Arc::clone(&self.space), false)
            .map_err(|source| groups::not_opened(host_device, source))?;
        let space = self.space.ioas().id();
        device.attach_hwpt(space).map_err(|source| match source {
            VfioError::VfioDeviceAttachIommufdPt(error) if error.errno() == libc::EADDRINUSE => {
                let device = host_device.address.clone();
                Error::Collides { device }
            }
            source => Error::Vfio {
                action: "give the device the VM's address space",
                source,
            },
        })?;
        log::info!(
            "{} comes through iommufd, {}",
            host_device.address,
            node.display()
        );
        Ok(device)
    }

    fn reach(&self) -> io::Result<Reach> {
        reach(&**self.space.iommufd(), self.space.ioas().id())
    }

    unsafe fn map(&self, at: u64, len: u64, host: *mut u8, access: Access) -> io::Result<()> {
        let mut flags = iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA;
        if access.read {
            flags |= iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE;
        }
        if access.write {
            flags |= iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE;
        }
        let map = iommu_ioas_map {
            size: size_of::<iommu_ioas_map>() as u32,
            flags,
            ioas_id: self.space.ioas().id(),
            user_va: host as u64,
            length: len,
            iova: at,
            ..Default::default()
        };
        // vfio-ioctls' own function maps only for both reading and writing. The caller upholds the
        // safety requirements; iommufd-ioctls declares the call safe.
        match self.space.iommufd().map_iommu_ioas(&map) {
            Ok(()) => Ok(()),
            Err(IommufdError::IommuIoasMap(error)) => {
                Err(io::Error::from_raw_os_error(error.errno()))
            }
            Err(other) => Err(io::Error::other(other)),
        }
    }

    fn unmap(&self, at: u64, len: u64) -> io::Result<()> {
        let unmapped = self.space.vfio_dma_unmap(at, len as usize);
        unmapped.map_err(tables::unmap_error)
    }

    fn clear(&self) -> io::Result<()> {
        // This range means all mappings.
        let mut unmap = iommu_ioas_unmap {
            size: size_of::<iommu_ioas_unmap>() as u32,
            ioas_id: self.space.ioas().id(),
            iova: 0,
            length: u64::MAX,
        };
        match self.space.iommufd().unmap_iommu_ioas(&mut unmap) {
            Ok(()) => Ok(()),
            Err(IommufdError::IommuIoasUnmap(error)) => {
                Err(io::Error::from_raw_os_error(error.errno()))
            }
            Err(other) => Err(io::Error::other(other)),
        }
    }
}

/// Binds a device to an iommufd, until its file is closed.
fn bind(device: &File, iommufd: &impl AsRawFd) -> io::Result<()> {
    let mut bind = vfio_device_bind_iommufd {
        argsz: size_of::<vfio_device_bind_iommufd>() as u32,
        iommufd: iommufd.as_raw_fd(),
        ..Default::default()
    };
    // SAFETY: the kernel reads and writes `argsz` bytes, which is the size of `bind`.
    done(unsafe { ioctl_with_mut_ref(device, VFIO_DEVICE_BIND_IOMMUFD(), &mut bind) })
}

/// Explains why the kernel does not give a device to this process.
fn explain(host_device: &HostDevice, source: io::Error) -> Error {
    let device = host_device.address.clone();
    let group = host_device.group.clone();
    match source.raw_os_error() {
        // Its group is in use through the group file, or the device itself is in use.
        Some(libc::EBUSY | libc::EINVAL) => Error::Busy { device, group },
        // Another device of the group does not belong to this VM, or interrupts are not remapped.
        Some(libc::EPERM) if host_device.used_by_host().is_some() => {
            Error::GroupNotViable { device, group }
        }
        Some(libc::EPERM) => match is_taken(&group) {
            Some(true) => Error::Busy { device, group },
            Some(false) => Error::UnsafeInterrupts {
                device,
                module: "iommufd",
            },
            None => Error::Refused { device, group },
        },
        _ => groups::refused(host_device, source),
    }
}

/// Whether a device of the group is in use: then the group cannot be opened as a whole. `None` if
/// that cannot be determined: without access to the group, or if the kernel has no groups.
fn is_taken(group: &str) -> Option<bool> {
    match host_device::open(&Path::new("/dev/vfio").join(group)) {
        Ok(_) => Some(false),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Some(true),
        Err(_) => None,
    }
}

/// The addresses that can be mapped in an address space (`ioas`).
fn reach(iommufd: &impl AsRawFd, ioas: u32) -> io::Result<Reach> {
    let mut ranges = vec![iommu_iova_range::default(); 32];
    loop {
        let mut ask = iommu_ioas_iova_ranges {
            size: size_of::<iommu_ioas_iova_ranges>() as u32,
            ioas_id: ioas,
            num_iovas: ranges.len() as u32,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes `size` bytes, which is the size of `ask`, and writes
        // at most `num_iovas` ranges, which is the length of `ranges`.
        let asked =
            done(unsafe { ioctl_with_mut_ref(iommufd, IOMMU_IOAS_IOVA_RANGES(), &mut ask) });
        let count = ask.num_iovas as usize;
        match asked {
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && count > ranges.len() => {
                ranges.resize(count, iommu_iova_range::default());
            }
            Err(error) => return Err(error),
            Ok(()) => {
                let ranges = ranges.iter().take(count);
                let ranges: Reach = ranges.map(|range| range.start..=range.last).collect();
                return Ok(ranges.with_page(ask.out_iova_alignment));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_the_numbers_of_the_kernels_headers() {
        assert_eq!(VFIO_DEVICE_BIND_IOMMUFD(), 0x3b76);
        assert_eq!(IOMMU_IOAS_IOVA_RANGES(), 0x3b84);
    }

    #[test]
    fn what_is_no_device_is_refused() {
        let file = File::open("/dev/null").unwrap();
        for result in [bind(&file, &file), reach(&file, 1).map(drop)] {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        }
    }

    fn explained(error: i32) -> Error {
        let host_device = HostDevice {
            path: "/nowhere".into(),
            address: "0000:01:00.0".to_owned(),
            group: "none".to_owned(),
            node: None,
            given: None,
        };
        explain(&host_device, io::Error::from_raw_os_error(error))
    }

    #[test]
    fn refusals_are_explained() {
        assert!(matches!(explained(libc::EBUSY), Error::Busy { .. }));
        assert!(matches!(explained(libc::EINVAL), Error::Busy { .. }));
        // Its group cannot be examined.
        assert!(matches!(explained(libc::EPERM), Error::Refused { .. }));
        assert!(matches!(explained(libc::ENODEV), Error::Withheld { .. }));
    }
}
