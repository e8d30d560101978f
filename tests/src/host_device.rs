//! L1's physical devices, which QEMU emulates behind an IOMMU.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::net::sh;

/// A PCI device of the host.
pub struct HostDevice {
    /// Its folder in sysfs.
    pub path: PathBuf,
    /// Its address.
    pub address: String,
}

/// QEMU's teaching device.
pub const EDU: (&str, &str) = ("0x1234", "0x11e8");
/// QEMU's device for tests of registers, which has I/O ports.
pub const TESTDEV: (&str, &str) = ("0x1b36", "0x0005");
/// A virtio network card that behaves like hardware in that it uses the IOMMU.
pub const CARD: (&str, &str) = ("0x1af4", "0x1041");
/// Index of an edu device that is one of two functions in a slot; the other one has the next index.
pub const EDU_OF_TWO: usize = 2;
/// Index of the edu device that is alone behind a root port, so that a bus reset can reset it. It
/// has a ROM.
pub const EDU_BEHIND_PORT: usize = 4;
/// Index of an edu device that is one of two functions behind a root port; the other one has the
/// next index.
pub const EDU_OF_PORT: usize = 5;
/// A PCI Express network card behind a root port. It reports errors and has a serial number.
pub const EXPRESS_CARD: (&str, &str) = ("0x8086", "0x10d3");
/// An entropy source behind a root port. It reports errors and is capable of address translation.
pub const EXPRESS_RNG: (&str, &str) = ("0x1af4", "0x1044");
/// QEMU's NVMe controller.
pub const NVME: (&str, &str) = ("0x1b36", "0x0010");

/// Driver that is a variant of vfio-pci.
pub const VARIANT: &str = "vendors-vfio";

/// Loads the VFIO modules and further ones, unless they are loaded already.
pub fn load(more: &[&str]) -> Result<()> {
    // Newer kernels have merged some of these into others.
    const VFIO: &str = "iommufd vfio vfio_virqfd vfio_iommu_type1 vfio-pci-core vfio-pci";
    let names = [&[VFIO], more].concat().join(" ");
    sh(&format!(
        "for m in {names}; do \
         [ ! -e /modules/$m.ko ] || [ -d /sys/module/$(echo $m | tr - _) ] || \
         insmod /modules/$m.ko || exit 1; done"
    ))
    .map(drop)
}

impl HostDevice {
    /// The `index`th device of a kind, bound to vfio-pci.
    pub fn take(kind: (&str, &str), index: usize) -> Result<Self> {
        let device = Self::find(kind, index)?;
        device.bind()?;
        Ok(device)
    }

    /// The device with this folder in sysfs.
    pub fn at(path: &Path) -> Result<Self> {
        Self::named(fs::canonicalize(path)?)
    }

    /// The `index`th device of a kind, ordered by address.
    pub fn find(kind: (&str, &str), index: usize) -> Result<Self> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/sys/bus/pci/devices")? {
            let path = entry?.path();
            let id = |name| fs::read_to_string(path.join(name)).unwrap_or_default();
            if (id("vendor").trim(), id("device").trim()) == kind {
                found.push(path);
            }
        }
        found.sort();
        let path = found
            .get(index)
            .with_context(|| format!("L1 has no device {index} of {kind:?}"))?
            .clone();
        Self::named(path)
    }

    fn named(path: PathBuf) -> Result<Self> {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            bail!("{} has no name", path.display());
        };
        let address = name.to_owned();
        Ok(Self { path, address })
    }

    /// Binds the device to vfio-pci.
    pub fn bind(&self) -> Result<()> {
        self.bind_to("vfio-pci")
    }

    /// Binds the device to a driver that exposes it through VFIO: vfio-pci or its variant.
    pub fn bind_to(&self, driver: &str) -> Result<()> {
        if self.driver().as_deref() == Some(driver) {
            return Ok(());
        }
        load(&[])?;
        if driver == VARIANT {
            load(&[VARIANT])?;
        }
        fs::write(self.path.join("driver_override"), driver)?;
        if self.driver().is_some() {
            fs::write(self.path.join("driver/unbind"), &self.address)?;
        }
        fs::write("/sys/bus/pci/drivers_probe", &self.address)?;
        match self.driver().as_deref() {
            Some(bound) if bound == driver => Ok(()),
            other => bail!("{} is bound to {other:?}", self.address),
        }
    }

    /// Unbinds the device from its driver; it has none afterwards.
    pub fn release(&self) -> Result<()> {
        fs::write(self.path.join("driver_override"), "\n")?;
        fs::write(self.path.join("driver/unbind"), &self.address)?;
        Ok(())
    }

    fn driver(&self) -> Option<String> {
        let link = fs::read_link(self.path.join("driver")).ok()?;
        Some(link.file_name()?.to_str()?.to_owned())
    }
}
