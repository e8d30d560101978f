//! Virtio over PCI (virtio 1.2, section 4.1): modern devices only, interrupts by MSI-X only.
//!
//! [`VirtioPciFunction`] is the PCI side of a device: configuration space with the capabilities,
//! MSI-X and the lifecycle. Its only BAR leads to the transport, which vCPUs reach without taking
//! the function's lock:
//!
//! ```text
//!   BAR 0 (64 KiB; 64 bits wide, or 32 where firmware has to reach it)
//!   0x0000  common configuration     Transport, under its lock: negotiation, queue addresses,
//!                                      activation on the vCPU that writes DRIVER_OK
//!   0x1000  ISR status               atomics of Interrupt
//!   0x2000  device configuration     Transport, under its lock
//!   0x3000  notifications            ioeventfd per queue while the driver runs; else forwarded
//!   0x4000  MSI-X table, 0xc000 pending bits     MsixTable
//! ```
//!
//! A worker needs none of these locks. It raises interrupts through atomics, so that the control
//! thread may hold the transport's lock while it waits for the worker to stop.
//!
//! INTx is not wired. A driver that does not enable MSI-X must poll the ISR status.

mod function;
mod interrupt;
mod layout;
mod queue;
mod transport;

pub use function::{
    BarPlace, VirtioPciError, VirtioPciFunction, VirtioPciResources, VirtioPciState,
};
pub use layout::{
    BAR_SIZE, COMMON_OFFSET, DEVICE_OFFSET, ISR_OFFSET, NOTIFY_MULTIPLIER, NOTIFY_OFFSET,
    PENDING_OFFSET, TABLE_OFFSET, common, status,
};
pub use queue::{QueueProgress, QueueRegisters};
pub use transport::TransportState;

#[cfg(test)]
mod tests;
