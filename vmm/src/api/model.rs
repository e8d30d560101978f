//! Bodies of requests and responses, except the machine's configuration ([`crate::config`]).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::config::{
    VmConfig,
    syntax::{Key, Part, SyntaxError, ValueType, parse},
};

/// Version of Cloud Hypervisor whose API this is: clients look at it to know what they may ask.
pub const COMPATIBLE_VERSION: &str = "54.0.0";

/// The same with its `v`.
pub const COMPATIBLE_BUILD: &str = "v54.0.0";

/// Who answers.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmmPingResponse {
    /// The version with its `v`.
    pub build_version: String,
    /// The version of the API.
    pub version: String,
    /// The VMM's process.
    pub pid: i64,
    /// Which hypervisors it was built for.
    pub features: Vec<String>,
}

impl VmmPingResponse {
    /// This process.
    pub fn current() -> Self {
        Self {
            build_version: COMPATIBLE_BUILD.to_owned(),
            version: COMPATIBLE_VERSION.to_owned(),
            pid: i64::from(std::process::id()),
            features: vec!["kvm".to_owned()],
        }
    }
}

/// What a VM is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum VmState {
    /// Made, never booted.
    Created,
    /// Its vCPUs run.
    Running,
    /// Switched off.
    Shutdown,
    /// Its vCPUs are stopped.
    Paused,
    /// Stopped by a debugger.
    BreakPoint,
    /// A process of it serves others by the gate: its vCPU stands still, its devices do not.
    Frozen,
}

/// A node of the device tree.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// The device's name.
    pub id: String,
    /// Addresses and interrupts that it takes.
    pub resources: Vec<serde_json::Value>,
    /// Names of the devices behind it.
    pub children: Vec<String>,
    /// Its PCI function, `0000:00:03.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_bdf: Option<String>,
    /// `removing` or `swapping` while the guest has been asked to give it up; `lost` if the process
    /// that serves it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

/// Configuration and state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmInfo {
    /// The configuration, with the devices plugged in since.
    pub config: Box<VmConfig>,
    /// What the VM is doing.
    pub state: VmState,
    /// Bytes of memory that the guest has: boot size and hot-plugged, less the balloon.
    pub memory_actual_size: u64,
    /// Devices by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_tree: Option<BTreeMap<String, DeviceNode>>,
}

/// Counters by the name of a device, or `_cpu0` and so on, and the counter's name.
pub type VmCounters = BTreeMap<String, BTreeMap<String, u64>>;

/// A device that was plugged in.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PciDeviceInfo {
    /// Its name.
    pub id: String,
    /// Its PCI function, `0000:00:03.0`.
    pub bdf: String,
}

/// New sizes; what is absent stays.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmResize {
    /// vCPUs, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u32>,
    /// Bytes of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
    /// Bytes in the balloon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_balloon: Option<u64>,
}

/// New size of a disk.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmResizeDisk {
    /// Name of the disk.
    pub id: String,
    /// Bytes.
    pub desired_size: u64,
}

/// New size of a memory zone.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmResizeZone {
    /// Name of the zone.
    pub id: String,
    /// Bytes.
    pub desired_ram: u64,
}

/// Which device to unplug.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmRemoveDevice {
    /// Name of the device.
    pub id: String,
    /// Take it away without asking the guest.
    #[serde(default)]
    pub force: bool,
    /// Do not take it away after all: ends an earlier removal or swap that the guest has not
    /// answered.
    #[serde(default)]
    pub cancel: bool,
    /// Seconds after which the device stays if the guest has not given it up; no limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
}

/// Replaces a physical device by another one of the same model, at the same place on the guest's
/// bus.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmSwapDevice {
    /// Name of the device, which the other one takes over.
    pub id: String,
    /// The other device's folder in sysfs.
    pub path: PathBuf,
    /// Seconds after which the old device stays if the guest has not given it up.
    #[serde(default = "swap_timeout")]
    pub timeout: u64,
    /// What happens if the other device cannot be plugged in.
    #[serde(default)]
    pub on_failure: OnFailure,
}

fn swap_timeout() -> u64 {
    30
}

