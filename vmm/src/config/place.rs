//! Name and place of a device, which those of all kinds have.

use serde::{Deserialize, Serialize};

use super::check::Placement;

/// What a device is called, and where on the PCI buses it sits.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Place {
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

impl Place {
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
pub trait Placed {
    /// Where it is to be.
    fn place(&self) -> &Place;

    /// The same, to give it the name that it has not.
    fn place_mut(&mut self) -> &mut Place;
}

macro_rules! placed {
    ($($config:ident),* $(,)?) => {
        $(impl Placed for super::$config {
            fn place(&self) -> &Place {
                &self.place
            }

            fn place_mut(&mut self) -> &mut Place {
                &mut self.place
            }
        })*
    };
}

placed!(
    AccelConfig,
    AccelServerConfig,
    BalloonConfig,
    ConsoleConfig,
    DeviceConfig,
    DiskConfig,
    NetConfig,
    PciRootPortConfig,
    PmemConfig,
    RngConfig,
    UserDeviceConfig,
    VsockConfig,
);
