//! Persistent memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem},
    common::CommonConfig,
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Persistent memory.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct PmemConfig {
    /// The file, or a directory for an unnamed one.
    pub file: PathBuf,
    /// Bytes, a multiple of 2 MiB; the file's size if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// The guest's writes do not reach the file.
    #[serde(default)]
    pub discard_writes: bool,
    /// Its name, and where it is.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[
    Key::new("file", ValueType::Text),
    Key::new("size", ValueType::Size),
    Key::new("discard_writes", ValueType::Switch),
];

impl PmemConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[KEYS, IOMMU, PLACE];

    /// Parses the value of `--pmem`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--pmem", input, Self::SYNTAX)?;
        parsed.require("file", "file")?;
        parsed.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        if self.file.as_os_str().is_empty() {
            return Err(Problem::Missing("name a file").at("file"));
        }
        if let Some(size) = self.size {
            let valid = size > 0 && size.is_multiple_of(2 << 20);
            check::number("size", size, valid, "a multiple of 2 MiB (2097152)")?;
        }
        self.placement().validate()
    }

    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }
}
