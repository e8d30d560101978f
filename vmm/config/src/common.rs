//! Name and location, which devices of all kinds have.

use serde::{Deserialize, Serialize};

use super::check::Placement;

/// Name of a device and its location on the PCI buses.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct CommonConfig {
    /// Name of the device in the API; generated if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment to plug it into.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number on the segment's root bus, 1 to 31; the first free one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
}

impl CommonConfig {
    /// A device with this name, at any location.
    #[must_use]
    pub fn named(id: impl Into<String>) -> Self {
        Self {
            id: Some(id.into()),
            ..Self::default()
        }
    }

    /// The part that has to be validated.
    pub(super) fn placement(&self) -> Placement<'_> {
        Placement {
            id: self.id.as_deref(),
            segment: self.pci_segment,
            device: self.pci_device_id,
            ..Placement::default()
        }
    }
}

/// A device that has a name and a location.
pub trait HasCommonConfig {
    /// Its name and location.
    fn common(&self) -> &CommonConfig;

    /// Mutable access, for naming a device that has no name.
    fn common_mut(&mut self) -> &mut CommonConfig;

    /// Whether it can be removed from a running guest.
    fn is_removable(&self) -> bool {
        true
    }
}

/// Implements [`HasCommonConfig`] for a configuration with the field `common`.
macro_rules! has_common_config {
    ($config:ident) => {
        $crate::common::has_common_config!($config, removable: true);
    };
    ($config:ident, removable: $removable:literal) => {
        impl $crate::HasCommonConfig for $config {
            fn common(&self) -> &$crate::CommonConfig {
                &self.common
            }

            fn common_mut(&mut self) -> &mut $crate::CommonConfig {
                &mut self.common
            }

            fn is_removable(&self) -> bool {
                $removable
            }
        }
    };
}

pub(super) use has_common_config;
