//! What physical devices of a machine share.

use std::sync::{Arc, Mutex, PoisonError};

use devices::{
    memory::{AddressSpace, GuestMemory},
    msi::MsiController,
    pci::Lines,
    vfio::{Error, Iommu, Resources},
    virtio::discard::Discards,
};
use hypervisor::Vm;
use vfio_ioctls::VfioDeviceFd;

use super::{error::DeviceError, interrupts::KvmLines};
use crate::memory::ExactMemory;

/// The I/O address space and whatever else physical devices need, made with the first of them.
pub struct Physical {
    vm: Arc<Vm>,
    memory: GuestMemory,
    msi: Arc<dyn MsiController>,
    lines: Arc<dyn Lines>,
    space: Arc<dyn AddressSpace>,
    discards: Arc<Discards>,
    iommu: Mutex<Option<Arc<Iommu>>>,
}

impl Physical {
    /// For the physical devices of `vm`.
    pub fn new(
        vm: &Arc<Vm>,
        memory: GuestMemory,
        msi: Arc<dyn MsiController>,
        discards: Arc<Discards>,
    ) -> Self {
        Self {
            vm: Arc::clone(vm),
            memory,
            msi,
            lines: Arc::new(KvmLines::new(Arc::clone(vm))),
            discards,
            space: Arc::new(ExactMemory::new(Arc::clone(vm))),
            iommu: Mutex::default(),
        }
    }

    /// What any device needs.
    pub fn resources(&self) -> Resources {
        Resources {
            msi: Arc::clone(&self.msi),
            lines: Arc::clone(&self.lines),
            space: Arc::clone(&self.space),
        }
    }

    /// What devices of the host can reach.
    pub fn iommu(&self) -> Result<Arc<Iommu>, DeviceError> {
        let mut iommu = self.iommu.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(iommu) = &*iommu {
            return Ok(Arc::clone(iommu));
        }
        let hypervisor = VfioDeviceFd::new_from_kvm(self.vm.create_vfio_device()?);
        let new = Iommu::new(hypervisor, self.memory.clone(), Arc::clone(&self.discards))?;
        *iommu = Some(Arc::clone(&new));
        Ok(new)
    }

    /// Lets the devices reach RAM that was added.
    pub fn memory_changed(&self) -> Result<(), Error> {
        let iommu = self.iommu.lock().unwrap_or_else(PoisonError::into_inner);
        iommu
            .as_ref()
            .map_or(Ok(()), |iommu| iommu.memory_changed())
    }
}
