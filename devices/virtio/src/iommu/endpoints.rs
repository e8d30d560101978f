//! The registry of devices behind the IOMMU.

use std::sync::{Arc, MutexGuard};

use device_model::fair_lock::FairLock;

use super::{add_error::AddError, domains::Domains, endpoint::Endpoint};

/// The devices behind the IOMMU, by ID: segment << 16 | bus << 8 | device << 3 | function. Clones
/// refer to the same registry, which the VM shares with the IOMMU. Its lock is fair: adding or
/// removing a device waits for at most one request of the guest, however many are queued.
#[derive(Clone, Default)]
pub struct Endpoints(Arc<FairLock<Domains>>);

impl Endpoints {
    /// Creates an empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device. Initially it reaches nothing, or all of RAM if the guest enabled bypass for
    /// devices without a domain; after a restore, it reaches what it reached when it was saved.
    ///
    /// # Errors
    ///
    /// [`AddError`], with nothing mapped for the device.
    pub fn add(&self, id: u32, endpoint: Arc<dyn Endpoint>) -> Result<(), AddError> {
        self.lock().add(id, endpoint)
    }

    /// Removes a device: it reaches nothing afterwards. Does nothing if there is no such device.
    pub fn remove(&self, id: u32) {
        self.lock().remove(id);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Domains> {
        self.0.lock()
    }

    /// Whether another thread waits for the lock.
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.0.is_awaited()
    }
}
