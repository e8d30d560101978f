//! What the IOMMU asks of whoever translates for a device.

use std::{io, ops::RangeInclusive};

/// Where a device's messages are interrupts, which no IOMMU of an x86 machine translates as memory
/// (Intel SDM 3, 11.11.1).
pub const INTERRUPTS: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// What a device may do with memory that is mapped for it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Access {
    /// It may read.
    pub read: bool,
    /// It may write.
    pub write: bool,
}

/// Why addresses cannot be mapped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReservedKind {
    /// They are not translated, or mean something to the host.
    Reserved,
    /// Writes there are interrupts (message signaled).
    Msi,
}

/// I/O addresses that cannot be mapped.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reserved {
    /// First and last address.
    pub range: RangeInclusive<u64>,
    /// What they are.
    pub kind: ReservedKind,
}

/// Memory could not be mapped for a device.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Part of the range is neither RAM nor memory of a device that others may reach.
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
        /// Its length in bytes.
        len: u64,
    },
    /// A limit of the host; the text says which.
    #[error("{0}")]
    NoMemory(String),
    /// The host refuses for another reason.
    #[error("the host's IOMMU refuses")]
    Host(#[source] io::Error),
    /// The host has mapped part of it and does not let go of that.
    #[error("the host's IOMMU does not let go of what it has mapped")]
    Stuck(#[source] io::Error),
}

/// Translates for one device.
///
/// The calls come from the IOMMU's worker or the thread that owns the machine, never two at a time.
/// Only [`Endpoint::clear`] and `identity(false)` may come from a vCPU's thread too, when the driver
/// resets an IOMMU that has no worker: they must neither wait nor open files. The registry is locked
/// meanwhile: an endpoint must not call it back, nor wait for somebody who might.
pub trait Endpoint: Send + Sync {
    /// Addresses that cannot be mapped, without overlaps. Asked for once, when the endpoint is
    /// added; at most one of them is [`ReservedKind::Msi`] (5.13.6.8.1).
    fn reserved(&self) -> Vec<Reserved>;

    /// Whatever is mapped begins and ends at a multiple of this many bytes: a power of two. What is
    /// larger than a page of the host's IOMMU is split by the host.
    fn page_size(&self) -> u64;

    /// Maps `len` bytes of guest-physical addresses from `guest` on at `iova`: all or nothing. They
    /// may span several regions of RAM and other devices' memory. Multiples of 4 KiB, `len` is not
    /// 0, nothing is mapped there, and neither `iova + len` nor `guest + len` exceeds 2^64.
    fn map(&self, iova: u64, guest: u64, len: u64, access: Access) -> Result<(), MapError>;

    /// Unmaps what one or more whole calls of [`Endpoint::map`] have mapped, without gaps.
    fn unmap(&self, iova: u64, len: u64) -> io::Result<()>;

    /// Unmaps all that calls of [`Endpoint::map`] have mapped: at once where the host can, however
    /// many there were.
    fn clear(&self) -> io::Result<()>;

    /// On: all of RAM is reached at its own addresses, that which is plugged later included, while
    /// nothing else is mapped. Off: nothing is.
    fn identity(&self, on: bool) -> Result<(), MapError>;
}
