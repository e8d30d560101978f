//! The devices behind the IOMMU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    domains::{Domains, MAX_RESERVED},
    endpoint::{Endpoint, MapError},
};

/// A device cannot be put behind the IOMMU.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// Another device has this number.
    #[error("endpoint {0:#x} of the virtual IOMMU is there already")]
    Taken(u32),
    /// Its pages are too large.
    #[error(
        "the host's IOMMU maps pages of sizes {sizes:#x} for this device, the virtual IOMMU needs \
         4 KiB: plug it in without a virtual IOMMU"
    )]
    PageSizes {
        /// The sizes, as a mask.
        sizes: u64,
    },
    /// More reserved ranges than the guest can be told of.
    #[error(
        "the host reserves {0} ranges of this device's addresses, the guest can be told of \
         {max}: plug it in without a virtual IOMMU", max = MAX_RESERVED
    )]
    TooFragmented(usize),
    /// A restored domain maps what this device reserves.
    #[error(
        "endpoint {0:#x} of the virtual IOMMU is in a domain that maps addresses which the host \
         reserves: plug it in after the guest has started anew"
    )]
    Reserved(u32),
    /// What it is to reach from the first can not be mapped.
    #[error("cannot map for the device what the guest's IOMMU lets it reach")]
    Map(#[from] MapError),
}

/// The devices behind the IOMMU, by their numbers: segment << 16 | bus << 8 | device << 3 |
/// function. Clones are the same registry, which the machine shares with the IOMMU.
#[derive(Clone, Default)]
pub struct Endpoints(Arc<Mutex<Domains>>);

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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