/// Has the applications of an accelerator port go on with other workers while they run: another pool's,
/// or on another device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmMoveAccel {
    /// Name of the accelerator.
    pub id: String,
    /// The slice whose application moves; all of them, and those that come later, if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<u32>,
    /// Socket of the pool that they move to; the port's own if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Part of the names of the devices that they get there; the port's own if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Who is to serve the guest's applications, instead: the guest's own pool, the port, or nobody. Nothing
    /// else is to be named with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seat: Option<AccelSeat>,
    /// Where they are served instead, as the guest's applications name it: `tls://HOST:PORT` for
    /// another host's pool, or `gate`. Nothing else is to be named with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Milliseconds for which each may go on with what its device is at.
    #[serde(default = "drain_ms")]
    pub drain_ms: u64,
    /// They go on before large contents of their memory have come, which follow from the workers that had them.
    #[serde(default)]
    pub postcopy: bool,
}

/// Who serves a guest's applications.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum AccelSeat {
    /// The guest's own pool, on a device that was passed through to it.
    Local,
    /// The host's, by the port.
    Host,
    /// Nobody: those of the guest's own pool wait, their state in the guest's memory.
    Parked,
}

/// As long as an application may take to come to a point at which it can be moved.
pub const DRAIN_MS: u64 = 10_000;

fn drain_ms() -> u64 {
    DRAIN_MS
}

/// Applications that have moved.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MovedAccel {
    /// Their slices.
    pub slices: Vec<u32>,
    /// How many the guest has moved, if it was asked to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applications: Option<u16>,
}

/// What becomes of the VM if a swap fails halfway.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum OnFailure {
    /// It gets the old device back.
    #[default]
    Restore,
    /// It goes on without.
    Without,
}

/// Where to save a VM.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmSnapshotConfig {
    /// `file://` and a directory.
    pub destination_url: String,
    /// Take physical devices away from the guest first, which could not be saved.
    #[serde(default)]
    pub detach: bool,
    /// What becomes of applications that use an accelerator.
    #[serde(default)]
    pub accel: AccelInSnapshot,
}

/// What becomes of applications that use an accelerator while the VM is saved.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum AccelInSnapshot {
    /// The VM is not saved if there are any.
    #[default]
    Refuse,
    /// The snapshot has them.
    Save,
}

impl VmSnapshotConfig {
    /// The directory.
    pub fn directory(&self) -> Option<&Path> {
        file_url(&self.destination_url)
    }
}

/// Where to write a core file.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmCoredumpData {
    /// `file://` and a file.
    pub destination_url: String,
}

impl VmCoredumpData {
    /// The file.
    pub fn file(&self) -> Option<&Path> {
        file_url(&self.destination_url)
    }
}

/// When memory is read from a snapshot.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum MemoryRestoreMode {
    /// All of it before the VM is ready.
    #[default]
    Copy,
    /// Each page when the guest touches it (userfaultfd), the others in the background.
    OnDemand,
}

/// Descriptors that a restored network card gets instead of those that it had.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RestoredNet {
    /// Name of the card.
    pub id: String,
    /// How many of the descriptors that come with the request are its.
    pub num_fds: usize,
    /// Their numbers, if they were inherited (command line).
    #[serde(skip)]
    pub fds: Vec<i32>,
}

/// A memory zone that moves to another node of the host.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmMemoryZoneUpdate {
    /// Name of the zone.
    pub id: String,
    /// Node of the host.
    pub host_numa_node: u32,
}

/// Where a VM comes from.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// `file://` and a directory.
    pub source_url: String,
    /// Touch every page of memory.
    #[serde(default)]
    pub prefault: bool,
    /// When memory is read.
    #[serde(default)]
    pub memory_restore_mode: MemoryRestoreMode,
    /// Network cards that get new descriptors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_fds: Option<Vec<RestoredNet>>,
    /// Let the vCPUs run at once.
    #[serde(default)]
    pub resume: bool,
    /// Zones that move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone_updates: Option<Vec<VmMemoryZoneUpdate>>,
    /// Accelerators whose applications other pools serve from now on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accels: Option<Vec<RestoredAccel>>,
}

/// An accelerator whose applications another pool serves.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RestoredAccel {
    /// Its name.
    pub id: String,
    /// The pool's socket.
    pub socket: PathBuf,
    /// Part of the names of the devices there; as it was saved if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

