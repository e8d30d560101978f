//! The interface to the translation for one device.

use std::{io, ops::RangeInclusive};

/// Addresses at which a device's writes are interrupts. No IOMMU of an x86 machine translates them
/// as memory (Intel SDM 3, 11.11.1).
pub const INTERRUPTS: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// The accesses to mapped memory that a device may perform.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Access {
    /// Reads.
    pub read: bool,
    /// Writes.
    pub write: bool,
}

/// Why addresses cannot be mapped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReservedKind {
    /// They are not translated, or have a meaning on the host.
    Reserved,
    /// Writes to them are message-signaled interrupts.
    Msi,
}

/// A range of I/O addresses that cannot be mapped.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reserved {
    /// First and last address.
    pub range: RangeInclusive<u64>,
    /// Why they cannot be mapped.
    pub kind: ReservedKind,
}

/// Why memory could not be mapped for a device.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Part of the range is neither RAM nor device memory that other devices may reach.
    #[error("there is no memory at guest address {guest:#x}")]
    NotMemory {
        /// The guest-physical address.
        guest: u64,
    },
    /// The host's IOMMU does not translate part of the range.
    #[error("the host's IOMMU does not translate {len:#x} bytes at {iova:#x}")]
    OutOfRange {
        /// First I/O address of the mapping.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A limit of the host, which the text names.
    #[error("{0}")]
    NoMemory(String),
    /// The host refuses for another reason.
    #[error("the host's IOMMU refuses")]
    Host(#[source] io::Error),
    /// The host has mapped part of it and failed to remove that.
    #[error("the host's IOMMU does not let go of what it has mapped")]
    Stuck(#[source] io::Error),
}

/// Translates for one device.
///
/// Calls come from the IOMMU's worker or from the thread that owns the VM, never concurrently. Only
/// [`Endpoint::clear`] and `identity(false)` may also come from a vCPU thread, when the driver
/// resets an IOMMU without a worker: they must neither block nor open files. The registry is locked
/// during a call: an endpoint must neither call it back nor wait for a thread that might.
pub trait Endpoint: Send + Sync {
    /// Address ranges that cannot be mapped, without overlaps. Called once, when the endpoint is
    /// added. At most one of them is [`ReservedKind::Msi`] (5.13.6.8.1).
    fn reserved(&self) -> Vec<Reserved>;

    /// Alignment of the start and end of mappings in bytes, a power of two. The host splits
    /// mappings that are larger than a page of its IOMMU.
    fn page_size(&self) -> u64;

    /// Maps `len` bytes of guest-physical addresses from `guest` at `iova`, completely or not at
    /// all. They may span several regions of RAM and memory of other devices. All values are
    /// multiples of 4 KiB, `len` is not 0, nothing is mapped there yet, and neither `iova + len`
    /// nor `guest + len` exceeds 2^64.
    fn map(&self, iova: u64, guest: u64, len: u64, access: Access) -> Result<(), MapError>;

    /// Unmaps a gapless range that consists of one or more complete [`Endpoint::map`] calls.
    fn unmap(&self, iova: u64, len: u64) -> io::Result<()>;

    /// Removes everything that [`Endpoint::map`] has mapped: where the host supports it, with one
    /// operation regardless of the number of mappings.
    fn clear(&self) -> io::Result<()>;

    /// On: the device reaches all of RAM at its own addresses, including RAM that is plugged later,
    /// and nothing else is mapped. Off: it reaches nothing.
    fn identity(&self, on: bool) -> Result<(), MapError>;
}
