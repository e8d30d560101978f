//! PCI Express root ports.

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Placement, Problem},
    common::CommonConfig,
    syntax::{Key, PLACE, SyntaxError, parse},
};

/// A PCI Express root port: a bus with one slot, for devices that name it as their `parent`.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct PciRootPortConfig {
    /// Its name, by which devices and the API call it, and where it is.
    #[serde(flatten)]
    pub common: CommonConfig,
}

impl PciRootPortConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[PLACE];

    /// Parses the value of `--pci-root-port`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--pci-root-port", input, Self::SYNTAX)?;
        parsed.require("id", "id")?;
        parsed.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        if self.common.id.is_none() {
            return Err(Problem::Missing("name it: devices say parent=NAME").at("id"));
        }
        self.placement().validate()
    }

    pub(super) fn placement(&self) -> Placement<'_> {
        self.common.placement()
    }
}
