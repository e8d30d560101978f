//! Entropy.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Placement, Problem},
    syntax::{IOMMU, Key, Kind, PLACE, SyntaxError, parse},
};

/// Entropy source.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RngConfig {
    /// File to read from.
    pub src: PathBuf,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Name of the device in the API; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment to plug it into.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number on the segment's bus, 1 to 31; the first free one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
}

impl Default for RngConfig {
    fn default() -> Self {
        Self {
            src: PathBuf::from("/dev/urandom"),
            iommu: false,
            id: None,
            pci_segment: 0,
            pci_device_id: None,
        }
    }
}

const KEYS: &[Key] = &[Key::new("src", Kind::Text)];

impl RngConfig {
    /// How it is written on the command line.
    pub const SYNTAX: &[&[Key]] = &[KEYS, IOMMU, PLACE];

    /// Parses the value of `--rng`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--rng", input, Self::SYNTAX)?;
        parsed.default("src", "/dev/urandom");
        parsed.build()
    }

    /// What it says can be done.
    pub fn validate(&self) -> Result<(), Invalid> {
        if self.src.as_os_str().is_empty() {
            return Err(Problem::Missing("name a file such as /dev/urandom").at("src"));
        }
        self.placement().validate()
    }

    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            id: self.id.as_deref(),
            segment: self.pci_segment,
            device: self.pci_device_id,
            iommu: self.iommu,
            ..Placement::default()
        }
    }
}
