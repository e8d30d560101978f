//! Doorbells: guest writes that wake a worker without involving Gantry.

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// Connects guest-physical addresses to eventfds (KVM's ioeventfd).
///
/// A write of any length and value to the address signals the eventfd. If a doorbell cannot be
/// registered, the write arrives at the BAR's [`BusDevice`](crate::bus::BusDevice) instead, which
/// signals the eventfd itself.
pub trait Doorbells: Send + Sync {
    /// Signals `fd` on every write to `address`.
    fn register(&self, fd: &EventFd, address: u64) -> io::Result<()>;

    /// Undoes `register` with the same arguments.
    fn unregister(&self, fd: &EventFd, address: u64) -> io::Result<()>;
}
