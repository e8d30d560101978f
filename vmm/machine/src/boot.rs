//! Loads a kernel or firmware into a new machine.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use arch::{
    acpi,
    boot::{self, LoadedGuest, PayloadKind},
    layout::{AddressMap, GENERATION_ID_START},
    smbios,
};
use base::regular_file::{self, Links};
use vm_memory::GuestAddressSpace;
use vmm_config::{PayloadConfig, PlatformConfig, VmConfig};
use vmm_memory::Ram;

use super::{
    Machine, devices::Reach, error::MachineError, generation::Generation, kinds::iommu::Iommu,
};

/// The files that a machine boots from.
pub(super) struct Payload {
    path: PathBuf,
    file: File,
    kind: PayloadKind,
    initramfs: Option<File>,
    cmdline: String,
}

impl Payload {
    /// Opens the configured files.
    pub(super) fn open(config: &PayloadConfig) -> Result<Self, MachineError> {
        let (what, path) = match (&config.firmware, &config.kernel) {
            (Some(path), _) => ("firmware", path),
            (None, Some(path)) => ("kernel", path),
            (None, None) => return Err(MachineError::NoKernel),
        };
        let mut file = open(what, path)?;
        let path = path.clone();
        let kind = match (&config.firmware, PayloadKind::of(&mut file)) {
            (Some(_), _) => PayloadKind::Firmware,
            (None, Ok(kind)) => kind,
            (None, Err(source)) => return Err(MachineError::Boot { path, source }),
        };
        let payload = Self {
            path,
            file,
            kind,
            initramfs: match &config.initramfs {
                Some(path) => Some(open("initramfs", path)?),
                None => None,
            },
            cmdline: config.cmdline.clone().unwrap_or_default(),
        };
        if payload.is_firmware() && payload.initramfs.is_some() {
            return Err(payload.failed()(boot::BootError::FirmwareWithInitramfs));
        }
        Ok(payload)
    }

    /// Loads them into the machine's memory.
    pub(super) fn load(
        &mut self,
        ram: &Ram,
        map: &AddressMap,
    ) -> Result<LoadedGuest, MachineError> {
        let memory = &*ram.memory().memory();
        let failed = self.failed();
        if self.is_firmware() {
            if !self.cmdline.is_empty() {
                log::warn!("the command line is ignored: the boot loader of the disk has its own");
            }
            boot::load_firmware(memory, map, &mut self.file)
        } else {
            let initramfs = self.initramfs.as_mut();
            boot::load(memory, map, &mut self.file, initramfs, &self.cmdline)
        }
        .map_err(failed)
    }

    /// Whether it is known to be firmware.
    pub(super) fn is_firmware(&self) -> bool {
        self.kind == PayloadKind::Firmware
    }

    /// What it has to reach. Some firmware, which uses disks only, looks like a kernel.
    pub(super) fn reach(&self) -> Reach {
        match self.kind {
            PayloadKind::BzImage => Reach::Nothing,
            PayloadKind::Elf => Reach::Bootable,
            PayloadKind::Firmware => Reach::Virtio,
        }
    }

    fn failed(&self) -> impl Fn(boot::BootError) -> MachineError + use<> {
        let path = self.path.clone();
        move |source| MachineError::Boot {
            path: path.clone(),
            source,
        }
    }
}

impl Machine {
    /// Describes the machine to the payload that is loaded, and adds the vCPUs.
    pub(super) fn describe(
        &mut self,
        payload: &Payload,
        guest: &LoadedGuest,
        config: &VmConfig,
    ) -> Result<(), MachineError> {
        let memory = &*self.ram.memory().memory();
        let nodes = super::numa::segments(config);
        let mut aml = vec![self.devices.aml(nodes)];
        aml.extend(self.platform.aml());
        let rsdp = acpi::write_tables(
            memory,
            &acpi::Machine {
                map: &self.map,
                topology: &self.topology,
                boot_vcpus: config.cpus.boot_vcpus,
                pm_timer: true,
                cmos_clock: payload.is_firmware(),
                watchdog: config.watchdog,
                numa: &super::numa::nodes(config, &self.map, &self.ram, &self.devices)?,
                iommu: Iommu::of(config).map(|iommu| iommu.described()),
                devices: &aml,
            },
        )?;
        let platform = config.platform.clone().unwrap_or_default();
        smbios::write(memory, &smbios_strings(&platform)?)?;
        self.generation = Some(Generation::at(GENERATION_ID_START));
        self.renew_generation()?;
        let entry = boot::write_boot_data(memory, &self.map, guest, rsdp);
        let entry = entry.map_err(payload.failed())?;
        self.cpus.boot(config.cpus.boot_vcpus, &entry)?;
        Ok(())
    }
}

fn open(what: &'static str, path: &Path) -> Result<File, MachineError> {
    regular_file::open(path, Links::Follow).map_err(|source| MachineError::OpenPayload {
        what,
        path: path.to_owned(),
        source,
    })
}

fn smbios_strings(platform: &PlatformConfig) -> Result<smbios::Platform, MachineError> {
    Ok(smbios::Platform {
        manufacturer: platform.system_manufacturer.clone(),
        product: platform.system_product_name.clone(),
        version: platform.system_version.clone(),
        serial_number: platform.system_serial_number.clone(),
        uuid: platform
            .system_uuid
            .as_deref()
            .map(parse_uuid)
            .transpose()?,
        sku: platform.system_sku_number.clone(),
        family: platform.system_family.clone(),
        chassis_asset_tag: platform.chassis_asset_tag.clone(),
        oem_strings: platform.oem_strings.clone().unwrap_or_default(),
    })
}

/// Parses 32 hexadecimal digits, with or without hyphens.
fn parse_uuid(text: &str) -> Result<[u8; 16], MachineError> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|&c| c != '-')
        .map_while(|c| c.to_digit(16).map(|digit| digit as u8))
        .collect();
    let bytes: Vec<u8> = digits
        .chunks(2)
        .map(|pair| pair.iter().fold(0, |n, d| n << 4 | d))
        .collect();
    match (<[u8; 16]>::try_from(bytes), digits.len()) {
        (Ok(uuid), 32) => Ok(uuid),
        _ => Err(MachineError::Invalid(format!(
            "{text:?} is no UUID (platform.uuid)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_is_no_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("vmlinuz");
        let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: a terminated string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for path in [&*fifo, Path::new("/dev/zero"), dir.path()] {
            let error = open("kernel", path).unwrap_err();
            assert!(matches!(error, MachineError::OpenPayload { .. }), "{error}");
        }
        std::os::unix::fs::symlink("/proc/self/maps", dir.path().join("link")).unwrap();
        open("kernel", &dir.path().join("link")).unwrap();
    }
}
