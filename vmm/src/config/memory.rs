//! Guest memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How memory is plugged in while the guest runs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum HotplugMethod {
    /// Whole modules, announced by ACPI.
    #[default]
    Acpi,
    /// Blocks of 2 MiB of a virtio-mem device; they can also be taken away.
    VirtioMem,
}

/// A part of memory with its own backing.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MemoryZoneConfig {
    /// Its name.
    pub id: String,
    /// Bytes at boot.
    pub size: u64,
    /// A file, or a directory for an unnamed file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Let the host merge equal pages.
    #[serde(default)]
    pub mergeable: bool,
    /// Other processes can map it.
    #[serde(default)]
    pub shared: bool,
    /// Use huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
    /// Their size in bytes; the host's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// Node of the host to take it from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_numa_node: Option<u32>,
    /// Bytes that can be plugged in (virtio-mem).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// Bytes of them that are plugged in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
    /// Touch every page at start.
    #[serde(default)]
    pub prefault: bool,
    /// Count it against the host's commit limit.
    #[serde(default)]
    pub reserve: bool,
}

/// Guest memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct MemoryConfig {
    /// Bytes at boot; 0 with zones.
    pub size: u64,
    /// Bytes that can be plugged in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// Bytes of them that are plugged in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
    /// Let the host merge equal pages.
    #[serde(default)]
    pub mergeable: bool,
    /// How memory is plugged in.
    #[serde(default)]
    pub hotplug_method: HotplugMethod,
    /// Other processes can map it.
    #[serde(default)]
    pub shared: bool,
    /// Use huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
    /// Their size in bytes; the host's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// Touch every page at start.
    #[serde(default)]
    pub prefault: bool,
    /// Count it against the host's commit limit.
    #[serde(default)]
    pub reserve: bool,
    /// Let the host use transparent huge pages.
    #[serde(default = "yes")]
    pub thp: bool,
    /// Parts with their own backing, instead of `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zones: Option<Vec<MemoryZoneConfig>>,
}

fn yes() -> bool {
    true
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            size: 512 << 20,
            hotplug_size: None,
            hotplugged_size: None,
            mergeable: false,
            hotplug_method: HotplugMethod::default(),
            shared: false,
            hugepages: false,
            hugepage_size: None,
            prefault: false,
            reserve: false,
            thp: true,
            zones: None,
        }
    }
}
