//! Devices that another process serves.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Placement, Problem, is_zero},
    common::CommonConfig,
    syntax::{FUNCTION, Key, PLACE, SyntaxError, ValueType, parse},
};

/// A device of another process (vfio-user).
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserDeviceConfig {
    /// That process's socket.
    pub socket: PathBuf,
    /// Its name, and where it is.
    #[serde(flatten)]
    pub common: CommonConfig,
    /// Function of the slot, 0 to 7.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pci_function: u8,
    /// The root port behind which it sits, in the only slot there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

const KEYS: &[Key] = &[Key::new("socket", ValueType::Text)];

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
            function: self.pci_function,
            parent: self.parent.as_deref(),
            ..self.common.placement()
        }
    }
}
