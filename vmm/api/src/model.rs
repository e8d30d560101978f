//! Bodies of requests and responses, except the machine's configuration ([`vmm_config`]).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use vmm_config::{
    DRAIN_MS, LandlockConfig, VmConfig,
    syntax::{Key, Part, SyntaxError, ValueType, parse},
};

use crate::migration::Rename;

/// The Cloud Hypervisor version whose API this is compatible with: clients check it to find out which requests they may
/// send.
pub const COMPATIBLE_VERSION: &str = "54.0.0";

/// The same version with a leading `v`.
pub const COMPATIBLE_BUILD: &str = "v54.0.0";

/// Identification of the VMM.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmmPingResponse {
    /// The version with a leading `v`.
    pub build_version: String,
    /// The version of the API.
    pub version: String,
    /// Process ID of the VMM.
    pub pid: i64,
    /// The hypervisors that it was built for.
    pub features: Vec<String>,
}

impl VmmPingResponse {
    /// Identification of this process.
    pub fn current() -> Self {
        Self {
            build_version: COMPATIBLE_BUILD.to_owned(),
            version: COMPATIBLE_VERSION.to_owned(),
            pid: i64::from(std::process::id()),
            features: vec!["kvm".to_owned()],
        }
    }
}

/// State of a VM.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum VmState {
    /// Created but never booted.
    Created,
    /// Its vCPUs run.
    Running,
    /// Powered off.
    Shutdown,
    /// Its vCPUs are stopped.
    Paused,
    /// Stopped by a debugger.
    BreakPoint,
    /// One of its processes is serving others through the gate: the vCPU is stopped, the devices are not.
    Frozen,
}

/// A node of the device tree.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// The device's name.
    pub id: String,
    /// Addresses and interrupts that it occupies.
    pub resources: Vec<serde_json::Value>,
    /// Names of the devices behind it.
    pub children: Vec<String>,
    /// Its PCI function, `0000:00:03.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_bdf: Option<String>,
    /// `removing` or `swapping` while the guest is being asked to give it up; `lost` if the process that serves it is
    /// gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

/// Configuration and state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmInfo {
    /// The configuration, including devices that were plugged in later.
    pub config: Box<VmConfig>,
    /// The state of the VM.
    pub state: VmState,
    /// Current size of the guest's memory in bytes: boot size plus hot-plugged memory, minus the balloon.
    pub memory_actual_size: u64,
    /// Devices by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_tree: Option<BTreeMap<String, DeviceNode>>,
    /// What is being done that takes a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_progress: Option<InProgress>,
}

/// An operation on a VM that takes a while.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Operation {
    /// A snapshot is being written.
    Snapshot,
    /// Files of a VM that is being booted are opened and read.
    Boot,
    /// Memory of a VM that is being restored is read.
    Restore,
    /// A core dump is being written.
    Coredump,
    /// The guest has asked for a reset, which waits for storage.
    Reset,
    /// `vm.reboot` waits for storage.
    Reboot,
    /// `vm.shutdown` waits for storage.
    Shutdown,
    /// `vm.delete` waits for storage.
    Delete,
    /// `vm.pause` waits for storage.
    Pause,
    /// The forced removal of a device waits for its storage.
    RemoveDevice,
    /// A disk is being resized.
    ResizeDisk,
    /// The image of a disk that is added is opened.
    AddDisk,
    /// The file of another device that is added is opened.
    AddDevice,
}

/// How far an operation is.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct InProgress {
    /// The operation.
    pub operation: Operation,
    /// Bytes of memory that are done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done_bytes: Option<u64>,
    /// Bytes of memory in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// What has not answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// Counters by device name (or `_cpu0` and so on) and counter name.
pub type VmCounters = BTreeMap<String, BTreeMap<String, u64>>;

/// A device that was plugged in.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PciDeviceInfo {
    /// Its name.
    pub id: String,
    /// Its PCI function, `0000:00:03.0`.
    pub bdf: String,
}

