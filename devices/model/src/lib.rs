//! The interface between devices and the VM: small traits (an interrupt, a thread, a place in the
//! guest's address space), and code that several kinds of devices share. Nothing here depends on a
//! particular device.

pub mod bus;
pub mod doorbell;
pub mod fair_lock;
pub mod guest_event;
pub mod lifecycle;
pub mod memory;
pub mod msi;
pub mod named_socket;
pub mod rate_limiter;
pub mod shared_event;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;
pub mod thread;
pub mod throttle;
pub mod worker;
pub mod write_log;
