//! Entropy.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Placement, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, FileUse},
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Entropy source.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RngConfig {
    /// The file from which entropy is read.
    pub src: PathBuf,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

impl Default for RngConfig {
    fn default() -> Self {
        Self {
            src: PathBuf::from("/dev/urandom"),
            iommu: false,
            common: CommonConfig::default(),
        }
    }
}

const KEYS: &[Key] = &[Key::new("src", ValueType::Text)];

has_common_config!(RngConfig, removable: false);

impl Configured for RngConfig {
    const HELP: &'static str = "Source of entropy: src=FILE (/dev/urandom)";

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, IOMMU, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--rng", input, Self::SYNTAX)?;
        parsed.default("src", "/dev/urandom");
        parsed.build()
    }
}

impl Device for RngConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.src.as_os_str().is_empty() {
            return Err(Problem::Missing("name a file such as /dev/urandom").at("src"));
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }

    fn files(&self) -> Vec<FileUse> {
        vec![FileUse::read(&self.src)]
    }
}
