//! PCI Express root ports.

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device},
    syntax::{Key, PLACE, SyntaxError, parse},
};

/// A PCI Express root port: a bus with one slot, for devices that name it as their `parent`.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct PciRootPortConfig {
    /// Its name, by which devices and the API refer to it, and its location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

// The address windows of the other root ports depend on it.
has_common_config!(PciRootPortConfig, removable: false);

impl Configured for PciRootPortConfig {
    const HELP: &'static str = "PCI Express root ports, which devices name as parents: id=NAME,pci_segment=N,pci_device_id=N";

    const SYNTAX: &'static [&'static [Key]] = &[PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--pci-root-port", input, Self::SYNTAX)?;
        parsed.require("id", "id")?;
        parsed.build()
    }
}

impl Device for PciRootPortConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.common.id.is_none() {
            return Err(Problem::Missing("name it: devices say parent=NAME").at("id"));
        }
        self.placement().validate()
    }
}
