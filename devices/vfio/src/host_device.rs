//! Locates a device on the host, and determines how to open it.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use super::Error;

/// The file through which iommufd gives devices access to guest RAM.
pub const IOMMUFD: &str = "/dev/iommu";
/// The folder of the device files.
const NODES: &str = "/dev/vfio/devices";
/// Has an entry for each device that VFIO owns, from Linux 6.1 on and once VFIO is loaded.
const CLASS: &str = "/sys/class/vfio-dev";
/// Has a file for each IOMMU group with a device that VFIO owns.
const GROUPS: &str = "/dev/vfio";

/// A device on the host.
#[derive(Debug)]
pub struct HostDevice {
    /// Its folder in sysfs.
    pub(super) path: PathBuf,
    /// Its name on the host: an address such as `0000:01:00.0`, or a mediated device's UUID.
    pub(super) address: String,
    /// Its IOMMU group.
    pub(super) group: String,
    /// Its device file, `/dev/vfio/devices/vfioN`, if the kernel provides one.
    pub(super) node: Option<PathBuf>,
    /// The files that this process was given instead of access to them.
    pub(super) given: Option<Given>,
}

/// Files that another process has opened.
#[derive(Debug)]
pub struct Given {
    /// The device's own.
    pub device: fs::File,
    /// An iommufd.
    pub iommufd: fs::File,
    /// Whether this process has bound the first one to the second one: the kernel does so once for an open file.
    pub bound: Arc<AtomicBool>,
}

impl Given {
    /// Whether its iommufd is the same open file as this one.
    ///
    /// kcmp would tell, too, but containers may not use it.
    ///
    /// # Errors
    /// One of them is not open.
    pub(super) fn is_of(&self, iommufd: &impl AsRawFd) -> io::Result<bool> {
        let [own, other] = [self.iommufd.as_raw_fd(), iommufd.as_raw_fd()];
        // SAFETY: neither command takes a pointer.
        let control = |of: RawFd, command, flags: libc::c_int| match unsafe {
            libc::fcntl(of, command, flags)
        } {
            ..0 => Err(io::Error::last_os_error()),
            done => Ok(done),
        };
        let [flags, before] = [own, other].map(|of| control(of, libc::F_GETFL, 0));
        let (flags, before) = (flags?, before?);
        // The open file has the flags, and an iommufd makes no use of this one.
        control(own, libc::F_SETFL, flags ^ libc::O_NONBLOCK)?;
        let changed = control(other, libc::F_GETFL, 0);
        control(own, libc::F_SETFL, flags)?;
        Ok(changed? != before)
    }
}

impl HostDevice {
    /// Looks up a device in sysfs, and checks for problems that VFIO would report only as an error
    /// number.
    ///
    /// The check is that VFIO owns the device, not that vfio-pci is its driver: many vendors'
    /// drivers give their devices to VMs themselves (variants of vfio-pci, drivers of virtual
    /// functions, mediated devices).
    pub fn new(path: &Path) -> Result<Self, Error> {
        Self::look(path, Path::new(CLASS), Path::new(GROUPS))
    }

    fn look(path: &Path, class: &Path, groups: &Path) -> Result<Self, Error> {
        let found = fs::canonicalize(path).ok();
        let found = found.filter(|path| path.join("vendor").exists() || is_mediated(path));
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
        if has_no_vgpu_type(found) {
            return Err(Error::NoVgpuType { device });
        }
        let driver = link(found, "driver");
        let group = link(found, "iommu_group");
        let node = node(found);
        if node.is_none() {
            // On older kernels only the group's file shows it, and only for the group as a whole.
            let has_group = group
                .as_ref()
                .is_some_and(|group| groups.join(group).exists());
            if driver.is_none() || class.exists() || !has_group {
                let driver = driver.unwrap_or_else(|| "no driver".to_owned());
                let instead = instead(found);
                return Err(Error::Driver {
                    device,
                    driver,
                    instead,
                });
            }
        }
        let Some(group) = group else {
            return Err(Error::NoGroup { device });
        };
        Ok(Self {
            path: found.clone(),
            address: device,
            group,
            node,
            given: None,
        })
    }

