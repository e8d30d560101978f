//! What physical devices can reach.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use vfio_ioctls::{VfioDevice, VfioDeviceFd};
use vm_memory::{Address, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use super::{
    Error, ResetError,
    ioctl::{self, Neighbour},
    place::{Place, Way},
    reach::Reach,
    tables::{self, Tables},
};
use crate::{
    memory::{GuestMemory, HostMemory},
    virtio::{
        discard::Discards,
        plugged::{Blocks, Follower},
    },
};

/// The I/O address space of a VM's physical devices: guest-physical addresses, RAM only.
///
/// RAM is mapped, and with it locked in memory, from the first device on; until the last one goes,
/// the balloon gives none of it back: a device would keep the page that the guest lost. Memory that
/// virtio-mem manages is mapped and unmapped block by block, as the guest plugs it.
///
/// As soon as there are two devices, each can reach what the guest sees of the other's memory
/// (peer-to-peer). To map a large BAR takes its time, and the guest moves BARs on a vCPU: so they
/// are only offered there, and mapped in [`Iommu::settle_peers`].
pub struct Iommu {
    memory: GuestMemory,
    tables: Box<dyn Tables>,
    /// Stopped while there are devices.
    discards: Arc<Discards>,
    /// How much memory may be locked.
    limit: String,
    /// Told when there is something for [`Iommu::settle_peers`] to do.
    peers_changed: Box<dyn Fn() + Send + Sync>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The devices: group by address, both on the host.
    devices: BTreeMap<String, String>,
    /// Length by guest-physical address.
    mapped: BTreeMap<u64, u64>,
    /// Devices that were reset with their bus and have not been used since: group by address. What
    /// else there is in their groups is not the host's, either.
    clean: BTreeMap<String, String>,
    /// Devices that the guest does not use, because it is resetting their bus: by address.
    idle: BTreeSet<String>,
    /// Memory of devices by guest-physical address.
    peers: BTreeMap<u64, Peer>,
    reach: Reach,
    /// A peer that cannot be reached is logged once: the guest could move its BARs at will.
    warned: bool,
}

struct Peer {
    memory: HostMemory,
    mapped: bool,
}

impl State {
    /// Whether the bus of a device is to be reset; false if nobody has used the device since that
    /// was done.
    fn may_reset(&mut self, address: &str, together: &[Neighbour]) -> Result<bool, ResetError> {
        let others = together.iter().filter(|other| other.address != address);
        let (ours, foreign): (Vec<_>, Vec<_>) =
            others.partition(|other| self.devices.values().any(|group| *group == other.group));
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
    /// An address space without devices. Through `hypervisor`, its VFIO device, the hypervisor
    /// learns which devices the VM uses.
    pub fn new(
        way: Way,
        hypervisor: VfioDeviceFd,
        memory: GuestMemory,
        discards: Arc<Discards>,
        peers_changed: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Arc<Self>, Error> {
        let iommu = Arc::new(Self {
            memory,
            discards,
            tables: tables::open(way, hypervisor)?,
            limit: memory_limit(),
            peers_changed,
            state: Mutex::default(),
        });
        let follower = Arc::downgrade(&iommu);
        iommu.discards.blocks().follow(follower as Weak<_>);
        Ok(iommu)
    }

    /// Opens a device and gives it access to RAM.
    pub(super) fn attach(self: &Arc<Self>, place: &Place) -> Result<Attached, Error> {
        let blocks = self.discards.blocks().lock();
        let mut state = self.lock();
        if state.devices.contains_key(&place.address) {
            let device = place.address.clone();
            return Err(Error::Twice { device });
        }
        let device = self.tables.open_device(place)?;
        let group = place.group.clone();
        state.devices.insert(place.address.clone(), group);
        self.discards.hold();
        let attached = Attached {
            iommu: Arc::clone(self),
            address: place.address.clone(),
            device: Some(Arc::new(device)),
        };
        let mapped = self.map_ram(&mut state, &blocks);
        // Dropping `attached` needs it.
        drop(state);
        (self.peers_changed)();
        mapped.map(|()| attached)
    }

    /// Lets the devices reach the memory of others that was offered since the last call.
    pub fn settle_peers(&self) {
        let mut state = self.lock();
        let State {
            devices,
            peers,
            reach,
            warned,
            ..
        } = &mut *state;
        if devices.len() < 2 {
            return;
        }
        for (guest, peer) in peers.iter_mut().filter(|(_, peer)| !peer.mapped) {
            let len = peer.memory.len;
            let mapped = if reach.covers(*guest, len) {
                // SAFETY: whoever offered it keeps it mapped until the offer is withdrawn, which
                // takes it away from the devices first.
                unsafe { self.tables.map(*guest, len, peer.memory.address) }
                    .map_err(|error| tables::reason(&error))
            } else {
                Err(format!("the host's IOMMU translates {reach} only"))
            };
            match mapped {
                Ok(()) => peer.mapped = true,
                Err(why) if !*warned => {
                    *warned = true;
                    log::warn!(
                        "devices cannot reach {len:#x} bytes of another one's memory at \
                         {guest:#x} (peer-to-peer), and have to go through RAM: {why}"
                    );
                }
                Err(_) => {}
            }
        }
    }

    /// Takes note of RAM that was added.
    pub fn memory_changed(&self) -> Result<(), Error> {
        let blocks = self.discards.blocks().lock();
        let mut state = self.lock();
        if state.devices.is_empty() {
            return Ok(());
        }
        self.map_ram(&mut state, &blocks)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn map_ram(&self, state: &mut State, blocks: &Blocks) -> Result<(), Error> {
        // Only known with a device.
        let reach = self.tables.reach().map_err(|source| Error::Host {
            action: "ask the IOMMU what it translates",
            source,
        })?;
        if state.reach != reach {
            log::info!("devices reach the addresses {reach}");
            state.reach = reach;
        }
        for region in self.memory.memory().iter() {
            let guest = region.start_addr().raw_value();
            if !blocks.is_managed(guest) {
                self.map(state, guest, region.len())?;
            }
        }
        for (guest, len) in blocks.plugged() {
            self.map(state, guest, len)?;
        }
        Ok(())
    }

    /// Maps a range of RAM that lies within a region, if it is not yet.
    fn map(&self, state: &mut State, guest: u64, len: u64) -> Result<(), Error> {
        let ram = self.memory.memory();
        let Ok(host) = ram.get_host_address(GuestAddress(guest)) else {
            return Ok(());
        };
        if state.mapped.contains_key(&guest) {
            return Ok(());
        }
        state.reach.check(guest, len)?;
        // SAFETY: guest RAM stays mapped until the machine ends, which is after its devices; it is
        // only accessed as bytes that may change at any time.
        unsafe { self.tables.map(guest, len, host) }.map_err(|source| {
            match tables::errno(&source) {
                Some(libc::ENOMEM) => Error::MemoryLimit {
                    guest,
                    len,
                    of: self.tables.limit_of(),
                    limit: self.limit.clone(),
                },
                _ => Error::MapRam { guest, len, source },
            }
        })?;
        state.mapped.insert(guest, len);
        Ok(())
    }
}

impl Follower for Iommu {
    fn plugged(&self, address: u64, len: u64) -> io::Result<()> {
        let mut state = self.lock();
        if state.devices.is_empty() {
            return Ok(());
        }
        self.map(&mut state, address, len).map_err(io::Error::other)
    }

    fn unplugged(&self, address: u64, len: u64) -> io::Result<()> {
        let mut state = self.lock();
        if state.mapped.contains_key(&address) {
            self.tables.unmap(address, len).map_err(io::Error::other)?;
            state.mapped.remove(&address);
        }
        Ok(())
    }
}

/// How much memory this process may lock, in words.
fn memory_limit() -> String {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure outlives the call, which fills it.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } {
        0 if limit.rlim_cur == libc::RLIM_INFINITY => "not set".to_owned(),
        0 => limit.rlim_cur.to_string(),
        _ => "unknown".to_owned(),
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

    /// The guest has used the device, and does not until [`Attached::end_idleness`].
    pub fn begin_idleness(&self) {
        let mut state = self.iommu.lock();
        state.clean.remove(&self.address);
        state.idle.insert(self.address.clone());
    }

    /// The guest may use the device again.
    pub fn end_idleness(&self) {
        self.iommu.lock().idle.remove(&self.address);
    }

    /// Resets the bus of the device with all that is on it (`together`), if this VM has all of it
    /// and uses nothing else of it. Those that come later find themselves reset.
    pub fn reset_bus(&self, device: &VfioDevice, together: &[Neighbour]) -> Result<(), ResetError> {
        if !self.iommu.lock().may_reset(&self.address, together)? {
            return Ok(());
        }
        let groups: BTreeSet<_> = together.iter().map(|other| &*other.group).collect();
        // Without the lock, which vCPUs take when they move BARs: this takes a second. Nobody attaches
        // a device meanwhile, which is for the thread that resets them.
        ioctl::reset_bus(device, &self.iommu.tables.proof(&groups))?;
        let others = together
            .iter()
            .filter(|other| other.address != self.address);
        let clean = others.map(|other| (other.address.clone(), other.group.clone()));
        self.iommu.lock().clean.extend(clean);
        Ok(())
    }
}

impl Attached {
    /// Offers memory of the device to others, at the address where the guest sees it.
    pub fn offer(&self, guest: u64, memory: HostMemory) -> Offer {
        let iommu = Arc::clone(&self.iommu);
        let peer = Peer {
            memory,
            mapped: false,
        };
        iommu.lock().peers.insert(guest, peer);
        (iommu.peers_changed)();
        Offer { iommu, guest }
    }
}

/// Memory of a device that others may reach as long as this lives.
pub(super) struct Offer {
    iommu: Arc<Iommu>,
    guest: u64,
}

impl Drop for Offer {
    fn drop(&mut self) {
        let peer = self.iommu.lock().peers.remove(&self.guest);
        if let Some(Peer { memory, .. }) = peer.filter(|peer| peer.mapped)
            && let Err(error) = self.iommu.tables.unmap(self.guest, memory.len)
        {
            let why = tables::reason(&error);
            log::warn!("devices still reach {:#x}: {why}", self.guest);
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut state = self.iommu.lock();
        self.device = None;
        let group = state.devices.remove(&self.address);
        state.idle.remove(&self.address);
        // The host may have the rest of the group from now on.
        if !state
            .devices
            .values()
            .any(|other| Some(other) == group.as_ref())
        {
            state
                .clean
                .retain(|_, other| Some(&*other) != group.as_ref());
        }
        self.iommu.discards.release();
        if state.devices.is_empty() {
            self.iommu.tables.clear();
            state.mapped.clear();
            state
                .peers
                .values_mut()
                .for_each(|peer| peer.mapped = false);
        }
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
        let group = "7".to_owned();
        state.devices.insert(address.to_owned(), group);
    }

    #[test]
    fn functions_that_share_a_reset_are_reset_with_the_first_and_the_last() {
        let mut state = State::default();
        attach(&mut state, "a");
        assert!(state.may_reset("a", &together()).unwrap());
        // As the reset notes it.
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
        // As the reset notes it.
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
