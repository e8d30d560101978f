//! Virtio 1.2 devices, split virtqueues.
//!
//! - [`device`]: what a device must say and do; the transport (PCI) does the rest.
//! - [`pci`]: the transport.
//! - [`worker`]: the thread in which a device's queues are served.

pub mod blk;
pub mod device;
pub mod pci;
pub mod pmem;
pub mod worker;

pub use device::{
    ActivateError, Activation, ActiveQueue, DeviceType, StateError, VirtioDevice, VirtioInterrupt,
};