    /// Uses files that another process has opened.
    ///
    /// # Errors
    /// [`Error::NotItsFile`] if the first one is another file than the device's.
    pub fn give(&mut self, given: Given) -> Result<(), Error> {
        let its = folder(&given.device).ok();
        if its.as_deref() != Some(&*self.path) {
            return Err(Error::NotItsFile {
                device: self.address.clone(),
            });
        }
        self.given = Some(given);
        Ok(())
    }

    /// Its device file.
    pub(super) fn own_file(&self) -> Result<&Path, Error> {
        self.node.as_deref().ok_or_else(|| Error::NoNode {
            device: self.address.clone(),
        })
    }

    /// The driver that it is bound to, for messages.
    pub(super) fn driver(&self) -> String {
        link(&self.path, "driver").unwrap_or_else(|| "no driver".to_owned())
    }

    /// Address of the physical function that this is a virtual function of, if VFIO owns that, too.
    pub(super) fn function_of_vfio(&self) -> Option<String> {
        let physical = fs::canonicalize(self.path.join("physfn")).ok()?;
        is_of_vfio(&physical).then_some(())?;
        Some(physical.file_name()?.to_str()?.to_owned())
    }

    /// A device of this group that is bound to a driver of the host.
    pub(super) fn used_by_host(&self) -> Option<PathBuf> {
        // The drivers that VFIO itself considers harmless (Linux,
        // Documentation/driver-api/vfio.rst).
        const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];
        let devices = fs::read_dir(self.path.join("iommu_group/devices")).ok()?;
        let mut devices = devices.filter_map(Result::ok).map(|entry| entry.path());
        devices.find(|path| {
            let driver = link(path, "driver");
            driver.is_some_and(|name| !HARMLESS.contains(&&*name)) && !is_of_vfio(path)
        })
    }
}

/// The folder in sysfs of the device whose device file (`/dev/vfio/devices/vfioN`) is open at a
/// descriptor.
///
/// # Errors
/// It is another file, or none.
pub fn folder_of(descriptor: RawFd) -> io::Result<PathBuf> {
    // SAFETY: it is borrowed for the duration of this call, in which nothing closes descriptors; if
    // it is not open, that is an error.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
    folder(&borrowed.try_clone_to_owned()?.into())
}

