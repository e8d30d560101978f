//! Disks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Format of a disk image.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum ImageType {
    /// Fixed-size VHD.
    FixedVhd,
    /// QEMU's copy-on-write format.
    Qcow2,
    /// The disk's contents and nothing else.
    Raw,
    /// VHDX.
    Vhdx,
    /// To be found out.
    #[default]
    Unknown,
}

/// What the lock on an image covers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum LockGranularity {
    /// The bytes of the image as it is.
    #[default]
    ByteRange,
    /// The whole file, whatever its size.
    Full,
}

/// Host processors that serve a queue.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VirtQueueAffinity {
    /// The queue's number.
    pub queue_index: u16,
    /// Numbers of host CPUs.
    pub host_cpus: Vec<usize>,
}

/// Limits that several disks share.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RateLimitGroupConfig {
    /// Its name.
    pub id: String,
    /// The limits.
    pub rate_limiter_config: devices::rate_limiter::RateLimiterConfig,
}

/// A disk.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// The image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The guest cannot write.
    #[serde(default)]
    pub readonly: bool,
    /// Bypass the host's page cache.
    #[serde(default)]
    pub direct: bool,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Queues.
    #[serde(default = "one")]
    pub num_queues: u16,
    /// Entries of a queue, a power of two.
    #[serde(default = "queue_size")]
    pub queue_size: u16,
    /// Served by another process.
    #[serde(default)]
    pub vhost_user: bool,
    /// That process's socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// Limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<devices::rate_limiter::RateLimiterConfig>,
    /// Limits shared with other disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit_group: Option<String>,
    /// Name of the device in the API; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment to plug it into.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number on the segment's bus, 1 to 31; the first free one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
    /// Serial number, at most 20 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Pinning of queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_affinity: Option<Vec<VirtQueueAffinity>>,
    /// Images may name backing files.
    #[serde(default)]
    pub backing_files: bool,
    /// Discarded blocks are given back to the host.
    #[serde(default = "yes")]
    pub sparse: bool,
    /// Format.
    #[serde(default)]
    pub image_type: ImageType,
    /// What the lock covers.
    #[serde(default)]
    pub lock_granularity: LockGranularity,
}

fn one() -> u16 {
    1
}

fn queue_size() -> u16 {
    128
}

fn yes() -> bool {
    true
}

impl Default for DiskConfig {
    fn default() -> Self {
        Self {
            path: None,
            readonly: false,
            direct: false,
            iommu: false,
            num_queues: one(),
            queue_size: queue_size(),
            vhost_user: false,
            vhost_socket: None,
            rate_limiter_config: None,
            rate_limit_group: None,
            id: None,
            pci_segment: 0,
            pci_device_id: None,
            serial: None,
            queue_affinity: None,
            backing_files: false,
            sparse: true,
            image_type: ImageType::default(),
            lock_granularity: LockGranularity::default(),
        }
    }
}
