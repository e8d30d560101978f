//! Where a device is on the host, and how it can be had.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::Error;

/// The file through which devices reach guest RAM by iommufd.
pub const IOMMUFD: &str = "/dev/iommu";
/// The folder of the devices' own files.
const NODES: &str = "/dev/vfio/devices";

/// Where a device is on the host.
#[derive(Debug)]
pub struct HostDevice {
    /// Its folder in sysfs.
    pub(super) path: PathBuf,
    /// Its address, such as `0000:01:00.0`.
    pub(super) address: String,
    /// Its IOMMU group.
    pub(super) group: String,
    /// Its own file, `/dev/vfio/devices/vfioN`, if the kernel makes one.
    pub(super) node: Option<PathBuf>,
}

impl HostDevice {
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
        let driver = link(found, "driver");
        if driver.as_deref() != Some("vfio-pci") {
            let driver = driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(Error::Driver { device, driver });
        }
        let Some(group) = link(found, "iommu_group") else {
            return Err(Error::NoGroup { device });
        };
        Ok(Self {
            path: found.clone(),
            address: device,
            group,
            node: node(found),
        })
    }

    /// Its own file.
    pub(super) fn own_file(&self) -> Result<&Path, Error> {
        self.node.as_deref().ok_or_else(|| Error::NoNode {
            device: self.address.clone(),
        })
    }

    /// A device of this group that belongs to a driver of the host.
    pub(super) fn used_by_host(&self) -> Option<PathBuf> {
        // Those that vfio itself takes for harmless (Linux, Documentation/driver-api/vfio.rst).
        const HARMLESS: [&str; 3] = ["vfio-pci", "pci-stub", "pcieport"];
        let devices = fs::read_dir(self.path.join("iommu_group/devices")).ok()?;
        let mut devices = devices.filter_map(Result::ok).map(|entry| entry.path());
        devices.find(|path| link(path, "driver").is_some_and(|name| !HARMLESS.contains(&&*name)))
    }
}

/// The last part of where a link of a device leads.
fn link(device: &Path, name: &str) -> Option<String> {
    let target = fs::read_link(device.join(name)).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

/// The IOMMU group of the device with an address.
pub fn group_of(address: &str) -> Option<String> {
    link(
        &Path::new("/sys/bus/pci/devices").join(address),
        "iommu_group",
    )
}

/// The own file of the device with a folder in sysfs, if the kernel makes one.
fn node(device: &Path) -> Option<PathBuf> {
    let mut names = fs::read_dir(device.join("vfio-dev")).ok()?;
    Some(Path::new(NODES).join(names.next()?.ok()?.file_name()))
}

/// Opens a file of the kernel's for reading and writing.
pub fn open(path: &Path) -> io::Result<fs::File> {
    fs::File::options().read(true).write(true).open(path)
}

/// How the devices of a VM are had, and their address space.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// A device by itself, and an address space of iommufd.
    Iommufd,
    /// By IOMMU groups, in a container.
    Groups,
}

impl Way {
    /// iommufd, where the kernel has it and this process may use it, and groups otherwise. Nothing
    /// but iommufd if `only_iommufd`.
    pub fn of(host_device: &HostDevice, only_iommufd: bool) -> Result<Self, Error> {
        Self::with(host_device, Path::new(IOMMUFD), only_iommufd)
    }

    fn with(host_device: &HostDevice, iommufd: &Path, only_iommufd: bool) -> Result<Self, Error> {
        let missing = match usable(host_device, iommufd) {
            Ok(()) => return Ok(Self::Iommufd),
            Err(error) => error,
        };
        if only_iommufd {
            return Err(missing);
        }
        if let Error::OpenIommufd { path, source } = missing
            && source.kind() != io::ErrorKind::NotFound
        {
            let path = path.display();
            log::info!("IOMMU groups are used instead of iommufd: cannot open {path}: {source}");
        }
        Ok(Self::Groups)
    }
}

/// Whether this process may have a device by iommufd. To open its file changes nothing.
fn usable(host_device: &HostDevice, iommufd: &Path) -> Result<(), Error> {
    let node = host_device.own_file()?;
    for path in [iommufd, node] {
        open(path).map_err(|source| Error::OpenIommufd {
            path: path.to_owned(),
            source,
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_no_device_is_named() {
        for path in ["/sys/bus/pci/devices/none", "/tmp"] {
            let error = HostDevice::new(Path::new(path)).err();
            assert!(matches!(error, Some(Error::NoDevice { .. })));
        }
    }

    /// A device in a folder, with a group in which there is another one, of this driver.
    fn device(dir: &Path, other: &str) -> PathBuf {
        let device = dir.join("0000:01:00.0");
        let group = dir.join("groups/7");
        for folder in [&device, &group.join("devices/other"), &dir.join("drivers")] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(device.join("vendor"), "0x1234\n").unwrap();
        symlink(dir.join("drivers/vfio-pci"), device.join("driver")).unwrap();
        symlink(&group, device.join("iommu_group")).unwrap();
        symlink(
            dir.join("drivers").join(other),
            group.join("devices/other/driver"),
        )
        .unwrap();
        device
    }

    #[test]
    fn a_device_has_its_own_file_where_the_kernel_makes_one() {
        let dir = tempfile::tempdir().unwrap();
        let device = device(dir.path(), "vfio-pci");
        let host_device = HostDevice::new(&device).unwrap();
        assert_eq!(
            (&*host_device.address, &*host_device.group),
            ("0000:01:00.0", "7")
        );
        assert!(matches!(host_device.own_file(), Err(Error::NoNode { .. })));
        fs::create_dir_all(device.join("vfio-dev/vfio3")).unwrap();
        let host_device = HostDevice::new(&device).unwrap();
        assert_eq!(
            host_device.own_file().unwrap(),
            Path::new("/dev/vfio/devices/vfio3")
        );
    }

    #[test]
    fn a_driver_of_the_host_in_the_group_is_found() {
        for (driver, is_used) in [("e1000e", true), ("pcieport", false), ("vfio-pci", false)] {
            let dir = tempfile::tempdir().unwrap();
            let host_device = HostDevice::new(&device(dir.path(), driver)).unwrap();
            assert_eq!(host_device.used_by_host().is_some(), is_used, "{driver}");
        }
    }

    #[test]
    fn iommufd_is_used_where_it_can_be_and_groups_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        let mut host_device = HostDevice::new(&device(dir.path(), "vfio-pci")).unwrap();
        let [iommufd, node] = ["iommu", "vfio3"].map(|name| dir.path().join(name));
        let groups = |host_device: &HostDevice| {
            assert_eq!(
                Way::with(host_device, &iommufd, false).unwrap(),
                Way::Groups
            );
            Way::with(host_device, &iommufd, true).unwrap_err()
        };
        assert!(matches!(groups(&host_device), Error::NoNode { .. }));
        host_device.node = Some(node.clone());
        fs::write(&node, "").unwrap();
        let error = groups(&host_device);
        assert!(matches!(&error, Error::OpenIommufd { path, .. } if *path == iommufd));
        fs::write(&iommufd, "").unwrap();
        assert_eq!(
            Way::with(&host_device, &iommufd, false).unwrap(),
            Way::Iommufd
        );
        // A folder opens for nobody, root included.
        fs::remove_file(&node).unwrap();
        fs::create_dir(&node).unwrap();
        let error = groups(&host_device);
        assert!(matches!(&error, Error::OpenIommufd { path, .. } if *path == node));
    }
}
