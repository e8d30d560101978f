//! What physical devices can reach.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::fd::RawFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use vfio_ioctls::{VfioContainer, VfioDevice, VfioDeviceFd, VfioError};
use vm_memory::{
    Address, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress,
};

use super::{
    Error, ResetError,
    ioctl::{self, Neighbour},
    physical,
};
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
    /// The devices: group by address, both on the host.
    devices: BTreeMap<String, String>,
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
        let mut state = self.lock();
        if state.devices.contains_key(&place.address) {
            let device = place.address.clone();
            return Err(Error::Twice { device });
        }
        let device = VfioDevice::new(&place.path, Arc::clone(&self.container) as Arc<_>, true)
            .map_err(|source| place.explain(source))?;
        let group = place.group.clone();
        state.devices.insert(place.address.clone(), group);
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
        let mut state = self.lock();
        if state.devices.is_empty() {
            return Ok(());
        }
        self.map_ram(&mut state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The descriptor of an IOMMU group that this process has open: vfio-ioctls keeps it to itself, and
/// a group cannot be opened twice.
fn group_descriptor(group: &str) -> Option<RawFd> {
    /// More files than a VM with hundreds of sockets and queues has open.
    const MOST: RawFd = 0x1_0000;
    let path = Path::new("/dev/vfio").join(group);
    (0..MOST).find(|fd| fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|file| file == path))
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

    /// Resets the bus of the device with all that is on it (`together`), if this VM has all of it
    /// and uses nothing else of it.
    pub fn reset_bus(&self, device: &VfioDevice, together: &[Neighbour]) -> Result<(), ResetError> {
        let state = self.iommu.lock();
        let is_used = |other: &Neighbour| state.devices.contains_key(&other.address);
        let is_ours = |other: &Neighbour| state.devices.values().any(|group| *group == other.group);
        let others = together
            .iter()
            .filter(|other| other.address != self.address && (is_used(other) || !is_ours(other)));
        let others: Vec<_> = others.map(|other| other.address.as_str()).collect();
        if !others.is_empty() {
            return Err(ResetError::Shared(others.join(", ")));
        }
        let groups: BTreeSet<_> = together.iter().map(|other| &*other.group).collect();
        let groups: Vec<_> = groups.into_iter().filter_map(group_descriptor).collect();
        Ok(ioctl::reset_bus(device, &groups)?)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut state = self.iommu.lock();
        self.device = None;
        state.devices.remove(&self.address);
        self.iommu.discards.release();
        if state.devices.is_empty() {
            // With its last group the kernel forgets all mappings.
            state.mapped.clear();
        }
    }
}
