//! The source's offer, and the messages that describe the machine.

use std::{
    fs::{self, File},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use devices::accel::rounds::CopiedPort;
use hypervisor::CpuNeeds;
use serde::{Deserialize, Serialize};
use vmm_config::{AccelVia, VmConfig};
use vmm_snapshot::state_file;

use super::{
    Error, OLDEST_PROTOCOL, PROTOCOL, Result,
    frame::protocol,
    gpu_driver::GpuDriver,
    lanes::{MOST, TOKEN, Token},
};

/// A region of RAM.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct OfferedRegion {
    /// Guest-physical address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// Hot-plugged by ACPI.
    pub hotplugged: bool,
}

/// Description of the machine to migrate. Untrusted at the destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// Version of the protocol.
    pub protocol: u32,
    /// Version of the state format that will be used.
    pub state_version: u32,
    /// The offering program's version, for humans.
    pub gantry: String,
    /// The machine's configuration.
    pub config: Box<VmConfig>,
    /// Its memory.
    pub regions: Vec<OfferedRegion>,
    /// The state will contain a hash of all memory.
    pub verify: bool,
    /// Dry run: the source only asks whether the machine would be accepted.
    pub dry_run: bool,
    /// The machine was paused and must stay so.
    pub paused: bool,
    /// The CPU features that the guest has seen.
    #[serde(default)]
    pub cpu: Option<CpuNeeds>,
    /// Its memory is handed over as files, which follow the offer.
    #[serde(default)]
    pub local: bool,
    /// Number of files that follow.
    #[serde(default)]
    pub files: usize,
    /// Number of further connections that carry memory; if 0, this connection carries it.
    #[serde(default)]
    pub lanes: u32,
    /// The source's host, if the destination is to say whether it runs there, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostId>,
    /// Applications are copied while they run, if the destination supports that.
    #[serde(default, skip_serializing_if = "is_false")]
    pub copies: bool,
    /// Contents of applications may be left out of their state; they follow when the machine runs at the destination.
    #[serde(default, skip_serializing_if = "is_false")]
    pub postcopy: bool,
    /// The driver by which CUDA programs of the guest are served, if it has a port for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_driver: Option<GpuDriver>,
    /// Network cards, by name, whose taps came as descriptors: where they are handed over, the next boot needs them, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tap_descriptors: Vec<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "for serde")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Identifies a running kernel: the host and its current boot. Two programs with the same ID share file locks, unless
/// their hosts were restored from one snapshot of a virtual host's memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct HostId(String);

impl HostId {
    /// This host's ID, if it is readable.
    pub fn read() -> Option<Self> {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(Self(id.trim().to_owned()))
    }
}

/// The reply to an offer that is accepted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Prepared {
    /// The token for further connections, if the offer has some.
    pub token: Option<Token>,
    /// Both sides are on one host. An older destination does not report this, and an older source does not ask for it.
    pub same_host: bool,
    /// The destination accepts copies of applications. Only reported to a source that has offered copies.
    pub copies: bool,
}

impl Prepared {
    /// Flag after the token: both sides are on one host.
    const SAME_HOST: u8 = 1;
    /// Flag after the token: the destination accepts copies.
    const COPIES: u8 = 2;

    /// Encodes the contents of the frame. Unless the source sent [`Offer::host`] or [`Offer::copies`], it must contain
    /// nothing but the token.
    pub fn encode(&self) -> Vec<u8> {
        let mut contents: Vec<u8> = self.token.iter().flatten().copied().collect();
        let flags =
            u8::from(self.same_host) * Self::SAME_HOST + u8::from(self.copies) * Self::COPIES;
        contents.extend((flags != 0).then_some(flags));
        contents
    }

    /// Decodes untrusted contents, as the reply to an offer with `lanes` further connections.
    pub fn decode(contents: &[u8], lanes: u32) -> Result<Self> {
        let (token, rest) = match lanes {
            0 => (None, contents),
            _ => {
                let parts = contents.split_first_chunk::<TOKEN>();
                let (token, rest) = parts.ok_or_else(|| protocol("it has named no token"))?;
                (Some(*token), rest)
            }
        };
        let flags = match rest {
            [flags] => *flags,
            _ => 0,
        };
        Ok(Self {
            token,
            same_host: flags & Self::SAME_HOST != 0,
            copies: flags & Self::COPIES != 0,
        })
    }
}

impl Offer {
    /// The oldest protocol version that supports everything that is needed. `applications`: some may be migrated too;
    /// `postcopy`: some of their contents may follow later.
    pub fn needed_version(lanes: u32, applications: bool, postcopy: bool) -> u32 {
        match (applications, lanes) {
            (true, _) if postcopy => 5,
            (true, _) => 4,
            (false, 0) => 2,
            (false, _) => 3,
        }
    }

