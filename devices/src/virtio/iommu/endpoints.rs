//! The devices behind the IOMMU.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::endpoint::Endpoint;

/// The page size that the IOMMU offers its driver, and every endpoint has to have.
const PAGE: u64 = 4096;

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
}

/// The devices behind the IOMMU, by their numbers: segment << 16 | bus << 8 | device << 3 |
/// function. Clones are the same registry, which the machine shares with the IOMMU.
#[derive(Clone, Default)]
pub struct Endpoints(Arc<Mutex<BTreeMap<u32, Arc<dyn Endpoint>>>>);

impl Endpoints {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device, which reaches nothing until the guest says so.
    ///
    /// # Errors
    ///
    /// [`AddError`], with the device left as it was.
    pub fn add(&self, id: u32, endpoint: Arc<dyn Endpoint>) -> Result<(), AddError> {
        let sizes = endpoint.page_sizes();
        if sizes & PAGE == 0 {
            return Err(AddError::PageSizes { sizes });
        }
        match self.lock().entry(id) {
            Entry::Occupied(_) => Err(AddError::Taken(id)),
            Entry::Vacant(vacant) => {
                vacant.insert(endpoint);
                Ok(())
            }
        }
    }

    /// Takes a device away: it reaches nothing afterwards. No mistake if there is none.
    pub fn remove(&self, id: u32) {
        self.lock().remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<dyn Endpoint>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
