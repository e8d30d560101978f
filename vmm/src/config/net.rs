//! Network cards.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A network card.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct NetConfig {
    /// Name of the tap interface; one is made if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Address of the host's side, for a tap that Gantry makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<std::net::IpAddr>,
    /// Its network mask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<std::net::IpAddr>,
    /// MAC address of the guest's side; random if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// MAC address of the host's side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_mac: Option<String>,
    /// Largest packet, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Queues, two for each pair.
    #[serde(default = "two")]
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
    /// `Client` or `Server`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_mode: Option<String>,
    /// Name of the device in the API; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment to plug it into.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number on the segment's bus, 1 to 31; the first free one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
    /// Limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<devices::rate_limiter::RateLimiterConfig>,
    /// TCP segmentation offload.
    #[serde(default = "yes")]
    pub offload_tso: bool,
    /// UDP fragmentation offload.
    #[serde(default = "yes")]
    pub offload_ufo: bool,
    /// Checksum offload.
    #[serde(default = "yes")]
    pub offload_csum: bool,
    /// Descriptors of an open tap, one for each pair of queues; never in a body.
    #[serde(skip)]
    pub fds: Vec<i32>,
}

fn two() -> u16 {
    2
}

fn queue_size() -> u16 {
    256
}

fn yes() -> bool {
    true
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            tap: None,
            ip: None,
            mask: None,
            mac: None,
            host_mac: None,
            mtu: None,
            iommu: false,
            num_queues: two(),
            queue_size: queue_size(),
            vhost_user: false,
            vhost_socket: None,
            vhost_mode: None,
            id: None,
            pci_segment: 0,
            pci_device_id: None,
            rate_limiter_config: None,
            offload_tso: true,
            offload_ufo: true,
            offload_csum: true,
            fds: Vec::new(),
        }
    }
}
