//! The devices on a guest's buses: PCI, MSI-X, virtio, legacy devices and the ACPI controllers.
//!
//! Nothing here depends on KVM or on the VM that a device is plugged into. A device requests what
//! it needs through small traits (an interrupt, a thread, a place in the guest's address space), so
//! every device runs in a unit test or a fuzzer exactly as it runs in a VM:
//!
//! ```text
//!   vCPU exit ──> Bus ──> BusDevice::write            (trapped register access)
//!   ioeventfd ──────────────> DeviceWorker            (queue kick, no vCPU involved)
//!                                 │ guest memory through virtio_queue::Queue
//!                                 └─> VirtioInterrupt  (irqfd, no vCPU involved)
//! ```
//!
//! Everything that a guest can write is hostile: it is bounds-checked, read once, and handled in
//! bounded time and memory, without a panic.

pub use accel;
pub use acpi;
pub use console;
pub use device_model::{
    bus, doorbell, guest_event, lifecycle, memory, msi, named_socket, rate_limiter, thread, worker,
    write_log,
};
pub use disk;
pub use gate;
pub use gpu;
pub use legacy;
pub use pci;
pub use vfio;
pub use vhost_user;
pub use virtio;

/// The other side of a device, for tests and fuzz targets: a VM without KVM, and a driver without a
/// guest.
#[cfg(feature = "test-support")]
pub mod testing {
    pub use device_model::testing::*;
    pub use pci::testing::*;
    pub use vfio::testing::*;
    pub use virtio::testing::*;
}
