//! Doorbells: guest writes that wake a worker without passing through Gantry.

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// Connects addresses in the guest's memory space to eventfds (KVM's ioeventfd).
///
/// A write of any length and value to the address signals the eventfd. When a doorbell cannot be
/// registered, the write arrives at the BAR's [`BusDevice`](crate::bus::BusDevice) instead, which
/// signals the eventfd itself.
pub trait Doorbells: Send + Sync {
    /// Signals `fd` at every write to `address`.
    fn register(&self, fd: &EventFd, address: u64) -> io::Result<()>;

    /// Takes back `register` with the same arguments.
    fn unregister(&self, fd: &EventFd, address: u64) -> io::Result<()>;
}
