//! The passthrough devices of a VM and their address spaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use base::Unpoisoned;
use device_model::memory::{GuestMemory, HostMemory};
use vfio_ioctls::{VfioDevice, VfioDeviceFd};
use virtio::{
    discard::Discards,
    plugged::{Blocks, Follower},
};

use super::{
    Error, ResetError,
    host_device::{HostDevice, Way},
    ioctl::{self, Neighbour},
    provider::Provider,
    reachable::Reachable,
    space::Space,
};

/// The passthrough devices of a VM: the memory that they reach, and which of them are reset
/// together.
///
/// They share an address space, in which RAM has its guest-physical addresses. Each device behind a
/// virtual IOMMU has an address space of its own. RAM is mapped, and thereby locked in memory, when
/// the first device is added (behind a virtual IOMMU: as the guest maps it). Until the last device
/// is removed, the balloon returns no RAM to the host: a device would keep using a page that the
/// guest lost. Memory that virtio-mem manages is mapped and unmapped block by block, as the guest
/// plugs it.
///
/// As soon as there are two devices, each can reach those parts of the other's memory that the
/// guest sees (peer-to-peer). Mapping a large BAR takes time, and the guest moves BARs on a vCPU.
/// BARs are therefore only offered there, and mapped in [`Iommu::map_peers`].
/// are only offered there, and mapped in [`Iommu::map_peers`].
pub struct Iommu {
    provider: Provider,
    reachable: Arc<Reachable>,
    /// Devices may reach each other's memory.
    peer_to_peer: bool,
    peers_changed: Arc<dyn Fn() + Send + Sync>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The devices by their address on the host.
    devices: BTreeMap<String, Member>,
    /// Devices that were reset with their bus and have not been used since: group by address. The
    /// host uses no other device of their groups either.
    clean: BTreeMap<String, String>,
    /// Addresses of the devices that the guest does not use, because it is resetting their bus.
    idle: BTreeSet<String>,
    /// The address space of the devices without one of their own.
    shared: Weak<Space>,
    /// All address spaces, including the shared one.
    spaces: Vec<Weak<Space>>,
}

/// A device of the VM.
struct Member {
    /// Its group on the host.
    group: String,
    /// It has its own address space.
    apart: bool,
}

impl State {
    fn has_of_group(&self, group: &str) -> bool {
        self.devices.values().any(|device| device.group == group)
    }

