//! What a guest finds on its buses: PCI, MSI-X, virtio, legacy devices and the ACPI controllers.
//!
//! Nothing here knows KVM or the machine that a device is plugged into. A device asks for what it
//! needs through small traits (an interrupt, a thread, a place in the guest's address space), so
//! every device runs in a unit test or a fuzzer exactly as it runs in a VM:
//!
//! ```text
//!   vCPU exit ──> Bus ──> BusDevice::write            (trapped register access)
//!   ioeventfd ──────────────> DeviceWorker            (queue kick, no vCPU involved)
//!                                 │ guest memory through virtio_queue::Queue
//!                                 └─> VirtioInterrupt  (irqfd, no vCPU involved)
//! ```
//!
//! Everything that a guest can write is hostile: it is bounds checked, read once, and handled in
//! bounded time and memory, without a panic.

pub mod accel;
pub mod acpi;
pub mod bus;
pub mod console;
pub mod disk;
pub mod doorbell;
mod fair_lock;
pub mod gate;
pub mod gpu;
pub mod guest_event;
pub mod legacy;
pub mod lifecycle;
pub mod memory;
pub mod msi;
pub mod named_socket;
pub mod pci;
pub mod rate_limiter;
mod shared_event;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;
pub mod thread;
mod throttle;
pub mod vfio;
pub mod virtio;
pub mod worker;
pub mod write_log;
