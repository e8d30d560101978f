//! A device of the host, in sysfs and through VFIO.

use std::{
    fs, io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_WRITE,
};
use vfio_ioctls::{VfioDevice, VfioError, VfioRegionInfoCap};

use super::Error;

const PAGE: u64 = 4096;

/// Where a device is on the host.
pub struct Place {
    /// Its folder in sysfs.
    pub path: PathBuf,
    /// Its address, such as `0000:01:00.0`.
    pub address: String,
    /// Its IOMMU group.
    pub group: String,
}

impl Place {
    /// Looks at a device in sysfs, and checks what VFIO would refuse with a bare error number.
    pub fn new(path: &Path) -> Result<Self, Error> {
        let found = fs::canonicalize(path).ok();
        let found = found.filter(|path| path.join("vendor").exists());
        let address = found
            .as_deref()
            .and_then(Path::file_name)
            .and_then(|name| name.to_str());
        let (Some(found), Some(address)) = (&found, address) else {
            return Err(Error::NoDevice {
                path: path.to_owned(),
            });
        };
        let device = address.to_owned();
        let link = |name| {
            let target = fs::read_link(found.join(name)).ok()?;
            Some(target.file_name()?.to_str()?.to_owned())
        };
        let driver = link("driver");
        if driver.as_deref() != Some("vfio-pci") {
            let driver = driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(Error::Driver { device, driver });
        }
        let Some(group) = link("iommu_group") else {
            return Err(Error::NoGroup { device });
        };
        Ok(Self {
            path: found.clone(),
            address: device,
            group,
        })
    }

    /// What an error of VFIO means for this device.
    pub fn explain(&self, error: VfioError) -> Error {
        let device = self.address.clone();
        let group = self.group.clone();
        match error {
            VfioError::OpenGroup(source, _) if source.raw_os_error() == Some(libc::EBUSY) => {
                Error::Busy { device, group }
            }
            VfioError::OpenGroup(source, group) => Error::Open {
                path: Path::new("/dev/vfio").join(group),
                source,
            },
            VfioError::GroupViable => Error::GroupNotViable { device, group },
            source => Error::Vfio {
                action: "open the device",
                source,
            },
        }
    }
}

/// A mapping of part of a BAR into this process.
pub struct BarMapping {
    /// Host virtual address.
    pub address: *mut u8,
    /// Offset in the BAR, in whole pages.
    pub offset: u64,
    /// Bytes, whole pages.
    pub len: u64,
    /// Nobody may write to it.
    pub read_only: bool,
}

// SAFETY: the pointer is only handed to KVM; this process never looks through it.
unsafe impl Send for BarMapping {}

impl BarMapping {
    fn new(device: &VfioDevice, bar: u8, offset: u64, len: u64) -> io::Result<Self> {
        let writable = device.get_region_flags(bar.into()) & VFIO_REGION_INFO_FLAG_WRITE != 0;
        let protection = if writable {
            libc::PROT_READ | libc::PROT_WRITE
        } else {
            libc::PROT_READ
        };
        let at = device.get_region_offset(bar.into()) + offset;
        // SAFETY: a new mapping of the device's file, at an address that the kernel picks.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len as usize,
                protection,
                libc::MAP_SHARED,
                device.as_raw_fd(),
                at as libc::off_t,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            address: address.cast(),
            offset,
            len,
            read_only: !writable,
        })
    }
}

impl Drop for BarMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; the guest's view of it is removed before.
        unsafe { libc::munmap(self.address.cast(), self.len as usize) };
    }
}

/// Maps what the kernel lets be mapped of a BAR, without the pages that `trapped` ranges touch.
pub fn map_bar(
    device: &Arc<VfioDevice>,
    bar: u8,
    trapped: &[(u64, u64)],
) -> Result<Vec<BarMapping>, Error> {
    let index = u32::from(bar);
    if device.get_region_flags(index) & VFIO_REGION_INFO_FLAG_MMAP == 0 {
        return Ok(Vec::new());
    }
    let sparse =
        device
            .get_region_caps(index)
            .into_iter()
            .find_map(|capability| match capability {
                VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
                _ => None,
            });
    let areas: Vec<(u64, u64)> = match sparse {
        Some(areas) => areas
            .iter()
            .map(|area| (area.offset, area.offset.saturating_add(area.size)))
            .collect(),
        None => vec![(0, device.get_region_size(index))],
    };
    without(&areas, trapped)
        .into_iter()
        .map(|(start, end)| {
            BarMapping::new(device, bar, start, end - start)
                .map_err(|source| Error::MapBar { bar, source })
        })
        .collect()
}

/// `areas` in whole pages, less the pages that `holes` touch. All are start and end.
fn without(areas: &[(u64, u64)], holes: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left: Vec<_> = areas
        .iter()
        .map(|(start, end)| (start.next_multiple_of(PAGE), end / PAGE * PAGE))
        .collect();
    for (from, to) in holes {
        let (from, to) = (from / PAGE * PAGE, to.next_multiple_of(PAGE));
        left = left
            .into_iter()
            .flat_map(|(start, end)| [(start, end.min(from)), (start.max(to), end)])
            .collect();
    }
    left.retain(|(start, end)| start < end);
    left
}

/// Reads configuration space of the device; what is not there reads as ones.
pub fn read_config(device: &VfioDevice, offset: usize, data: &mut [u8]) {
    data.fill(0xff);
    let size = device.get_region_size(VFIO_PCI_CONFIG_REGION_INDEX) as usize;
    if offset.saturating_add(data.len()) <= size {
        device.region_read(VFIO_PCI_CONFIG_REGION_INDEX, data, offset as u64);
    }
}

/// Writes configuration space of the device, as far as vfio-pci allows it.
pub fn write_config(device: &VfioDevice, offset: usize, data: &[u8]) {
    let size = device.get_region_size(VFIO_PCI_CONFIG_REGION_INDEX) as usize;
    if offset.saturating_add(data.len()) <= size {
        device.region_write(VFIO_PCI_CONFIG_REGION_INDEX, data, offset as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trapped_pages_are_cut_out_of_what_is_mapped() {
        assert_eq!(without(&[(0, 0x4000)], &[]), [(0, 0x4000)]);
        assert_eq!(
            without(&[(0, 0x4000)], &[(0x2010, 0x2020)]),
            [(0, 0x2000), (0x3000, 0x4000)]
        );
        assert_eq!(
            without(&[(0, 0x4000)], &[(0, 0x10), (0x3ff0, 0x4000)]),
            [(0x1000, 0x3000)]
        );
        assert_eq!(without(&[(0, 0x100)], &[]), [], "less than a page");
        assert_eq!(without(&[(0, 0x1000)], &[(0x800, 0x810)]), []);
    }

    #[test]
    fn what_is_no_device_is_named() {
        let error = Place::new(Path::new("/sys/bus/pci/devices/none")).err();
        assert!(matches!(error, Some(Error::NoDevice { .. })));
        let error = Place::new(Path::new("/tmp")).err();
        assert!(matches!(error, Some(Error::NoDevice { .. })));
    }
}
