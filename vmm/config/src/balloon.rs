//! Memory balloon.

use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{self, Invalid, Placement},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device},
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Memory balloon.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct BalloonConfig {
    /// Number of bytes that the guest gives up.
    pub size: u64,
    /// The guest takes memory back before it runs out of memory.
    #[serde(default)]
    pub deflate_on_oom: bool,
    /// The guest reports pages that it does not use.
    #[serde(default)]
    pub free_page_reporting: bool,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[
    Key::new("size", ValueType::Size),
    Key::new("deflate_on_oom", ValueType::Switch),
    Key::new("free_page_reporting", ValueType::Switch),
];

has_common_config!(BalloonConfig, removable: false);

impl Configured for BalloonConfig {
    const HELP: &'static str =
        "Memory balloon: size=SIZE,deflate_on_oom=on|off,free_page_reporting=on|off";

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, IOMMU, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--balloon", input, Self::SYNTAX)?;
        parsed.require("size", "size")?;
        parsed.build()
    }
}

impl Device for BalloonConfig {
    fn validate(&self) -> Result<(), Invalid> {
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }

    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        check::range("size", self.size, 0, vm.memory.total())
    }
}
