//! Name and place of a device, which those of all kinds have.

use serde::{Deserialize, Serialize};

use super::check::Placement;

/// What a device is called, and where on the PCI buses it sits.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct CommonConfig {
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

impl CommonConfig {
    /// A device of this name, anywhere.
    #[must_use]
    pub fn named(id: impl Into<String>) -> Self {
        Self {
            id: Some(id.into()),
            ..Self::default()
        }
    }

    /// What there is to check about it.
    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            id: self.id.as_deref(),
            segment: self.pci_segment,
            device: self.pci_device_id,
            ..Placement::default()
        }
    }
}

/// A device that has a name and a place.
pub trait HasCommonConfig {
    /// Where it is to be.
    fn common(&self) -> &CommonConfig;

    /// The same, to give it the name that it has not.
    fn common_mut(&mut self) -> &mut CommonConfig;
}

/// For a configuration with the field `common`.
macro_rules! has_common_config {
    ($config:ident) => {
        impl $crate::config::HasCommonConfig for $config {
            fn common(&self) -> &$crate::config::CommonConfig {
                &self.common
            }

            fn common_mut(&mut self) -> &mut $crate::config::CommonConfig {
                &mut self.common
            }
        }
    };
}

pub(super) use has_common_config;
