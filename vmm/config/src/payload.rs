//! What the guest boots.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::check::{self, Invalid, Problem};

/// What the guest boots.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct PayloadConfig {
    /// Firmware: an ELF file with a PVH entry, such as edk2's `CLOUDHV.fd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<PathBuf>,
    /// Linux kernel: bzImage, or ELF with a PVH entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Kernel command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
    /// Initial file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<PathBuf>,
    /// IGVM file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub igvm: Option<PathBuf>,
    /// Host data for confidential guests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_data: Option<String>,
}

impl PayloadConfig {
    /// Checks whether the configuration is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        let unsupported = [
            ("igvm", self.igvm.is_some(), "IGVM files"),
            ("host_data", self.host_data.is_some(), "confidential guests"),
        ];
        for (place, wanted, what) in unsupported {
            check::unsupported(wanted, place, what, "boot a Linux kernel (kernel)")?;
        }
        if self.firmware.is_some() {
            return self.validate_firmware();
        }
        if self.kernel.is_none() {
            let advice = "name a bzImage or an ELF kernel with a PVH entry, or give firmware";
            return Err(Problem::Missing(advice).at("kernel"));
        }
        Ok(())
    }

    fn validate_firmware(&self) -> Result<(), Invalid> {
        let conflict = |with, advice| Err(Problem::Conflict { with, advice }.at("firmware"));
        if self.kernel.is_some() {
            return conflict(
                "a kernel",
                "they name two things to boot: leave one of them out",
            );
        }
        if self.initramfs.is_some() {
            return conflict(
                "an initramfs",
                "the boot loader of the disk has its own: leave it out, or boot a kernel",
            );
        }
        Ok(())
    }
}
