//! What the guest boots.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::check::{self, Invalid, Problem};

/// What the guest boots.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct PayloadConfig {
    /// Firmware.
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
            ("firmware", self.firmware.is_some(), "booting firmware"),
            ("igvm", self.igvm.is_some(), "IGVM files"),
            ("host_data", self.host_data.is_some(), "confidential guests"),
        ];
        for (place, wanted, what) in unsupported {
            check::unsupported(wanted, place, what, "boot a Linux kernel (kernel)")?;
        }
        if self.kernel.is_none() {
            let advice = "name a bzImage or an ELF kernel with a PVH entry";
            return Err(Problem::Missing(advice).at("kernel"));
        }
        Ok(())
    }
}