    /// Whether applications of accelerators may come with it.
    pub fn has_applications(&self) -> bool {
        let mut accels = self.config.accels.iter().flatten();
        self.protocol >= 4 && accels.any(|one| matches!(one.via, AccelVia::Ring(_)))
    }

    /// Why this program cannot accept the offer because of its versions; empty if it can.
    pub fn version_reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if !(OLDEST_PROTOCOL..=PROTOCOL).contains(&self.protocol) {
            reasons.push(format!(
                "Gantry {} offers version {} of the migration protocol, Gantry {} here takes \
                 {OLDEST_PROTOCOL} to {PROTOCOL}",
                self.gantry,
                self.protocol,
                env!("CARGO_PKG_VERSION"),
            ));
        }
        if self.lanes > MOST {
            reasons.push(format!(
                "{} connections are offered, and {MOST} are the most",
                self.lanes
            ));
        }
        let readable = state_file::OLDEST..=state_file::VERSION;
        if !readable.contains(&self.state_version) {
            reasons.push(format!(
                "Gantry {} writes states of version {}, Gantry {} here reads {} to {}",
                self.gantry,
                self.state_version,
                env!("CARGO_PKG_VERSION"),
                state_file::OLDEST,
                state_file::VERSION,
            ));
        }
        reasons
    }
}

/// The state of the machine, with a hash of its memory if that was requested.
#[derive(Serialize, Deserialize)]
pub struct Departure {
    /// In the format of a state file.
    #[serde(with = "bytes")]
    pub state: Vec<u8>,
    /// Hash of all RAM.
    pub hash: Option<u64>,
    /// Length of the applications' archive, if one has been sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive: Option<u64>,
    /// When the guest's clocks were read, by the source host's clock.
    #[serde(default)]
    pub saved_at: Option<Moment>,
    /// How long it took to stop the machine and to save its state, in milliseconds.
    #[serde(default)]
    pub stopping_ms: u64,
}

/// A copy of applications, or of what has changed since the previous one.
pub struct Copy {
    ports: Vec<CopiedPort>,
    /// Images and the contents of slices.
    pub archive: File,
}

impl Copy {
    /// A copy with its data in an archive.
    pub fn new(ports: Vec<CopiedPort>, archive: File) -> Self {
        Self { ports, archive }
    }

    /// Encodes the description for the destination; `archive` is the archive's length.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub fn describe(self, archive: u64) -> Result<Vec<u8>> {
        let ports = self.ports;
        let text = serde_json::to_vec(&CopyOf { archive, ports });
        text.map_err(|error| Error::Machine(error.to_string()))
    }
}

/// Description of a copy, whose archive was sent before.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CopyOf {
    /// Length of the archive in bytes.
    pub archive: u64,
    /// Its ports.
    pub ports: Vec<CopiedPort>,
}

/// A point in time by the host's clock: nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Moment(u64);

impl Moment {
    /// The current time.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let since = since.unwrap_or_default().as_nanos();
        Self(u64::try_from(since).unwrap_or(u64::MAX))
    }

    /// How long ago this was, by this host's clock. If the hosts' clocks differ by more than the longest possible
    /// transfer, the value is not credible, and the result is zero.
    pub fn ago(self) -> Duration {
        /// Longest possible transfer.
        const MOST: Duration = Duration::from_secs(600);
        let ago = Self::now().0.checked_sub(self.0).map(Duration::from_nanos);
        match ago.filter(|ago| *ago <= MOST) {
            Some(ago) => ago,
            None => {
                log::warn!(
                    "the clocks of the two hosts differ: the guest's clock goes on from where it \
                     stood"
                );
                Duration::ZERO
            }
        }
    }
}

/// The encoding of a state file, which is text.
mod bytes {
    use serde::{Deserialize, Deserializer, Serializer, ser::Error};

    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        let text = std::str::from_utf8(bytes).map_err(S::Error::custom)?;
        serializer.serialize_str(text)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        String::deserialize(deserializer).map(String::into_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_moment_that_is_near_is_believed() {
        let now = Moment::now();
        assert!(now.ago() < Duration::from_secs(60));
        let second = 1_000_000_000;
        let ago = Moment(now.0 - 2 * second).ago();
        assert!((2..60).contains(&ago.as_secs()), "{ago:?}");
        assert_eq!(Moment(now.0 + 100 * second).ago(), Duration::ZERO);
        assert_eq!(Moment(0).ago(), Duration::ZERO);
        assert_eq!(Moment(u64::MAX).ago(), Duration::ZERO);
    }
}
