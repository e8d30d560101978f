//! The other side of a device, for tests and fuzz targets: a machine without KVM and a driver
//! without a guest.
//!
//! - [`Rig`]: a segment with its buses; accesses as a vCPU would make them.
//! - [`VirtioDriver`]: drives a virtio function through its configuration space and BAR.
//! - [`simple`]: a guest with queues and no transport.
//! - [`iommu`]: a device behind the virtual IOMMU.
//! - [`FakeDevice`]: a device in the terms of VFIO.
//! - [`FakeMsi`], [`FakeLines`], [`FakeDoorbells`]: the platform, with what happened kept for
//!   inspection.

mod driver;
pub mod iommu;
mod platform;
pub mod raw;
mod rig;
pub mod simple;
mod vfio;

pub use driver::VirtioDriver;
pub use platform::{FakeDoorbells, FakeLines, FakeMsi, guest_memory};
pub use rig::{ECAM_BASE, MMIO32, MMIO64, PORT_WINDOWS, PORTS, Rig};
pub use vfio::{FakeDevice, FakeSpace};