/// New sizes; absent ones do not change.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmResize {
    /// Number of vCPUs, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_vcpus: Option<u32>,
    /// Size of memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_ram: Option<u64>,
    /// Size of the balloon in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_balloon: Option<u64>,
}

/// New size of a disk.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmResizeDisk {
    /// Name of the disk.
    pub id: String,
    /// New size in bytes.
    pub desired_size: u64,
}

/// New size of a memory zone.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmResizeZone {
    /// Name of the zone.
    pub id: String,
    /// New size in bytes.
    pub desired_ram: u64,
}

/// Which device to unplug.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmRemoveDevice {
    /// Name of the device.
    pub id: String,
    /// Removes the device without asking the guest.
    #[serde(default)]
    pub force: bool,
    /// Keeps the device after all: cancels an earlier removal or swap that the guest has not responded to.
    #[serde(default)]
    pub cancel: bool,
    /// Time limit in seconds, after which the device stays if the guest has not given it up; no limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
}

/// Replaces a physical device with another one of the same model, at the same location on the guest's bus.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmSwapDevice {
    /// Name of the device, which its replacement inherits.
    pub id: String,
    /// Sysfs directory of the replacement.
    pub path: PathBuf,
    /// Time limit in seconds, after which the old device stays if the guest has not given it up.
    #[serde(default = "swap_timeout")]
    pub timeout: u64,
    /// What happens if the replacement cannot be plugged in.
    #[serde(default)]
    pub on_failure: OnFailure,
}

fn swap_timeout() -> u64 {
    30
}

/// Moves the running applications of an accelerator port to other workers: to those of another pool, or to those on
/// another device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmMoveAccel {
    /// Name of the accelerator.
    pub id: String,
    /// The slice whose application is moved; if absent, all applications, including later ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<u32>,
    /// Socket of the destination pool; the port's own if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// The devices to use there, as for --accel device=; the port's own if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Instead: which side is to serve the guest's applications. It can be the guest's own pool, the port, or neither.
    /// Cannot be combined with the other fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seat: Option<AccelSeat>,
    /// Instead: the address of another server, as the guest's applications write it: `tls://HOST:PORT` for another
    /// host's pool, or `gate`. Cannot be combined with the other fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// How long each application's outstanding device work may take, in milliseconds.
    #[serde(default = "drain_ms")]
    pub drain_ms: u64,
    /// Applications continue before large contents of their memory have arrived; the contents follow from the previous
    /// workers.
    #[serde(default)]
    pub postcopy: bool,
}

/// Which side serves a guest's applications.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum AccelSeat {
    /// The guest's own pool, on a device that is passed through to it.
    Local,
    /// The host's pool, through the port.
    Host,
    /// Neither: applications of the guest's own pool, or programs with native contexts, are suspended, with their state in
    /// the guest's memory.
    Parked,
}

fn drain_ms() -> u64 {
    DRAIN_MS
}

/// Applications that have been moved.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MovedAccel {
    /// Their slices.
    pub slices: Vec<u32>,
    /// Number of applications that the guest has moved, if it was asked to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applications: Option<u16>,
}

/// What happens to the VM if a swap fails halfway.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum OnFailure {
    /// The old device is plugged in again.
    #[default]
    Restore,
    /// The VM continues without the device.
    Without,
}

/// Destination of a snapshot.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmSnapshotConfig {
    /// `file://` followed by a directory.
    pub destination_url: String,
    /// First removes physical devices, which cannot be saved, from the guest.
    #[serde(default)]
    pub detach: bool,
    /// What happens to applications that use an accelerator.
    #[serde(default)]
    pub accel: AccelInSnapshot,
}

/// What happens to applications that use an accelerator when the VM is saved.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum AccelInSnapshot {
    /// The VM is not saved if there are any.
    #[default]
    Refuse,
    /// The applications are saved in the snapshot. A VM with an accelerator for native contexts is saved while it runs: its
    /// programs are suspended, it is paused, saved and resumed.
    Save,
}

impl VmSnapshotConfig {
    /// The directory.
    pub fn directory(&self) -> Option<&Path> {
        file_url(&self.destination_url)
    }
}

