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

mod endpoint;
mod endpoints;

pub use endpoint::{Access, Endpoint, MapError, Reserved, ReservedKind};
pub use endpoints::{AddError, Endpoints};
