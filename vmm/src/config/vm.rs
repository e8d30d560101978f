//! The whole machine.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    BalloonConfig, ConsoleConfig, CpusConfig, DebugConsoleConfig, DeviceConfig, DiskConfig,
    FsConfig, GenericVhostUserConfig, MemoryConfig, NetConfig, NumaConfig, PayloadConfig,
    PciSegmentConfig, PlatformConfig, PmemConfig, RateLimitGroupConfig, RngConfig, RtcConfig,
    SerialConfig, TpmConfig, UserDeviceConfig, VdpaConfig, VsockConfig,
};

/// A path that Gantry may use under Landlock.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LandlockConfig {
    /// The file or directory.
    pub path: PathBuf,
    /// `r`, `w` or `rw`.
    pub access: String,
}

/// The whole machine.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmConfig {
    /// Virtual processors.
    #[serde(default)]
    pub cpus: CpusConfig,
    /// Memory.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// What it boots.
    pub payload: PayloadConfig,
    /// Limits that disks share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit_groups: Option<Vec<RateLimitGroupConfig>>,
    /// Disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<Vec<DiskConfig>>,
    /// Network cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net: Option<Vec<NetConfig>>,
    /// Entropy.
    #[serde(default)]
    pub rng: RngConfig,
    /// Balloon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonConfig>,
    /// Shared folders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs: Option<Vec<FsConfig>>,
    /// Other vhost-user devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generic_vhost_user: Option<Vec<GenericVhostUserConfig>>,
    /// Persistent memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pmem: Option<Vec<PmemConfig>>,
    /// Serial port.
    #[serde(default)]
    pub serial: SerialConfig,
    /// Virtio console.
    #[serde(default)]
    pub console: ConsoleConfig,
    /// Debug console.
    #[serde(default)]
    pub debug_console: DebugConsoleConfig,
    /// Physical devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<DeviceConfig>>,
    /// Devices of other processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_devices: Option<Vec<UserDeviceConfig>>,
    /// vDPA devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<Vec<VdpaConfig>>,
    /// Sockets between guest and host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockConfig>,
    /// NUMA nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<Vec<NumaConfig>>,
    /// A virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// A watchdog.
    #[serde(default)]
    pub watchdog: bool,
    /// A virtio clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtc: Option<RtcConfig>,
    /// A panic device.
    #[serde(default)]
    pub pvpanic: bool,
    /// Shares of PCI segments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_segments: Option<Vec<PciSegmentConfig>>,
    /// Platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformConfig>,
    /// Trusted platform module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<TpmConfig>,
    /// Restrict Gantry to the files of its configuration (Landlock).
    #[serde(default)]
    pub landlock_enable: bool,
    /// Further files that it may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock_rules: Option<Vec<LandlockConfig>>,
}