/// Destination of a core dump.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmCoredumpData {
    /// `file://` followed by a file.
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
    /// Each page when the guest first accesses it (userfaultfd), and the others in the background.
    OnDemand,
}

/// How a restored guest's clocks continue.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum RestoredClock {
    /// As if the guest had run since it was saved.
    #[default]
    Advance,
    /// From where they were.
    Continue,
}

/// New descriptors for a restored network card, in place of those that it had.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RestoredNet {
    /// Name of the card.
    pub id: String,
    /// Number of the request's descriptors that belong to this card.
    pub num_fds: usize,
    /// The descriptor numbers, if they were inherited (command line).
    #[serde(skip)]
    pub fds: Vec<i32>,
}

/// A memory zone to be allocated on another NUMA node of the host.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmMemoryZoneUpdate {
    /// Name of the zone.
    pub id: String,
    /// NUMA node of the host.
    pub host_numa_node: u32,
}

/// Source of a restored VM.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// `file://` followed by a directory.
    pub source_url: String,
    /// Touches every page of memory.
    #[serde(default)]
    pub prefault: bool,
    /// When memory is read.
    #[serde(default)]
    pub memory_restore_mode: MemoryRestoreMode,
    /// How the guest's clocks continue.
    #[serde(default)]
    pub clock: RestoredClock,
    /// Network cards that get new descriptors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_fds: Option<Vec<RestoredNet>>,
    /// Starts the vCPUs immediately.
    #[serde(default)]
    pub resume: bool,
    /// Memory zones to be allocated on other NUMA nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone_updates: Option<Vec<VmMemoryZoneUpdate>>,
    /// Accelerators whose applications are served by other pools from now on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accels: Option<Vec<RestoredAccel>>,
    /// Sockets, files and taps that have another name here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renames: Option<Vec<Rename>>,
    /// Restricts the VMM to the VM's files (Landlock), even if it was not restricted when it was saved.
    #[serde(default)]
    pub landlock_enable: bool,
    /// Files that Landlock allows in addition to those of the VM and of its own rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock_rules: Option<Vec<LandlockConfig>>,
}

/// An accelerator whose applications are served by another pool.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RestoredAccel {
    /// Its name.
    pub id: String,
    /// The pool's socket.
    pub socket: PathBuf,
    /// The devices there, as for --accel device=; as saved if absent.
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
    Key::new(
        "clock",
        ValueType::Choice(&[("advance", "Advance"), ("continue", "Continue")]),
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
    Key::named(
        "renames",
        "renames",
        ValueType::Pairs(Part("from", &ValueType::Text), Part("to", &ValueType::Text)),
    ),
];

impl RestoreConfig {
    /// Its syntax on the command line.
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

/// Converts a path to a `file://` URL; a URL is returned unchanged.
pub fn to_url(path: &str) -> String {
    if path.contains("://") {
        return path.to_owned();
    }
    // Fails only if there is no current directory; the server then reports what is wrong with the URL.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    format!("file://{}", path.display())
}

/// The absolute path in a `file://` URL. There are no escapes: the text is the path.
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
            "source_url=file:///s,prefault=on,resume=true,memory_restore_mode=ondemand,clock=continue,\
             net_fds=[n0@[3,4],n1@[5]],accels=[a0@/run/other],renames=[/run/a@/run/b,tap0@tap1]",
        )
        .unwrap();
        let renames = config.renames.unwrap();
        assert_eq!(
            (renames[0].from.as_str(), renames[0].to.as_str()),
            ("/run/a", "/run/b")
        );
        assert_eq!(renames[1].to, "tap1");
        let accels = config.accels.unwrap();
        assert_eq!(accels[0].id, "a0");
        assert_eq!(accels[0].socket, Path::new("/run/other"));
        assert!(config.prefault && config.resume);
        assert_eq!(config.clock, RestoredClock::Continue);
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
        assert_eq!(config.clock, RestoredClock::Advance);
        assert!(config.resume);
        assert_eq!(config.net_fds, None);
    }
}