fn folder(file: &fs::File) -> io::Result<PathBuf> {
    let metadata = file.metadata()?;
    if !metadata.file_type().is_char_device() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (major, minor) = (libc::major(metadata.rdev()), libc::minor(metadata.rdev()));
    // DEVICE/vfio-dev/vfioN.
    let node = fs::canonicalize(format!("/sys/dev/char/{major}:{minor}"))?;
    let class = node.parent().filter(|class| class.ends_with("vfio-dev"));
    let device = class.and_then(Path::parent);
    device
        .map(Path::to_owned)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Whether VFIO owns the device with this folder in sysfs.
pub fn is_of_vfio(device: &Path) -> bool {
    // Before Linux 6.1, only the driver's name indicates it.
    device.join("vfio-dev").exists() || link(device, "driver").as_deref() == Some("vfio-pci")
}

/// Whether it is a mediated device: a part of a device that the host's driver shares out.
pub fn is_mediated(device: &Path) -> bool {
    device.join("mdev_type").exists()
}

/// Whether it is a virtual function of NVIDIA's driver (Linux 6.8 and newer) for which no vGPU type
/// has been set.
fn has_no_vgpu_type(device: &Path) -> bool {
    let kind = fs::read_to_string(device.join("nvidia/current_vgpu_type"));
    kind.is_ok_and(|kind| kind.trim() == "0")
}

/// What else a device offers to VMs while the host's driver owns it, for messages.
fn instead(device: &Path) -> String {
    let path = device.display();
    if device.join("mdev_supported_types").exists() {
        return format!(
            "; or, as its driver makes mediated devices, write a UUID to \
             {path}/mdev_supported_types/TYPE/create and name /sys/bus/mdev/devices/UUID"
        );
    }
    let functions = fs::read_to_string(device.join("sriov_totalvfs")).unwrap_or_default();
    if functions.trim().parse().unwrap_or(0_u32) > 0 {
        return format!(
            "; or give one of its virtual functions: {path}/sriov_numvfs makes them, and each needs \
             such a driver itself"
        );
    }
    String::new()
}

/// The last component of a link's target in a device's folder.
fn link(device: &Path, name: &str) -> Option<String> {
    let target = fs::read_link(device.join(name)).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

/// The IOMMU group of the device at a PCI address.
pub fn group_of(address: &str) -> Option<String> {
    link(
        &Path::new("/sys/bus/pci/devices").join(address),
        "iommu_group",
    )
}

/// The device file for a folder in sysfs, if the kernel provides one.
fn node(device: &Path) -> Option<PathBuf> {
    let mut names = fs::read_dir(device.join("vfio-dev")).ok()?;
    Some(Path::new(NODES).join(names.next()?.ok()?.file_name()))
}

/// Opens a file of the kernel for reading and writing.
pub fn open(path: &Path) -> io::Result<fs::File> {
    fs::File::options().read(true).write(true).open(path)
}

/// How a VM opens its devices, and provides their address spaces.
#[derive(Debug)]
pub enum Way {
    /// Through device files, with address spaces of this iommufd.
    Iommufd(fs::File),
    /// Through IOMMU groups, with containers.
    Groups,
}

impl Way {
    /// Selects iommufd where the kernel has it and this process may use it, otherwise groups. With
    /// `only_iommufd`, fails instead of using groups.
    pub fn of(host_device: &HostDevice, only_iommufd: bool) -> Result<Self, Error> {
        Self::with(host_device, Path::new(IOMMUFD), only_iommufd)
    }

    fn with(host_device: &HostDevice, iommufd: &Path, only_iommufd: bool) -> Result<Self, Error> {
        if let Some(given) = &host_device.given {
            let own = given.iommufd.try_clone().map_err(|source| Error::Host {
                action: "use the descriptor of an iommufd",
                source,
            })?;
            return Ok(Self::Iommufd(own));
        }
        let missing = match usable(host_device, iommufd) {
            Ok(iommufd) => return Ok(Self::Iommufd(iommufd)),
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

/// An iommufd, if this process may open a device through it. Opening their files has no side
/// effects.
fn usable(host_device: &HostDevice, iommufd: &Path) -> Result<fs::File, Error> {
    let node = host_device.own_file()?;
    let open = |path: &Path| {
        open(path).map_err(|source| Error::OpenIommufd {
            path: path.to_owned(),
            source,
        })
    };
    let iommufd = open(iommufd)?;
    open(node)?;
    Ok(iommufd)
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

    /// Creates a device in a folder, in a group with another device that has the driver `other`.
    fn device(dir: &Path, other: &str) -> PathBuf {
        let device = dir.join("0000:01:00.0");
        let group = dir.join("groups/7");
        let vfio = device.join("vfio-dev/vfio3");
        for folder in [&vfio, &group.join("devices/other"), &dir.join("drivers")] {
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

    /// Binds a device to another driver, which is not VFIO's.
    fn give_to(device: &Path, driver: &str) {
        fs::remove_file(device.join("driver")).unwrap();
        fs::remove_dir_all(device.join("vfio-dev")).unwrap();
        symlink(format!("drivers/{driver}"), device.join("driver")).unwrap();
    }

    #[test]
    fn a_device_has_its_own_file_where_the_kernel_makes_one() {
        let dir = tempfile::tempdir().unwrap();
        let device = device(dir.path(), "vfio-pci");
        let mut host_device = HostDevice::new(&device).unwrap();
        assert_eq!(
            (&*host_device.address, &*host_device.group),
            ("0000:01:00.0", "7")
        );
        assert_eq!(
            host_device.own_file().unwrap(),
            Path::new("/dev/vfio/devices/vfio3")
        );
        host_device.node = None;
        assert!(matches!(host_device.own_file(), Err(Error::NoNode { .. })));
    }

    #[test]
    fn any_driver_that_gives_its_device_to_vfio_will_do() {
        for driver in ["mlx5_vfio_pci", "nvidia", "nvgrace-gpu-vfio-pci"] {
            let dir = tempfile::tempdir().unwrap();
            let device = device(dir.path(), "vfio-pci");
            fs::remove_file(device.join("driver")).unwrap();
            symlink(format!("drivers/{driver}"), device.join("driver")).unwrap();
            let found = HostDevice::new(&device).unwrap();
            assert_eq!(found.driver(), driver);
        }
    }

    #[test]
    fn a_driver_of_the_host_is_named_with_what_can_be_done() {
        let dir = tempfile::tempdir().unwrap();
        let device = device(dir.path(), "vfio-pci");
        give_to(&device, "nvme");
        let refusal = |device: &Path| HostDevice::new(device).unwrap_err().to_string();
        let said = refusal(&device);
        assert!(said.contains("bound to nvme"), "{said}");
        assert!(!said.contains("virtual functions"), "{said}");
        fs::write(device.join("sriov_totalvfs"), "0\n").unwrap();
        assert_eq!(refusal(&device), said);
        fs::write(device.join("sriov_totalvfs"), "16\n").unwrap();
        assert!(refusal(&device).contains("/sriov_numvfs makes them"));
        fs::create_dir(device.join("mdev_supported_types")).unwrap();
        assert!(refusal(&device).contains("/sys/bus/mdev/devices/UUID"));
        fs::remove_file(device.join("driver")).unwrap();
        assert!(refusal(&device).contains("bound to no driver"));
    }

    #[test]
    fn a_kernel_that_lists_no_devices_of_vfio_is_asked_by_the_group() {
        let dir = tempfile::tempdir().unwrap();
        let device = device(dir.path(), "vfio-pci");
        give_to(&device, "vendors-vfio");
        let (class, groups) = (dir.path().join("class"), dir.path().join("dev"));
        let look = || HostDevice::look(&device, &class, &groups);
        assert!(matches!(look(), Err(Error::Driver { .. })));
        fs::create_dir_all(groups.join("7")).unwrap();
        assert!(look().is_ok());
        // A kernel that lists VFIO's devices does not list this one.
        fs::create_dir(&class).unwrap();
        assert!(matches!(look(), Err(Error::Driver { .. })));
    }

    #[test]
    fn a_mediated_device_has_no_pci_address() {
        const UUID: &str = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";
        let dir = tempfile::tempdir().unwrap();
        let pci = device(dir.path(), "vfio-pci");
        let device = dir.path().join(UUID);
        fs::rename(&pci, &device).unwrap();
        fs::remove_file(device.join("vendor")).unwrap();
        assert!(matches!(
            HostDevice::new(&device),
            Err(Error::NoDevice { .. })
        ));
        symlink("../mdev_supported_types/mtty-1", device.join("mdev_type")).unwrap();
        assert!(!is_mediated(&device), "the link leads nowhere");
        fs::create_dir_all(dir.path().join("mdev_supported_types/mtty-1")).unwrap();
        assert_eq!(HostDevice::new(&device).unwrap().address, UUID);
    }

    #[test]
    fn a_virtual_function_without_a_type_says_what_is_to_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let device = device(dir.path(), "vfio-pci");
        fs::create_dir(device.join("nvidia")).unwrap();
        fs::write(device.join("nvidia/current_vgpu_type"), "0\n").unwrap();
        let error = HostDevice::new(&device).unwrap_err();
        assert!(error.to_string().contains("creatable_vgpu_types"));
        fs::write(device.join("nvidia/current_vgpu_type"), "1065\n").unwrap();
        HostDevice::new(&device).unwrap();
    }

    #[test]
    fn a_physical_function_that_is_given_away_too_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let virtual_one = device(dir.path(), "vfio-pci");
        let found = HostDevice::new(&virtual_one).unwrap();
        assert_eq!(found.function_of_vfio(), None);
        let physical = dir.path().join("0000:02:00.0");
        fs::create_dir(&physical).unwrap();
        symlink(&physical, virtual_one.join("physfn")).unwrap();
        assert_eq!(found.function_of_vfio(), None);
        fs::create_dir(physical.join("vfio-dev")).unwrap();
        assert_eq!(found.function_of_vfio().as_deref(), Some("0000:02:00.0"));
    }

    #[test]
    fn a_driver_of_the_host_in_the_group_is_found() {
        for (driver, is_used) in [("e1000e", true), ("pcieport", false), ("vfio-pci", false)] {
            let dir = tempfile::tempdir().unwrap();
            let host_device = HostDevice::new(&device(dir.path(), driver)).unwrap();
            assert_eq!(host_device.used_by_host().is_some(), is_used, "{driver}");
        }
        let dir = tempfile::tempdir().unwrap();
        let host_device = HostDevice::new(&device(dir.path(), "vendors-vfio")).unwrap();
        assert!(host_device.used_by_host().is_some());
        fs::create_dir(dir.path().join("groups/7/devices/other/vfio-dev")).unwrap();
        assert!(host_device.used_by_host().is_none());
    }

    #[test]
    fn iommufd_is_used_where_it_can_be_and_groups_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        let mut host_device = HostDevice::new(&device(dir.path(), "vfio-pci")).unwrap();
        let [iommufd, node] = ["iommu", "vfio3"].map(|name| dir.path().join(name));
        let groups = |host_device: &HostDevice| {
            let way = Way::with(host_device, &iommufd, false).unwrap();
            assert!(matches!(way, Way::Groups));
            Way::with(host_device, &iommufd, true).unwrap_err()
        };
        host_device.node = None;
        assert!(matches!(groups(&host_device), Error::NoNode { .. }));
        host_device.node = Some(node.clone());
        fs::write(&node, "").unwrap();
        let error = groups(&host_device);
        assert!(matches!(&error, Error::OpenIommufd { path, .. } if *path == iommufd));
        fs::write(&iommufd, "").unwrap();
        let way = Way::with(&host_device, &iommufd, false).unwrap();
        assert!(matches!(way, Way::Iommufd(_)));
        // A folder cannot be opened for writing, not even by root.
        fs::remove_file(&node).unwrap();
        fs::create_dir(&node).unwrap();
        let error = groups(&host_device);
        assert!(matches!(&error, Error::OpenIommufd { path, .. } if *path == node));
    }

    fn given() -> Given {
        let [device, iommufd] =
            ["/dev/null", "/dev/zero"].map(|path| fs::File::open(path).unwrap());
        Given {
            device,
            iommufd,
            bound: Arc::default(),
        }
    }

    #[test]
    fn only_a_devices_own_file_is_taken_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut host_device = HostDevice::new(&device(dir.path(), "vfio-pci")).unwrap();
        let error = host_device.give(given()).unwrap_err();
        assert!(matches!(error, Error::NotItsFile { .. }), "{error}");
        let file = tempfile::tempfile().unwrap();
        for descriptor in [file.as_raw_fd(), 1 << 20] {
            folder_of(descriptor).unwrap_err();
        }
    }

    #[test]
    fn an_iommufd_is_told_from_another_one() {
        let given = given();
        assert!(given.is_of(&given.iommufd.try_clone().unwrap()).unwrap());
        let other = fs::File::open("/dev/zero").unwrap();
        assert!(!given.is_of(&other).unwrap());
        given.is_of(&(1 << 20)).unwrap_err();
    }
}
