//! Resources that a machine's physical devices share with each other, and the devices that other
//! processes serve.

use std::{
    path::Path,
    sync::{Arc, Mutex, Weak},
};

use base::{Chain, Unpoisoned};
use devices::{
    memory::{AddressSpace, GuestMemory},
    msi::MsiController,
    pci::Lines,
    thread::ThreadSpawner,
    vfio::{
        self, Device, Error, HostDevice, Iommu, Resources, Way,
        user::{self, UserDevice},
    },
    virtio::discard::Discards,
};
use hypervisor::Vm;
use vfio_ioctls::VfioDeviceFd;
use vmm_config::VmConfig;
use vmm_memory::ExactMemory;

use super::{
    alarms::Watch,
    error::DeviceError,
    events::{EventSender, MachineEvent},
    interrupts::KvmLines,
};

/// The state shared by physical devices.
#[derive(Default)]
struct HostIommu {
    /// Announces groups to KVM. A VM creates one such KVM device in its lifetime.
    hypervisor: Option<VfioDeviceFd>,
    /// Dropped with the last device.
    current: Weak<Iommu>,
}

/// The I/O address spaces and whatever else physical devices need, created with the first device.
pub struct Physical {
    vm: Arc<Vm>,
    memory: GuestMemory,
    msi: Arc<dyn MsiController>,
    lines: Arc<dyn Lines>,
    space: Arc<dyn AddressSpace>,
    discards: Arc<Discards>,
    iommu: Mutex<HostIommu>,
    policy: Policy,
    /// Devices that other processes serve.
    users: Mutex<Vec<Weak<UserDevice>>>,
    events: EventSender,
}

/// The configuration that applies to all physical devices.
#[derive(Clone, Copy)]
pub struct Policy {
    /// They must use iommufd.
    pub only_iommufd: bool,
    /// They may access each other's memory.
    pub peer_to_peer: bool,
}

impl Policy {
    /// The policy of a configuration.
    pub fn of(config: &VmConfig) -> Self {
        let platform = config.platform.as_ref();
        Self {
            only_iommufd: platform.is_some_and(|platform| platform.iommufd),
            peer_to_peer: platform.is_none_or(|platform| platform.vfio_p2p_dma),
        }
    }
}

impl Physical {
    /// For the physical devices of `vm`.
    pub fn new(
        vm: &Arc<Vm>,
        policy: Policy,
        memory: GuestMemory,
        msi: Arc<dyn MsiController>,
        discards: Arc<Discards>,
        events: EventSender,
    ) -> Self {
        Self {
            vm: Arc::clone(vm),
            memory,
            msi,
            lines: Arc::new(KvmLines::new(Arc::clone(vm))),
            discards,
            space: Arc::new(ExactMemory::new(Arc::clone(vm))),
            iommu: Mutex::default(),
            policy,
            users: Mutex::default(),
            events,
        }
    }

    /// Connects to the server of a device called `id`. The control loop is notified when the server
    /// goes away.
    pub fn connect(
        &self,
        id: &str,
        socket: &Path,
        thread: &str,
        spawner: &dyn ThreadSpawner,
    ) -> Result<Arc<UserDevice>, Error> {
        let events = self.events.clone();
        let name = id.to_owned();
        let lost = move |why: &user::Failure| {
            events.send(MachineEvent::DeviceLost {
                id: name.clone(),
                reason: format!("{}; remove it, and add it again", Chain(why)),
            });
        };
        let surroundings = user::Surroundings {
            memory: self.memory.clone(),
            spawner,
            thread,
            patience: user::Patience::default(),
            lost: Box::new(lost),
        };
        let device = UserDevice::connect(socket, surroundings).map_err(|source| Error::User {
            socket: socket.to_owned(),
            source: Box::new(source),
        })?;
        let device = Arc::new(device);
        let mut users = self.users.lock_unpoisoned();
        users.retain(|user| user.strong_count() > 0);
        users.push(Arc::downgrade(&device));
        Ok(device)
    }

    /// Resources that every device needs.
    pub fn resources(&self) -> Resources {
        Resources {
            msi: Arc::clone(&self.msi),
            lines: Arc::clone(&self.lines),
            space: Arc::clone(&self.space),
        }
    }

    /// Starts watching a physical device, which is called `id` in the API.
    pub fn watch(&self, id: &str, device: &vfio::Physical) -> Result<Watch, DeviceError> {
        Ok(self
            .events
            .alarms()
            .watch(id, device)
            .map_err(|source| Error::Host {
                action: "watch the device",
                source,
            })?)
    }

    /// The I/O address space of physical devices. The first device, `host_device`, decides how they
    /// are accessed.
    pub fn iommu(&self, host_device: &HostDevice) -> Result<Arc<Iommu>, DeviceError> {
        let mut iommu = self.iommu.lock_unpoisoned();
        if let Some(current) = iommu.current.upgrade() {
            return Ok(current);
        }
        let way = Way::of(host_device, self.policy.only_iommufd)?;
        let hypervisor = match iommu.hypervisor.take() {
            Some(hypervisor) => hypervisor,
            None => VfioDeviceFd::new_from_kvm(self.vm.create_vfio_device()?),
        };
        let own = iommu.hypervisor.insert(hypervisor).try_clone();
        let own = own.map_err(|source| Error::Vfio {
            action: "tell KVM of groups",
            source,
        })?;
        let events = self.events.clone();
        let changed = Box::new(move || events.send(MachineEvent::PeersChanged));
        let new = Iommu::new(
            way,
            own,
            self.memory.clone(),
            Arc::clone(&self.discards),
            self.policy.peer_to_peer,
            changed,
        )?;
        iommu.current = Arc::downgrade(&new);
        Ok(new)
    }

    /// Updates the devices' DMA mappings of each other's memory after the guest has moved it.
    pub fn map_peers(&self) {
        let iommu = self.iommu.lock_unpoisoned();
        if let Some(current) = iommu.current.upgrade() {
            current.map_peers();
        }
    }

    /// Maps newly added RAM for DMA by the devices.
    pub fn memory_changed(&self) -> Result<(), Error> {
        let iommu = self.iommu.lock_unpoisoned();
        if let Some(current) = iommu.current.upgrade() {
            current.memory_changed()?;
        }
        let users = self.users.lock_unpoisoned();
        for device in users.iter().filter_map(Weak::upgrade) {
            device.memory_changed().map_err(|source| Error::User {
                socket: device.name().into(),
                source: Box::new(source),
            })?;
        }
        Ok(())
    }
}
