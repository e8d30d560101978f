//! IOMMU (virtio 1.2, 5.13): the guest controls which memory each of its passthrough devices
//! reaches.
//!
//! ```text
//!   guest driver ── ATTACH, MAP, UNMAP ──> VirtioIommu ──> Endpoints (domains and mappings)
//!                                                              │ Endpoint::map, unmap
//!   physical device <── host's IOMMU <─────────────────────────┘
//! ```
//!
//! - [`endpoint`]: the translation for one device, as an interface.
//! - [`endpoints`]: the registry of devices behind the IOMMU; the VM adds and removes them.
//! - [`domains`]: the domains, their mappings, and the endpoints attached to them.
//! - [`request`]: the driver's requests.
//! - [`device`]: the virtio device; [`state`]: its saved state.
//!
//! Faults are not reported to the guest: only the host sees a passthrough device's faults, in its
//! log.

mod add_error;
mod device;
mod domains;
mod endpoint;
mod endpoints;
mod request;
mod state;
mod status;

pub use add_error::{AddError, ReservedMapping};
pub use device::{ADDRESS_WIDTHS, Error, Options, VirtioIommu};
pub use endpoint::{Access, Endpoint, INTERRUPTS, MapError, Reserved, ReservedKind};
pub use endpoints::Endpoints;

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
