//! Entropy.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Entropy source.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RngConfig {
    /// File to read from.
    pub src: PathBuf,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
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

impl Default for RngConfig {
    fn default() -> Self {
        Self {
            src: PathBuf::from("/dev/urandom"),
            iommu: false,
            id: None,
            pci_segment: 0,
            pci_device_id: None,
        }
    }
}
