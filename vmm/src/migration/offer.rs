//! What the source offers.

use serde::{Deserialize, Serialize};

use super::PROTOCOL;
use crate::{config::VmConfig, snapshot::state_file};

/// A region of RAM.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct OfferedRegion {
    /// Guest-physical address.
    pub guest: u64,
    /// Bytes.
    pub len: u64,
    /// Plugged in at run time by ACPI.
    pub hotplugged: bool,
}

/// What is to move. Untrusted at the destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// Version of the protocol.
    pub protocol: u32,
    /// Version of the state format that will follow.
    pub state_version: u32,
    /// The program that offers, for people.
    pub gantry: String,
    /// The machine.
    pub config: Box<VmConfig>,
    /// Its memory.
    pub regions: Vec<OfferedRegion>,
    /// The state will carry a hash of all memory.
    pub verify: bool,
    /// Only an answer is wanted: nothing is to move.
    pub dry_run: bool,
    /// It was paused, and is to stay so.
    pub paused: bool,
}

impl Offer {
    /// Why this program cannot take it, as far as versions go.
    pub fn version_reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.protocol != PROTOCOL {
            reasons.push(format!(
                "Gantry {} offers version {} of the migration protocol, Gantry {} here takes {PROTOCOL}",
                self.gantry,
                self.protocol,
                env!("CARGO_PKG_VERSION"),
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

/// The state of the machine, with the hash of its memory if it was wished.
#[derive(Serialize, Deserialize)]
pub struct Departure {
    /// As in a state file.
    #[serde(with = "bytes")]
    pub state: Vec<u8>,
    /// Of all RAM.
    pub hash: Option<u64>,
}

/// A state file is text.
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
