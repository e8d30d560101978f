//! The devices behind the IOMMU.

use std::{
    ops::RangeInclusive,
    sync::{Arc, MutexGuard},
};

use device_model::fair_lock::FairLock;

use super::{
    domains::{Domains, MAX_RESERVED},
    endpoint::{Endpoint, MapError},
};

/// A saved domain maps what cannot be mapped for an endpoint here.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "the saved guest maps {first:#x} to {last:#x} for endpoint {endpoint:#x} of its virtual IOMMU \
     (domain {domain}), but this host reserves {from:#x} to {to:#x} there: restore it on a host whose \
     IOMMU translates these addresses, or boot the VM anew",
    first = mapping.start(), last = mapping.end(), from = reserved.start(), to = reserved.end()
)]
pub struct ReservedMapping {
    /// The endpoint.
    pub endpoint: u32,
    /// Its domain.
    pub domain: u32,
    /// First and last I/O address of the mapping.
    pub mapping: RangeInclusive<u64>,
    /// What is reserved.
    pub reserved: RangeInclusive<u64>,
}

/// A device cannot be put behind the IOMMU.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// Another device has this number.
    #[error("endpoint {0:#x} of the virtual IOMMU is there already")]
    Taken(u32),
    /// Its pages are too large.
    #[error(
        "the host's IOMMU maps nothing smaller than {0:#x} bytes for this device, the virtual IOMMU \
         pages of 4 KiB: plug it in without a virtual IOMMU"
    )]
    PageSize(u64),
    /// More reserved ranges than the guest can be told of.
    #[error(
        "the host reserves {0} ranges of this device's addresses, the guest can be told of \
         {max}: plug it in without a virtual IOMMU", max = MAX_RESERVED
    )]
    TooFragmented(usize),
    /// A restored domain maps what this device reserves.
    #[error(transparent)]
    Reserved(#[from] ReservedMapping),
    /// What it is to reach from the first can not be mapped.
    #[error("cannot map for the device what the guest's IOMMU lets it reach")]
    Map(#[from] MapError),
}

/// The devices behind the IOMMU, by their numbers: segment << 16 | bus << 8 | device << 3 |
/// function. Clones are the same registry, which the machine shares with the IOMMU: who adds or
/// removes a device waits for one request of the guest's, however many there are.
#[derive(Clone, Default)]
pub struct Endpoints(Arc<FairLock<Domains>>);

impl Endpoints {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device. It reaches nothing until the guest says so, or all of RAM if the guest lets
    /// devices without a domain do that; after a restore, what it reached when it was saved.
    ///
    /// # Errors
    ///
    /// [`AddError`], with nothing mapped for the device.
    pub fn add(&self, id: u32, endpoint: Arc<dyn Endpoint>) -> Result<(), AddError> {
        self.lock().add(id, endpoint)
    }

    /// Takes a device away: it reaches nothing afterwards. No mistake if there is none.
    pub fn remove(&self, id: u32) {
        self.lock().remove(id);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Domains> {
        self.0.lock()
    }

    /// Whether somebody waits for the end of a request.
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.0.is_awaited()
    }
}
