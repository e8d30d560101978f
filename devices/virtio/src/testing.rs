//! The driver side of a device, for tests and fuzz targets: a driver without a guest.
//!
//! - [`VirtioDriver`]: drives a virtio function through its configuration space and BAR.
//! - [`simple`]: a guest with queues but without a transport.
//! - [`iommu`]: a device behind the virtual IOMMU.

mod driver;
pub mod iommu;
pub mod raw;
pub mod simple;

pub use driver::{VirtioDriver, resources};
