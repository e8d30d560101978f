//! Virtio 1.2 devices with split virtqueues.
//!
//! - [`device`]: the contract that a device implements; the transport (PCI) does the rest.
//! - [`pci`]: the transport.
//! - [`served`]: serves a queue of a device that answers each request immediately.
//! - [`config_change`]: notifies the driver of configuration changes.
//! - [`discard`]: returns guest memory to the host.
//!
//! Each device has its own folder.

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
