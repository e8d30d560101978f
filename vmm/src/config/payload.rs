//! What the guest boots.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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
