//! Devices that another process serves.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Placement, Problem, is_zero},
    syntax::{FUNCTION, Key, Kind, PLACE, SyntaxError, parse},
};

/// A device of another process (vfio-user).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserDeviceConfig {
    /// That process's socket.
    pub socket: PathBuf,
    /// Name of the device in the API; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment to plug it into.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number on the segment's bus, 1 to 31; the first free one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
    /// Function of the slot, 0 to 7.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pci_function: u8,
    /// The root port behind which it sits, in the only slot there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

const KEYS: &[Key] = &[Key::new("socket", Kind::Text)];

impl UserDeviceConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[KEYS, PLACE, FUNCTION];

    /// Parses the value of `--user-device`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--user-device", input, Self::SYNTAX)?;
        parsed.require("socket", "socket")?;
        parsed.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name the socket of its server").at("socket"));
        }
        self.placement().validate()
    }

    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            id: self.id.as_deref(),
            segment: self.pci_segment,
            device: self.pci_device_id,
            iommu: false,
            function: self.pci_function,
            parent: self.parent.as_deref(),
        }
    }
}