    /// Checks that a device can be added to its own address space (`apart`) or to the shared one:
    /// the host's IOMMU does not distinguish devices of one group.
    fn check(&self, host_device: &HostDevice, apart: bool) -> Result<(), Error> {
        let device = host_device.address.clone();
        if self.devices.contains_key(&device) {
            return Err(Error::Twice { device });
        }
        let mut others = self.devices.iter();
        let other =
            others.find(|(_, other)| other.group == host_device.group && (apart || other.apart));
        match other {
            Some((other, _)) => Err(Error::GroupApart {
                device,
                group: host_device.group.clone(),
                other: other.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Whether the bus of a device needs a reset; false if it was reset and the device has not been
    /// used since.
    fn may_reset(&mut self, address: &str, together: &[Neighbour]) -> Result<bool, ResetError> {
        let others = together.iter().filter(|other| other.address != address);
        let (ours, foreign): (Vec<_>, Vec<_>) =
            others.partition(|other| self.has_of_group(&other.group));
        let names = |others: Vec<&Neighbour>| {
            let names: Vec<_> = others.iter().map(|other| &*other.address).collect();
            names.join(", ")
        };
        if !foreign.is_empty() {
            return Err(ResetError::Shared(names(foreign)));
        }
        let is_used = |other: &&Neighbour| {
            self.devices.contains_key(&other.address) && !self.idle.contains(&other.address)
        };
        let used: Vec<_> = ours.into_iter().filter(is_used).collect();
        let was_clean = self.clean.remove(address).is_some();
        match used.is_empty() {
            _ if was_clean => Ok(false),
            true => Ok(true),
            false => Err(ResetError::Later(names(used))),
        }
    }
}

impl Iommu {
    /// Creates an instance without devices. `hypervisor` is KVM's VFIO device, through which KVM
    /// learns which devices the VM uses. `peer_to_peer`: devices may reach each other's memory.
    pub fn new(
        way: Way,
        hypervisor: VfioDeviceFd,
        memory: GuestMemory,
        discards: Arc<Discards>,
        peer_to_peer: bool,
        peers_changed: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Arc<Self>, Error> {
        let iommu = Arc::new(Self {
            provider: Provider::new(way, hypervisor)?,
            reachable: Arc::new(Reachable::new(memory, discards)),
            peer_to_peer,
            peers_changed: Arc::from(peers_changed),
            state: Mutex::default(),
        });
        let follower = Arc::downgrade(&iommu);
        let blocks = iommu.reachable.discards().blocks();
        blocks.follow(follower as Weak<_>);
        Ok(iommu)
    }

    /// Opens a device and gives it access to RAM. With `apart`, it gets its own address space, in
    /// which nothing is mapped. Must not be called concurrently.
    pub(super) fn attach(
        self: &Arc<Self>,
        host_device: &HostDevice,
        apart: bool,
    ) -> Result<Attached, Error> {
        self.lock().check(host_device, apart)?;
        let space = self.space(apart)?;
        let member = Member {
            group: host_device.group.clone(),
            apart,
        };
        self.lock()
            .devices
            .insert(host_device.address.clone(), member);
        self.reachable.discards().hold();
        let mut attached = Attached {
            iommu: Arc::clone(self),
            address: host_device.address.clone(),
            device: None,
            space,
        };
        let device = attached.space.open_device(host_device)?;
        attached.device = Some(Arc::new(device));
        (self.peers_changed)();
        Ok(attached)
    }

    /// The address space for the next device.
    fn space(&self, apart: bool) -> Result<Arc<Space>, Error> {
        let mut state = self.lock();
        if let Some(shared) = state.shared.upgrade().filter(|_| !apart) {
            return Ok(shared);
        }
        let space = Space::new(
            self.provider.tables()?,
            self.provider.limit_of(),
            Arc::clone(&self.reachable),
            Arc::clone(&self.peers_changed),
        );
        let space = Arc::new(if apart { space } else { space.with_identity() });
        if !apart {
            state.shared = Arc::downgrade(&space);
        }
        state.spaces.retain(|space| space.strong_count() > 0);
        state.spaces.push(Arc::downgrade(&space));
        Ok(space)
    }

    /// Maps device memory that was offered to other devices since the last call.
    pub fn map_peers(&self) {
        if self.lock().devices.len() > 1 {
            self.spaces().iter().for_each(|space| space.map_peers());
        }
    }

    /// Maps RAM that was added.
    pub fn memory_changed(&self) -> Result<(), Error> {
        let blocks: MutexGuard<'_, Blocks> = self.reachable.discards().blocks().lock();
        let spaces = self.spaces();
        spaces
            .iter()
            .try_for_each(|space| space.memory_changed(&blocks))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }

    fn spaces(&self) -> Vec<Arc<Space>> {
        let state = self.lock();
        state.spaces.iter().filter_map(Weak::upgrade).collect()
    }
}

impl Follower for Iommu {
    fn plugged(&self, address: u64, len: u64) -> io::Result<()> {
        let spaces = self.spaces();
        let plugged = spaces
            .iter()
            .try_for_each(|space| space.plugged(address, len));
        plugged.map_err(|error| {
            for space in &spaces {
                // Those that have it have only just got it.
                let _ = space.withdraw(address, len);
            }
            io::Error::other(error)
        })
    }

    fn unplugged(&self, address: u64, len: u64) -> io::Result<()> {
        let spaces = self.spaces();
        spaces
            .iter()
            .try_for_each(|space| space.withdraw(address, len))
    }
}

/// A device in an address space.
pub(super) struct Attached {
    iommu: Arc<Iommu>,
    address: String,
    /// `None` only during construction and drop.
    device: Option<Arc<VfioDevice>>,
    /// Dropped after the device. A container goes away with its last device: a group whose device
    /// the host has taken back cannot be removed from a container, and would prevent that device
    /// from being returned.
    space: Arc<Space>,
}

impl Attached {
    /// The device.
    pub fn device(&self) -> Option<&Arc<VfioDevice>> {
        self.device.as_ref()
    }

    /// Its address space.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Marks the device as used by the guest until now, but not again before
    /// [`Attached::end_idleness`].
    pub fn begin_idleness(&self) {
        let mut state = self.iommu.lock();
        state.clean.remove(&self.address);
        state.idle.insert(self.address.clone());
    }

    /// The guest may use the device again.
    pub fn end_idleness(&self) {
        self.iommu.lock().idle.remove(&self.address);
    }

    /// Resets the device's bus with all devices on it (`together`), if this VM owns all of them and
    /// uses none of the others. The later calls for those devices then find them already reset.
    pub fn reset_bus(&self, device: &VfioDevice, together: &[Neighbour]) -> Result<(), ResetError> {
        if !self.iommu.lock().may_reset(&self.address, together)? {
            return Ok(());
        }
        let groups: BTreeSet<_> = together.iter().map(|other| &*other.group).collect();
        // Without the lock, which vCPUs take when they move BARs, because this takes a second. No
        // device is plugged or unplugged meanwhile, because the VM waits for resets in progress.
        ioctl::reset_bus(device, &self.iommu.provider.proof(&groups))?;
        let others = together
            .iter()
            .filter(|other| other.address != self.address);
        let clean = others.map(|other| (other.address.clone(), other.group.clone()));
        self.iommu.lock().clean.extend(clean);
        Ok(())
    }

    /// Offers memory of the device, at its guest-physical address, to the other devices, if
    /// peer-to-peer access is allowed.
    pub fn offer(&self, guest: u64, memory: HostMemory) -> Option<Offer> {
        if !self.iommu.peer_to_peer {
            return None;
        }
        let iommu = Arc::clone(&self.iommu);
        iommu.reachable.peers().insert(guest, memory);
        (iommu.peers_changed)();
        let len = memory.len;
        Some(Offer { iommu, guest, len })
    }
}

/// An offer of a device's memory to other devices, valid until it is dropped.
pub(super) struct Offer {
    iommu: Arc<Iommu>,
    guest: u64,
    len: u64,
}

impl Drop for Offer {
    fn drop(&mut self) {
        // Look-ups from now on do not find it.
        self.iommu.reachable.peers().remove(&self.guest);
        for space in self.iommu.spaces() {
            if let Err(why) = space.withdraw(self.guest, self.len) {
                log::warn!("devices still reach {:#x}: {why}", self.guest);
            }
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.device = None;
        let mut state = self.iommu.lock();
        let device = state.devices.remove(&self.address);
        state.idle.remove(&self.address);
        // The host may use the rest of the group from now on.
        if let Some(Member { group, .. }) = device
            && !state.has_of_group(&group)
        {
            state.clean.retain(|_, other| *other != group);
        }
        self.iommu.reachable.discards().release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two functions of group 7 that are reset together.
    fn together() -> [Neighbour; 2] {
        ["a", "b"].map(|address| Neighbour {
            address: address.to_owned(),
            group: "7".to_owned(),
        })
    }

    fn attach(state: &mut State, address: &str) {
        let member = Member {
            group: "7".to_owned(),
            apart: false,
        };
        state.devices.insert(address.to_owned(), member);
    }

    #[test]
    fn functions_that_share_a_reset_are_reset_with_the_first_and_the_last() {
        let mut state = State::default();
        attach(&mut state, "a");
        assert!(state.may_reset("a", &together()).unwrap());
        // As the reset records it.
        state.clean.insert("b".to_owned(), "7".to_owned());
        attach(&mut state, "b");
        assert!(!state.may_reset("b", &together()).unwrap(), "it is clean");
        let left = state.may_reset("b", &together());
        assert!(matches!(left, Err(ResetError::Later(names)) if names == "a"));
        state.devices.remove("b");
        assert!(state.may_reset("a", &together()).unwrap());
    }

    #[test]
    fn functions_that_all_stand_still_are_reset_with_the_first_of_them() {
        let mut state = State::default();
        for address in ["a", "b"] {
            attach(&mut state, address);
        }
        state.idle.insert("a".to_owned());
        let used = state.may_reset("a", &together());
        assert!(matches!(used, Err(ResetError::Later(names)) if names == "b"));
        state.idle.insert("b".to_owned());
        assert!(state.may_reset("a", &together()).unwrap());
        // As the reset records it.
        state.clean.insert("b".to_owned(), "7".to_owned());
        state.idle.remove("a");
        assert!(!state.may_reset("b", &together()).unwrap(), "it is clean");
    }

    #[test]
    fn what_others_have_is_not_reset() {
        let mut state = State::default();
        attach(&mut state, "a");
        let mut together = together();
        together[1].group = "8".to_owned();
        state.clean.insert("a".to_owned(), "7".to_owned());
        let refused = state.may_reset("a", &together);
        assert!(matches!(refused, Err(ResetError::Shared(names)) if names == "b"));
    }
}
