//! Why a device cannot be put behind the IOMMU.

use std::ops::RangeInclusive;

use super::endpoint::MapError;

/// A saved domain maps a range that is reserved for an endpoint on this host.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "the saved guest maps {first:#x} to {last:#x} for endpoint {endpoint:#x} of its virtual IOMMU \
     (domain {domain}), but this host reserves {from:#x} to {to:#x} there: restore it on a host whose \
     IOMMU translates these addresses, or boot the VM anew",
    first = mapping.start(), last = mapping.end(), from = reserved.start(), to = reserved.end()
)]
pub struct ReservedMapping {
    /// ID of the endpoint.
    pub endpoint: u32,
    /// ID of its domain.
    pub domain: u32,
    /// First and last I/O address of the mapping.
    pub mapping: RangeInclusive<u64>,
    /// The reserved range.
    pub reserved: RangeInclusive<u64>,
}

/// Why a device cannot be put behind the IOMMU.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// Another device has this ID.
    #[error("endpoint {0:#x} of the virtual IOMMU is there already")]
    Taken(u32),
    /// The host's minimum page size for it is too large.
    #[error(
        "the host's IOMMU maps nothing smaller than {0:#x} bytes for this device, the virtual IOMMU \
         pages of 4 KiB: plug it in without a virtual IOMMU"
    )]
    PageSize(u64),
    /// It has more reserved ranges than a PROBE reply can hold.
    #[error(
        "the host reserves {0} ranges of this device's addresses, the guest can be told of \
         {max}: plug it in without a virtual IOMMU", max = MAX_RESERVED
    )]
    TooFragmented(usize),
    /// A restored domain maps a range that is reserved for this device.
    #[error(transparent)]
    Reserved(#[from] ReservedMapping),
    /// Its initial mappings could not be created.
    #[error("cannot map for the device what the guest's IOMMU lets it reach")]
    Map(#[from] MapError),
}

/// Maximum number of reserved ranges per endpoint: as many as fit into a PROBE reply.
pub const MAX_RESERVED: usize = 21;
