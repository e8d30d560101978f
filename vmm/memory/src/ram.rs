//! The guest's RAM.

use std::{
    collections::VecDeque,
    fs::File,
    sync::{Arc, PoisonError},
};

use devices::{
    memory::{GuestMemory, GuestRam},
    write_log::WriteLog,
};
use hypervisor::{MemorySlot, SlotId, Vm};
use vm_memory::{
    FileOffset, GuestAddress, GuestAddressSpace, GuestRegionMmap, bitmap::NewBitmap,
    mmap::MmapRegionBuilder,
};

use super::{Backing, Mapping, MappingError, mapping::FileSystem};

/// The role of a region of RAM in the guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RegionKind {
    /// In the memory map at boot.
    Boot,
    /// Plugged while running, announced by ACPI.
    Hotplugged,
    /// Managed by a virtio-mem device, which controls how much of it is plugged.
    VirtioMem,
}

/// A contiguous range of guest-physical addresses that is backed by memory.
#[derive(Clone, Debug)]
pub struct Region {
    /// Name of the memory zone it belongs to.
    pub zone: String,
    /// Its role in the guest.
    pub kind: RegionKind,
    /// Guest-physical address, a multiple of 2 MiB except for the first.
    pub guest: u64,
    /// The memory.
    pub mapping: Arc<Mapping>,
    /// Its memory slot in KVM.
    pub slot: SlotId,
}

/// Memory of a region that another process created.
#[derive(Debug)]
pub struct GivenMemory {
    /// Guest-physical address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// The file.
    pub file: File,
    /// Offset in the file at which it begins, in bytes.
    pub offset: u64,
}

/// RAM could not be added to the guest.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The host could not provide the memory.
    #[error("cannot get memory for the guest")]
    Mapping(#[from] MappingError),
    /// KVM refused the memory.
    #[error("cannot map memory at {guest:#x} into the guest")]
    Slot {
        /// Guest-physical address.
        guest: u64,
        /// Why.
        source: hypervisor::Error,
    },
    /// The files from another process do not match the regions.
    #[error("no file came for the {len} bytes of memory at {guest:#x}, or more than was needed")]
    NotGiven {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The range overlaps another one or wraps around.
    #[error("{len} bytes at {guest:#x} do not fit between the guest's other memory")]
    Overlap {
        /// Guest-physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// All RAM of a guest.
///
/// Must be dropped after everything that accesses guest memory (vCPUs, devices).
#[derive(Debug)]
pub struct Ram {
    vm: Arc<Vm>,
    memory: GuestMemory,
    regions: Vec<Region>,
    /// Memory that the guest no longer has, kept because a device may still be using the old map.
    withdrawn: Vec<Arc<Mapping>>,
    /// Memory for the next regions, in place of newly allocated memory.
    given: Option<VecDeque<GivenMemory>>,
}

impl Ram {
    /// A guest without any memory yet.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self {
            vm,
            memory: GuestMemory::new(GuestRam::default()),
            regions: Vec::new(),
            withdrawn: Vec::new(),
            given: None,
        }
    }

    /// Uses this memory from another process for the next regions, in this order, until
    /// [`Ram::all_given`].
    pub fn give(&mut self, memory: Vec<GivenMemory>) {
        self.given = Some(memory.into());
    }

    /// Checks that all given memory was used. Regions that are added later have memory of their
    /// own.
    pub fn all_given(&mut self) -> Result<(), RamError> {
        match self.given.take().and_then(|mut given| given.pop_front()) {
            None => Ok(()),
            Some(GivenMemory { guest, len, .. }) => Err(RamError::NotGiven { guest, len }),
        }
    }

    /// Maps memory for a region that is about to be added.
    fn map_memory(
        &mut self,
        zone: &str,
        guest: u64,
        len: u64,
        backing: &Backing,
    ) -> Result<Mapping, RamError> {
        let Some(given) = &mut self.given else {
            let offset = self.file_offset(zone, backing);
            return Ok(Mapping::new(len, backing, offset)?);
        };
        let next = given.pop_front();
        match next.filter(|next| (next.guest, next.len) == (guest, len)) {
            Some(next) => Ok(Mapping::given(len, backing, next.offset, next.file)?),
            None => Err(RamError::NotGiven { guest, len }),
        }
    }

    /// The memory map that devices use.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// All regions, in the order in which they were added.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Size of RAM in bytes, at boot and hot-plugged by ACPI.
    pub fn size(&self) -> u64 {
        self.regions
            .iter()
            .filter(|region| region.kind != RegionKind::VirtioMem)
            .map(|region| region.mapping.size() as u64)
            .sum()
    }

    /// Offset of a zone's next region in the zone's file: after the regions before it. In a
    /// directory, each region has a file of its own.
    fn file_offset(&self, zone: &str, backing: &Backing) -> u64 {
        if backing.file.as_ref().is_none_or(|path| path.is_dir()) {
            return 0;
        }
        let earlier = self.regions.iter().filter(|region| region.zone == zone);
        earlier.map(|region| region.mapping.size() as u64).sum()
    }

    /// Adds `len` bytes at `guest`.
    pub fn add(
        &mut self,
        zone: &str,
        kind: RegionKind,
        guest: u64,
        len: u64,
        backing: &Backing,
    ) -> Result<(), RamError> {
        let overlap = || RamError::Overlap { guest, len };
        let mapping = Arc::new(self.map_memory(zone, guest, len, backing)?);
        let log = WriteLog::with_len(mapping.size());
        let mut builder = MmapRegionBuilder::new_with_bitmap(mapping.size(), log);
        if let Some(file) = mapping.file() {
            builder =
                builder.with_file_offset(FileOffset::from_arc(Arc::clone(file), mapping.offset()));
        }
        // SAFETY: `Ram` keeps the mapping until it is dropped, which is after every user.
        let region = unsafe { builder.with_raw_mmap_pointer(mapping.address()) }
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(if backing.shared {
                libc::MAP_SHARED
            } else {
                libc::MAP_PRIVATE
            })
            .with_hugetlbfs(mapping.file_system() == FileSystem::Hugetlbfs)
            .build()
            .ok()
            .and_then(|region| GuestRegionMmap::new(region, GuestAddress(guest)))
            .ok_or_else(overlap)?;
        let map = self
            .memory
            .memory()
            .insert_region(Arc::new(region))
            .map_err(|_| overlap())?;
        let slot = MemorySlot {
            guest,
            len,
            host: mapping.address(),
            read_only: false,
        };
        // SAFETY: the mapping lives as long as `self`, whose drop unmaps the slot first.
        let slot =
            unsafe { self.vm.map(slot) }.map_err(|source| RamError::Slot { guest, source })?;
        self.memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(map);
        self.regions.push(Region {
            zone: zone.to_owned(),
            kind,
            guest,
            mapping,
            slot,
        });
        Ok(())
    }

    /// Removes the region that was added last, before the guest has been told about it.
    pub fn withdraw_last(&mut self) {
        let Some(region) = self.regions.pop() else {
            return;
        };
        let (guest, len) = (region.guest, region.mapping.size() as u64);
        if let Ok((map, _)) = self.memory.memory().remove_region(GuestAddress(guest), len) {
            self.memory
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .replace(map);
        }
        if let Err(error) = self.vm.unmap(region.slot) {
            log::warn!("memory at {guest:#x} stays mapped: {error}");
        }
        self.withdrawn.push(region.mapping);
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        self.memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(GuestRam::default());
        for region in &self.regions {
            if let Err(error) = self.vm.unmap(region.slot) {
                log::warn!("memory at {:#x} stays mapped: {error}", region.guest);
            }
        }
    }
}
