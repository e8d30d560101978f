//! Memory balloon.

use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Placement},
    syntax::{IOMMU, Key, Kind, PLACE, SyntaxError, parse},
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

const KEYS: &[Key] = &[
    Key::new("size", Kind::Size),
    Key::new("deflate_on_oom", Kind::Switch),
    Key::new("free_page_reporting", Kind::Switch),
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
            id: self.id.as_deref(),
            segment: self.pci_segment,
            device: self.pci_device_id,
            iommu: self.iommu,
            ..Placement::default()
        }
    }
}
