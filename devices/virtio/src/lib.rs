//! Virtio 1.2 devices, split virtqueues.
//!
//! - [`device`]: what a device must say and do; the transport (PCI) does the rest.
//! - [`pci`]: the transport.
//! - [`served`]: a queue of a device that answers requests as soon as it sees them.
//! - [`config_change`]: telling the driver that the configuration has changed.
//! - [`discard`]: giving guest memory back to the host.
//!
//! The devices are in a folder each.

pub mod balloon;
pub mod blk;
pub mod config_change;
pub mod console;
pub mod device;
pub mod discard;
mod in_flight;
pub mod iommu;
pub mod mem;
pub mod net;
pub mod pci;
pub mod plugged;
pub mod pmem;
pub mod rng;
pub mod served;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;
pub mod vsock;

pub use device::{Activation, ActiveQueue, DeviceType, VirtioDevice, VirtioInterrupt};
