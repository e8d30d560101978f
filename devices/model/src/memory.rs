//! Guest RAM from a device's perspective, and memory that a device adds to the guest's address
//! space.

use std::io;

use vm_memory::{GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap};

use crate::write_log::WriteLog;

/// The regions of guest RAM at one moment, with a log of device writes.
pub type GuestRam = GuestMemoryMmap<WriteLog>;

/// One region of guest RAM.
pub type GuestRegion = GuestRegionMmap<WriteLog>;

/// A handle on guest RAM that follows hot-plugged regions: call `memory()` for the current regions.
pub type GuestMemory = GuestMemoryAtomic<GuestRam>;

/// Host memory that a device wants to map at a guest-physical address: persistent memory, or a BAR
/// that is memory.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    /// Host virtual address, page-aligned. It must stay mapped while the [`Mapping`] exists.
    pub address: *mut u8,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
    /// The guest must not write to it.
    pub read_only: bool,
}

// SAFETY: the pointer is only a number here; code that dereferences or maps it upholds the validity
// that `HostMemory::address` documents.
unsafe impl Send for HostMemory {}

/// Maps host memory into the guest's physical address space (a KVM memory slot).
pub trait AddressSpace: Send + Sync {
    /// Maps `memory` at `at`, if given (on restore). Otherwise it is mapped at a free
    /// guest-physical address that is a multiple of `align`, outside RAM and the windows in which
    /// BARs are placed.
    fn map(
        &self,
        memory: HostMemory,
        align: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>>;
}

/// A mapping in the guest; dropping it removes it.
pub trait Mapping: Send {
    /// Guest-physical address of the memory.
    fn guest_address(&self) -> GuestAddress;

    /// Starts a log of the guest's writes to it. Drop the log either before or after the mapping.
    ///
    /// # Errors
    /// The host does not support logs, or there is one already.
    fn watch(&self) -> io::Result<Box<dyn GuestWrites>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A log of the pages that the guest has written: one bit per 4 KiB page, initially set. A page
/// whose bit is clear is *armed*: the guest's next write to it sets the bit, without an exit.
pub trait GuestWrites: Send {
    /// Reads the bits; bit `n % 64` of word `n / 64` is page `n`.
    fn read(&self) -> io::Result<Vec<u64>>;

    /// Clears the bits that are set in `words`, which starts at word `first` of the log. A later
    /// reader of such a page sees either its current content, or the bit set again.
    fn arm(&self, first: u64, words: &mut [u64]) -> io::Result<()>;
}
