//! Guest RAM as devices see it, and memory that a device adds to the guest's address space.

use std::io;

use vm_memory::{GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap};

use crate::write_log::WriteLog;

/// The regions of guest RAM at one moment, with a log of what devices write.
pub type GuestRam = GuestMemoryMmap<WriteLog>;

/// One region of guest RAM.
pub type GuestRegion = GuestRegionMmap<WriteLog>;

/// A handle on guest RAM that follows hot-plugged regions: call `memory()` for the regions now.
pub type GuestMemory = GuestMemoryAtomic<GuestRam>;

/// Host memory that a device wants to appear at a guest-physical address: persistent memory, a BAR
/// that is memory.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    /// Host virtual address, page aligned. It must stay mapped as long as the [`Mapping`] lives.
    pub address: *mut u8,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
    /// The guest may not write it.
    pub read_only: bool,
}

// SAFETY: the pointer is only a number here; whoever dereferences or maps it upholds the
// validity that `HostMemory::address` documents.
unsafe impl Send for HostMemory {}

/// Places host memory in the guest's physical address space (a KVM memory slot).
pub trait AddressSpace: Send + Sync {
    /// Maps `memory` at a free guest-physical address that is a multiple of `align`, outside of
    /// RAM and of the windows in which BARs are placed, or at `at` if given (restore).
    fn map(
        &self,
        memory: HostMemory,
        align: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>>;
}

/// A placed mapping; dropping it removes it from the guest.
pub trait Mapping: Send {
    /// Where the guest sees the memory.
    fn guest_address(&self) -> GuestAddress;

    /// Starts a log of what the guest writes there. Drop it after the mapping, or before.
    ///
    /// # Errors
    /// The host has none, or there is one already.
    fn watch(&self) -> io::Result<Box<dyn GuestWrites>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Which pages of a mapping the guest has written: a bit per page of 4 KiB, set at first. A page
/// whose bit is clear is *armed*: the guest's next write to it sets the bit, without an exit.
pub trait GuestWrites: Send {
    /// The bits; bit `n % 64` of word `n / 64` is page `n`.
    fn read(&self) -> io::Result<Vec<u64>>;

    /// Clears the bits that are set in `words`, the first of which is word `first` of all. Whoever
    /// looks at such a page after that sees what is there now, or the bit again.
    fn arm(&self, first: u64, words: &mut [u64]) -> io::Result<()>;
}
