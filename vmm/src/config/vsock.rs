//! Sockets between guest and host.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Sockets between guest and host.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// The guest's context id, from 3.
    pub cid: u64,
    /// The Unix socket through which the host reaches the guest.
    pub socket: PathBuf,
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
