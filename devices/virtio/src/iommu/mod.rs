//! IOMMU (virtio 1.2, 5.13): the guest says what each of its physical devices can reach.
//!
//! ```text
//!   guest driver ── ATTACH, MAP, UNMAP ──> VirtioIommu ──> Endpoints (domains and mappings)
//!                                                              │ Endpoint::map, unmap
//!   physical device <── host's IOMMU <─────────────────────────┘
//! ```
//!
//! - [`endpoint`]: what translates for one device, whoever implements it.
//! - [`endpoints`]: the devices behind the IOMMU; the machine adds and removes them.
//! - [`domains`]: who is in which address space, and what is mapped there.
//! - [`request`]: what the driver asks for.
//! - [`device`]: the virtio device, [`state`]: what a snapshot keeps of it.
//!
//! Faults are not reported: those of a physical device are the host's to see, and its log has them.

mod device;
mod domains;
mod endpoint;
mod endpoints;
mod request;
mod state;

pub use device::{ADDRESS_WIDTHS, Error, Options, VirtioIommu};
pub use endpoint::{Access, Endpoint, INTERRUPTS, MapError, Reserved, ReservedKind};
pub use endpoints::{AddError, Endpoints, ReservedMapping};

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
