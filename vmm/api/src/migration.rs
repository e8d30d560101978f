//! Request bodies for migrations.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmm_config::LandlockConfig;

use super::VmMemoryZoneUpdate;

/// What happens when a migration reaches its timeout.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum TimeoutStrategy {
    /// The VM stays at the source.
    #[default]
    Cancel,
    /// The VM is migrated, however long the downtime.
    Ignore,
}

/// When memory is transferred.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum MigrationMode {
    /// Before the VM runs at the destination.
    #[default]
    Precopy,
    /// After the VM runs at the destination. Not supported yet.
    Postcopy,
}

/// What happens to accelerators (`--accel`), which belong to the host.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum AccelMigration {
    /// A VM that has one is not migrated.
    #[default]
    Refuse,
    /// The guest is asked to give them up first. It gets them back if the VM stays.
    Detach,
    /// Their applications are stopped together with the VM and continue at the destination, with workers of the pool
    /// that has the same path there, or the path that it is renamed to.
    Move,
}

/// What happens to physical devices (`--device`), which belong to the host.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum PassthroughMigration {
    /// A VM that has one is not migrated.
    #[default]
    Refuse,
    /// Applications on tracked devices continue on the host's pool, through the accelerator that tracks each device,
    /// and are migrated with the VM. The guest is asked to give up the devices. Everything is restored if the VM stays.
    Remote,
    /// Applications on tracked devices are suspended, with their state in the guest's memory, until the VM has the
    /// devices again. The guest is asked to give up the devices. Everything is restored if the VM stays.
    Park,
    /// The guest is asked to give up the devices, and applications lose them. The guest gets them back if the VM stays.
    Detach,
}

/// Migrates the VM to another Gantry process.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct SendMigration {
    /// `unix:PATH` or `tcp:HOST:PORT`.
    pub destination_url: String,
    /// The destination is on this host and takes over the memory itself, without a copy.
    #[serde(default)]
    pub local: bool,
    /// This Gantry process does not exit after the VM has left it.
    #[serde(default)]
    pub preserve_source: bool,
    /// Maximum downtime in milliseconds, at least 1.
    #[serde(default = "downtime")]
    pub downtime_ms: u64,
    /// Maximum duration in seconds, at least 1.
    #[serde(default = "timeout")]
    pub timeout_s: u64,
    /// What happens when that is exceeded.
    #[serde(default)]
    pub timeout_strategy: TimeoutStrategy,
    /// Number of connections for memory, 1 to 128.
    #[serde(default = "connections")]
    pub connections: u32,
    /// Directory with certificates and keys for TLS 1.3 over TCP; both sides present certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Socket of the `gantry-tunnel` that holds the keys; `/run/gantry-tunnel/socket` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<PathBuf>,
    /// When memory is transferred.
    #[serde(default)]
    pub memory_mode: MigrationMode,
    /// Compares a hash of all memory on both sides while the VM is stopped.
    #[serde(default)]
    pub verify: bool,
    /// Only asks whether the destination would accept the VM.
    #[serde(default)]
    pub dry_run: bool,
    /// Maximum time in seconds for which the peer may keep silent, at least 1.
    #[serde(default = "stall")]
    pub stall_s: u64,
    /// Maximum bandwidth for memory while the VM runs, in bytes per second, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Maximum throttling of the vCPUs if the guest writes its memory faster than it can be sent, as a percentage of
    /// their time, up to 99. 0 disables throttling.
    #[serde(default = "max_throttle")]
    pub max_throttle: u8,
    /// What happens to accelerators.
    #[serde(default)]
    pub accel: AccelMigration,
    /// Applications are copied before the VM is stopped, while they run; during the downtime only the changes since
    /// then are sent.
    #[serde(default)]
    pub accel_copies: bool,
    /// Applications continue before large contents of their memory have been transferred; the contents follow.
    #[serde(default)]
    pub accel_postcopy: bool,
    /// What happens to physical devices. `Remote` and `Park` imply that accelerators' applications are migrated.
    #[serde(default)]
    pub passthrough: PassthroughMigration,
}

fn max_throttle() -> u8 {
    99
}

