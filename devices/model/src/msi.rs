//! Message-signalled interrupts, as a PCI function needs them from the platform.

use std::io;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

/// What the function would write, and where (PCI 3.0, 6.8.1).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MsiMessage {
    /// Message address, 64 bits.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// Hands out interrupt vectors. Implemented over KVM's GSI routing by the machine.
pub trait MsiController: Send + Sync {
    /// Reserves `count` vectors for the function with requester id `source` (bus, device,
    /// function as in PCI), all of them unrouted. They are given back when the result is dropped.
    fn allocate(&self, count: u16, source: u16) -> io::Result<Box<dyn MsiVectors>>;
}

/// The vectors of one function.
pub trait MsiVectors: Send + Sync {
    /// Routes `vector` to `message`, or unroutes (masks) it.
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()>;

    /// Raises `vector`, which is routed to `message`, without its eventfd and without waiting.
    fn raise(&self, vector: u16, message: MsiMessage) -> io::Result<()>;

    /// The eventfd that raises `vector` when it is written, for use by the kernel or another
    /// process without passing through Gantry. It is made when it is first asked for, or the vector
    /// first routed; an error says that there are no more descriptors or interrupts of the platform.
    fn irqfd(&self, vector: u16) -> io::Result<&EventFd>;

    /// [`Self::irqfd`], if it has been made.
    fn made_irqfd(&self, vector: u16) -> Option<&EventFd>;
}
