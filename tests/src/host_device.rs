//! Physical devices of L1, which QEMU emulates behind an IOMMU.

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
/// QEMU's device for tests of registers: it has I/O ports.
pub const TESTDEV: (&str, &str) = ("0x1b36", "0x0005");
/// A virtio network card, which looks like hardware: it uses the IOMMU.
pub const CARD: (&str, &str) = ("0x1af4", "0x1041");
/// Which of the edu devices is one of two functions in a slot; the other one is next.
pub const EDU_OF_TWO: usize = 2;
/// Which of the edu devices is alone behind a root port, so that its bus resets it, and has a ROM.
pub const EDU_BEHIND_PORT: usize = 4;
/// Which of the edu devices is one of two functions behind a root port; the other one is next.
pub const EDU_OF_PORT: usize = 5;
/// A network card of PCI Express, behind a root port: it reports errors, and has a serial number.
pub const EXPRESS_CARD: (&str, &str) = ("0x8086", "0x10d3");
/// A source of entropy behind a root port: it reports errors, and could translate addresses.
pub const EXPRESS_RNG: (&str, &str) = ("0x1af4", "0x1044");
/// QEMU's NVMe controller.
pub const NVME: (&str, &str) = ("0x1b36", "0x0010");

/// The variant of vfio-pci.
pub const VARIANT: &str = "vendors-vfio";

/// Loads VFIO, and further modules, those that are not there yet.
pub fn load(more: &[&str]) -> Result<()> {
    // Newer kernels have some of them in others.
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

    /// The device with a folder in sysfs.
    pub fn at(path: &Path) -> Result<Self> {
        Self::named(fs::canonicalize(path)?)
    }

    /// The `index`th device of a kind by address.
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

    /// Gives it to vfio-pci.
    pub fn bind(&self) -> Result<()> {
        self.bind_to("vfio-pci")
    }

    /// Gives it to a driver that gives it to VFIO: vfio-pci, or the variant of it.
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

    /// Takes it from its driver; it has none then.
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