fn downtime() -> u64 {
    300
}

fn timeout() -> u64 {
    3600
}

fn connections() -> u32 {
    1
}

fn stall() -> u64 {
    30
}

impl SendMigration {
    /// A migration to `destination_url` with the default settings.
    pub fn to(destination_url: &str) -> Self {
        Self {
            destination_url: destination_url.to_owned(),
            local: false,
            preserve_source: false,
            downtime_ms: downtime(),
            timeout_s: timeout(),
            timeout_strategy: TimeoutStrategy::default(),
            connections: connections(),
            tls_dir: None,
            tunnel: None,
            memory_mode: MigrationMode::default(),
            verify: false,
            dry_run: false,
            stall_s: stall(),
            bandwidth: None,
            max_throttle: max_throttle(),
            accel: AccelMigration::default(),
            accel_copies: false,
            accel_postcopy: false,
            passthrough: PassthroughMigration::default(),
        }
    }

    /// What happens to accelerators, taking the setting for physical devices into account.
    pub fn accel(&self) -> AccelMigration {
        match (self.passthrough, self.accel) {
            (PassthroughMigration::Remote | PassthroughMigration::Park, AccelMigration::Refuse) => {
                AccelMigration::Move
            }
            (_, accel) => accel,
        }
    }
}

/// A host resource that has another name at the destination, or where a VM is restored.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Rename {
    /// Path or name as in the configuration.
    pub from: String,
    /// Path or name there.
    pub to: String,
}

/// Receives a VM from another Gantry process.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct ReceiveMigration {
    /// `unix:PATH` or `tcp:ADDRESS:PORT`, to which the source will connect.
    pub receiver_url: String,
    /// The port may be open to other hosts without TLS. The VM uses only files that this request names.
    #[serde(default)]
    pub insecure: bool,
    /// Files, directories and taps that the VM may use; any if absent, unless it is a TCP port without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<PathBuf>>,
    /// Directory with certificates and keys for TLS 1.3 over TCP; both sides present certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Socket of the `gantry-tunnel` that holds the keys; `/run/gantry-tunnel/socket` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<PathBuf>,
    /// When memory is transferred.
    #[serde(default)]
    pub memory_mode: MigrationMode,
    /// Memory zones to be allocated on another NUMA node of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone_updates: Option<Vec<VmMemoryZoneUpdate>>,
    /// Sockets, files and taps that have another name here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renames: Option<Vec<Rename>>,
    /// Restricts the VMM to the VM's files (Landlock), even if the source is not restricted.
    #[serde(default)]
    pub landlock_enable: bool,
    /// Files that Landlock allows in addition to those of the VM and of its own rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock_rules: Option<Vec<LandlockConfig>>,
}

/// Which side runs the VM.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum RunsAt {
    /// The source: the VM continues here.
    Source,
    /// The destination: the VM is dropped here.
    Destination,
}

/// Decides which side runs the VM.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ResolveMigration {
    /// The side that runs it.
    pub runs_at: RunsAt,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_the_command_line_client_are_understood() {
        let send: SendMigration = serde_json::from_str(
            r#"{"destination_url":"unix:/tmp/x","local":true,"preserve_source":false,
            "downtime_ms":300,"timeout_s":3600,"timeout_strategy":"Cancel","connections":1,
            "tls_dir":null,"memory_mode":"Precopy"}"#,
        )
        .unwrap();
        assert!(send.local);
        let plain = SendMigration::to("unix:/tmp/x");
        assert_eq!(
            SendMigration {
                local: false,
                ..send
            },
            plain
        );
        let least: SendMigration =
            serde_json::from_str(r#"{"destination_url":"unix:/tmp/x"}"#).unwrap();
        assert_eq!(least, plain);
        let receive: ReceiveMigration = serde_json::from_str(
            r#"{"receiver_url":"tcp:0.0.0.0:1","tls_dir":null,"memory_mode":"Precopy",
            "vfio_fds":null,"iommufd_fd":null,"zone_updates":[]}"#,
        )
        .unwrap();
        assert_eq!(receive.receiver_url, "tcp:0.0.0.0:1");
    }
}
