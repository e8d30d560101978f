//! What clients of the API may ask for and Gantry does not do yet. It parses, so that the answer
//! can name it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A physical device (VFIO).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// Its folder in sysfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
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
    /// GPUDirect clique.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_nv_gpudirect_clique: Option<u8>,
    /// BARs that are not mapped into the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub x_exclude_mmap_bars: Vec<u64>,
}

/// A device of another process (vfio-user).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserDeviceConfig {
    /// That process's socket.
    pub socket: PathBuf,
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

/// A shared folder (virtio-fs).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct FsConfig {
    /// Its name in the guest.
    pub tag: String,
    /// The server's socket.
    pub socket: PathBuf,
    /// Queues.
    pub num_queues: u16,
    /// Entries of a queue.
    pub queue_size: u16,
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

/// Any vhost-user device.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct GenericVhostUserConfig {
    /// The server's socket.
    pub socket: PathBuf,
    /// Entries of each queue.
    pub queue_sizes: Vec<u16>,
    /// Virtio device type.
    pub device_type: u32,
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

/// A vDPA device.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VdpaConfig {
    /// Its device node.
    pub path: PathBuf,
    /// Queues.
    pub num_queues: u16,
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

/// A trusted platform module.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct TpmConfig {
    /// The emulator's socket.
    pub socket: PathBuf,
}

/// A virtio clock.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RtcConfig {
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
