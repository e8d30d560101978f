//! Persistent memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, FileUse, HotPlug},
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Persistent memory.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct PmemConfig {
    /// The backing file, or a directory for an unnamed one.
    pub file: PathBuf,
    /// Size in bytes, a multiple of 2 MiB; the file's size if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// The guest's writes are not written to the file.
    #[serde(default)]
    pub discard_writes: bool,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[
    Key::new("file", ValueType::Text),
    Key::new("size", ValueType::Size),
    Key::new("discard_writes", ValueType::Switch),
];

has_common_config!(PmemConfig);

impl Configured for PmemConfig {
    const HELP: &'static str =
        "Persistent memory: file=FILE,size=SIZE,discard_writes=on|off,id=NAME";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Plug in persistent memory",
        help: "As for --pmem: file=FILE,size=SIZE,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, IOMMU, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let parsed = parse("--pmem", input, Self::SYNTAX)?;
        parsed.require("file", "file")?;
        parsed.build()
    }
}

impl Device for PmemConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.file.as_os_str().is_empty() {
            return Err(Problem::Missing("name a file").at("file"));
        }
        if let Some(size) = self.size {
            let valid = size > 0 && size.is_multiple_of(2 << 20);
            check::number("size", size, valid, "a multiple of 2 MiB (2097152)")?;
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
        vec![FileUse::open(&self.file, self.discard_writes)]
    }

    fn cannot_move(&self) -> Option<&'static str> {
        // A host that has it mapped has contents in its page cache, and its lock.
        Some("persistent memory")
    }
}
