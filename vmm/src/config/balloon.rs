//! Memory balloon.

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Placement},
    common::CommonConfig,
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Memory balloon.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct BalloonConfig {
    /// Bytes that the guest gives up.
    pub size: u64,
    /// The guest takes them back before it runs out of memory.
    #[serde(default)]
    pub deflate_on_oom: bool,
    /// The guest tells which pages it does not use.
    #[serde(default)]
    pub free_page_reporting: bool,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name, and where it is.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[
    Key::new("size", ValueType::Size),
    Key::new("deflate_on_oom", ValueType::Switch),
    Key::new("free_page_reporting", ValueType::Switch),
];

impl BalloonConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[KEYS, IOMMU, PLACE];

    /// Parses the value of `--balloon`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--balloon", input, Self::SYNTAX)?;
        parsed.require("size", "size")?;
        parsed.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.placement().validate()
    }

    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }
}
