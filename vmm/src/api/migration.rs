//! Bodies of the requests about migrations.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::VmMemoryZoneUpdate;

/// What happens when a migration has taken as long as it may.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum TimeoutStrategy {
    /// The VM stays where it is.
    #[default]
    Cancel,
    /// It moves, however long it stands still.
    Ignore,
}

/// When memory moves.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum MigrationMode {
    /// Before the VM.
    #[default]
    Precopy,
    /// After it. Not supported yet.
    Postcopy,
}

/// What becomes of accelerators (`--accel`), which belong to the host.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum AccelMigration {
    /// A VM that has one does not move.
    #[default]
    Refuse,
    /// The guest is asked to give them up first. It has them again if the VM stays.
    Detach,
    /// Their applications stand still while the VM does, and go on there with workers of the pool that
    /// is at the same path, or is renamed to.
    Move,
}

/// What becomes of physical devices (`--device`), which belong to the host.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum PassthroughMigration {
    /// A VM that has one does not move.
    #[default]
    Refuse,
    /// Applications on devices that are tracked go on with the host's pool, by the accelerator that tracks
    /// each, and move with the VM; the guest is asked to give the devices up. All is as before if the VM
    /// stays.
    Remote,
    /// Applications on devices that are tracked stand still, with their state in the guest's memory, until the
    /// VM has the devices again; the guest is asked to give them up. All is as before if the VM stays.
    Park,
    /// The guest is asked to give the devices up, and applications lose them. It has them again if the VM
    /// stays.
    Detach,
}

/// Moves the VM to another Gantry.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct SendMigration {
    /// `unix:PATH` or `tcp:HOST:PORT`.
    pub destination_url: String,
    /// To another Gantry on this host that gets memory as it is.
    #[serde(default)]
    pub local: bool,
    /// This Gantry does not end when the VM has left it.
    #[serde(default)]
    pub preserve_source: bool,
    /// Milliseconds for which the VM may stand still, from 1.
    #[serde(default = "downtime")]
    pub downtime_ms: u64,
    /// Seconds that it may take, from 1.
    #[serde(default = "timeout")]
    pub timeout_s: u64,
    /// What happens then.
    #[serde(default)]
    pub timeout_strategy: TimeoutStrategy,
    /// Connections for memory, 1 to 128.
    #[serde(default = "connections")]
    pub connections: u32,
    /// Directory with certificates and keys: TLS 1.3 with both sides' certificates, over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Socket of the `gantry-tunnel` that has the keys; `/run/gantry-tunnel/socket` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<PathBuf>,
    /// When memory moves.
    #[serde(default)]
    pub memory_mode: MigrationMode,
    /// Compare a hash of all memory on both sides, while the VM stands still.
    #[serde(default)]
    pub verify: bool,
    /// Only ask whether the destination would take the VM.
    #[serde(default)]
    pub dry_run: bool,
    /// Seconds for which the other side may keep silent, from 1.
    #[serde(default = "stall")]
    pub stall_s: u64,
    /// Bytes of memory per second at most while the VM runs, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// How much of their time vCPUs may lose if the guest writes its memory faster than it can be
    /// sent, in percent, to 99. 0: none.
    #[serde(default = "max_throttle")]
    pub max_throttle: u8,
    /// What becomes of accelerators.
    #[serde(default)]
    pub accel: AccelMigration,
    /// Applications that move are copied before, while they go on; the stop has what is new since.
    #[serde(default)]
    pub accel_copies: bool,
    /// Applications that move go on before large contents of their memory have come, which follow.
    #[serde(default)]
    pub accel_postcopy: bool,
    /// What becomes of physical devices. `Remote` and `Park` have accelerators' applications move.
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
    /// To a destination, and nothing particular wished.
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

    /// What becomes of accelerators, by the wish for physical devices, too.
    pub fn accel(&self) -> AccelMigration {
        match (self.passthrough, self.accel) {
            (PassthroughMigration::Remote | PassthroughMigration::Park, AccelMigration::Refuse) => {
                AccelMigration::Move
            }
            (_, accel) => accel,
        }
    }
}

/// A resource of the host that is called something else at the destination.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Rename {
    /// Path or name at the source, exactly as in the configuration.
    pub from: String,
    /// The same at the destination.
    pub to: String,
}

/// Takes a VM from another Gantry.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct ReceiveMigration {
    /// `unix:PATH` or `tcp:ADDRESS:PORT`, where the source will connect to.
    pub receiver_url: String,
    /// Directory with certificates and keys: TLS 1.3 with both sides' certificates, over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_dir: Option<PathBuf>,
    /// Socket of the `gantry-tunnel` that has the keys; `/run/gantry-tunnel/socket` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<PathBuf>,
    /// When memory moves.
    #[serde(default)]
    pub memory_mode: MigrationMode,
    /// Memory zones that move to another node of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone_updates: Option<Vec<VmMemoryZoneUpdate>>,
    /// Sockets, files and taps that are called something else here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renames: Option<Vec<Rename>>,
}

/// Where the VM runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
pub enum RunsAt {
    /// Here: it goes on.
    Source,
    /// There: it is dropped here.
    Destination,
}

/// Says who has the VM.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ResolveMigration {
    /// Where it runs.
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
