//! Message-signalled interrupts: what a PCI function needs from the platform.

use std::io;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

/// A message: what the function would write, and where (PCI 3.0, 6.8.1).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MsiMessage {
    /// Message address, 64 bits.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// Allocates interrupt vectors. The VM implements this with KVM's GSI routing.
pub trait MsiController: Send + Sync {
    /// Reserves `count` vectors for the function with requester ID `source` (bus, device, function
    /// as in PCI), all of them unrouted. They are freed when the result is dropped.
    fn allocate(&self, count: u16, source: u16) -> io::Result<Box<dyn MsiVectors>>;
}

/// The vectors of one function.
pub trait MsiVectors: Send + Sync {
    /// Routes `vector` to `message`, or unroutes (masks) it.
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()>;

    /// Raises `vector`, which is routed to `message`, without its eventfd and without blocking.
    fn raise(&self, vector: u16, message: MsiMessage) -> io::Result<()>;

    /// The eventfd that raises `vector` when written, for use by the kernel or another process
    /// without involving Gantry. It is created on first use, or when the vector is first routed. An
    /// error means that no more descriptors or platform interrupts are available.
    fn irqfd(&self, vector: u16) -> io::Result<&EventFd>;

    /// [`Self::irqfd`], if it has been created.
    fn made_irqfd(&self, vector: u16) -> Option<&EventFd>;
}