const RESTORE: &[Key] = &[
    Key::new("source_url", ValueType::Text),
    Key::new("prefault", ValueType::Switch),
    Key::new("resume", ValueType::Switch),
    Key::new(
        "memory_restore_mode",
        ValueType::Choice(&[("copy", "Copy"), ("ondemand", "OnDemand")]),
    ),
    Key::named(
        "net_fds",
        "",
        ValueType::Pairs(
            Part("id", &ValueType::Text),
            Part("fds", &ValueType::Numbers),
        ),
    ),
    Key::named(
        "accels",
        "accels",
        ValueType::Pairs(
            Part("id", &ValueType::Text),
            Part("socket", &ValueType::Text),
        ),
    ),
];

impl RestoreConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[RESTORE];

    /// Parses the value of `--restore`. Text without `=` is a directory.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        #[derive(Deserialize)]
        struct Inherited {
            id: String,
            fds: Vec<i32>,
        }
        if !input.contains('=') && !input.is_empty() {
            return Ok(Self {
                source_url: to_url(input),
                ..Self::default()
            });
        }
        let mut parsed = parse("--restore", input, Self::SYNTAX)?;
        parsed.require("source_url", "source_url")?;
        let inherited: Option<Vec<Inherited>> = parsed.take("net_fds");
        let mut config: Self = parsed.build()?;
        config.net_fds = inherited.map(|cards| {
            let restored = |Inherited { id, fds }| RestoredNet {
                id,
                num_fds: fds.len(),
                fds,
            };
            cards.into_iter().map(restored).collect()
        });
        Ok(config)
    }

    /// The directory.
    pub fn directory(&self) -> Option<&Path> {
        file_url(&self.source_url)
    }
}

/// The `file://` URL of a path; a URL stays as it is.
pub fn to_url(path: &str) -> String {
    if path.contains("://") {
        return path.to_owned();
    }
    // Fails only without a current directory; the server then says what is wrong with the URL.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    format!("file://{}", path.display())
}

/// The absolute path of a `file://` URL. No escapes: what stands in it is the path.
fn file_url(url: &str) -> Option<&Path> {
    let path = Path::new(url.strip_prefix("file://")?);
    path.is_absolute().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_file_urls_with_absolute_paths_name_a_directory() {
        let directory = |url: &str| {
            let config = VmSnapshotConfig {
                destination_url: url.to_owned(),
                ..VmSnapshotConfig::default()
            };
            config.directory().map(Path::to_owned)
        };
        assert_eq!(directory("file:///a/b").unwrap(), Path::new("/a/b"));
        for url in ["", "/a/b", "file://a", "http://a", "file:/a"] {
            assert_eq!(directory(url), None, "{url}");
        }
    }

    #[test]
    fn a_restore_is_written_like_a_device() {
        let config = RestoreConfig::parse(
            "source_url=file:///s,prefault=on,resume=true,memory_restore_mode=ondemand,\
             net_fds=[n0@[3,4],n1@[5]],accels=[a0@/run/other]",
        )
        .unwrap();
        let accels = config.accels.unwrap();
        assert_eq!(accels[0].id, "a0");
        assert_eq!(accels[0].socket, Path::new("/run/other"));
        assert!(config.prefault && config.resume);
        let cards = config.net_fds.unwrap();
        assert_eq!((cards[0].id.as_str(), cards[0].num_fds), ("n0", 2));
        assert_eq!(cards[1].fds, [5]);
        assert_eq!(RestoreConfig::parse("/s").unwrap().source_url, "file:///s");
        assert!(RestoreConfig::parse("resume=on").is_err());
    }

    #[test]
    fn a_restore_request_of_the_command_line_client_is_understood() {
        let config: RestoreConfig = serde_json::from_str(
            r#"{"source_url":"file:///s","prefault":false,"memory_restore_mode":"OnDemand",
            "net_fds":null,"vfio_fds":null,"iommufd_fd":null,"resume":true,"zone_updates":[]}"#,
        )
        .unwrap();
        assert_eq!(config.memory_restore_mode, MemoryRestoreMode::OnDemand);
        assert!(config.resume);
        assert_eq!(config.net_fds, None);
    }
}
