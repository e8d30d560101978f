//! What physical devices can reach.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use vfio_ioctls::{VfioContainer, VfioDevice, VfioDeviceFd, VfioError};
use vm_memory::{
    Address, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress,
};

use super::{Error, physical};
use crate::{memory::GuestMemory, virtio::discard::Discards};

/// The I/O address space of a VM's physical devices: guest-physical addresses, RAM only.
///
/// RAM is mapped, and with it locked in memory, from the first device on; until the last one goes,
/// none of it is given back by balloon or unplug: a device would keep the page that the guest lost.
pub struct Iommu {
    memory: GuestMemory,
    container: Arc<VfioContainer>,
    /// Stopped while there are devices.
    discards: Arc<Discards>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Addresses of the devices on the host.
    devices: BTreeSet<String>,
    /// Length by guest-physical address.
    mapped: BTreeMap<u64, u64>,
}

impl Iommu {
    /// An address space without devices. Through `hypervisor`, its VFIO device, the hypervisor
    /// learns which groups the VM uses.
    pub fn new(
        hypervisor: VfioDeviceFd,
        memory: GuestMemory,
        discards: Arc<Discards>,
    ) -> Result<Self, Error> {
        let container =
            VfioContainer::new(Some(Arc::new(hypervisor))).map_err(|source| match source {
                VfioError::OpenContainer(source) => Error::Open {
                    path: "/dev/vfio/vfio".into(),
                    source,
                },
                source => Error::Vfio {
                    action: "use the IOMMU",
                    source,
                },
            })?;
        Ok(Self {
            memory,
            discards,
            container: Arc::new(container),
            state: Mutex::default(),
        })
    }

    /// Opens a device and gives it access to RAM.
    pub(super) fn attach(self: &Arc<Self>, place: &physical::Place) -> Result<Attached, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.devices.contains(&place.address) {
            let device = place.address.clone();
            return Err(Error::Twice { device });
        }
        let device = VfioDevice::new(&place.path, Arc::clone(&self.container) as Arc<_>, true)
            .map_err(|source| place.explain(source))?;
        state.devices.insert(place.address.clone());
        self.discards.hold();
        let attached = Attached {
            iommu: Arc::clone(self),
            address: place.address.clone(),
            device: Some(Arc::new(device)),
        };
        let mapped = self.map_ram(&mut state);
        drop(state);
        mapped.map(|()| attached)
    }

    /// Takes note of RAM that was added.
    pub fn memory_changed(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.devices.is_empty() {
            return Ok(());
        }
        self.map_ram(&mut state)
    }

    fn map_ram(&self, state: &mut State) -> Result<(), Error> {
        for region in self.memory.memory().iter() {
            let (guest, len) = (region.start_addr().raw_value(), region.len());
            if state.mapped.contains_key(&guest) {
                continue;
            }
            let Ok(host) = region.get_host_address(MemoryRegionAddress(0)) else {
                continue;
            };
            // SAFETY: guest RAM stays mapped until the machine ends, which is after its devices;
            // it is only accessed as bytes that may change at any time.
            unsafe { self.container.vfio_dma_map(guest, len as usize, host) }
                .map_err(|source| Error::MapRam { guest, len, source })?;
            state.mapped.insert(guest, len);
        }
        Ok(())
    }
}

/// A device in the address space.
pub(super) struct Attached {
    iommu: Arc<Iommu>,
    address: String,
    /// Only empty while dropped.
    device: Option<Arc<VfioDevice>>,
}

impl Attached {
    /// The device.
    pub fn device(&self) -> Option<&Arc<VfioDevice>> {
        self.device.as_ref()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut state = self
            .iommu
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.device = None;
        state.devices.remove(&self.address);
        self.iommu.discards.release();
        if state.devices.is_empty() {
            // With its last group the kernel forgets all mappings.
            state.mapped.clear();
        }
    }
}
