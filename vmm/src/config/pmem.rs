//! Persistent memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Persistent memory.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct PmemConfig {
    /// The file, or a directory for an unnamed one.
    pub file: PathBuf,
    /// Bytes, a multiple of 2 MiB; the file's size if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// The guest's writes do not reach the file.
    #[serde(default)]
    pub discard_writes: bool,
    /// Name of the device in the API; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment to plug it into.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number on the segment's bus, 1 to 31; the first free one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
}
