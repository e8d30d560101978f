//! Guest-physical memory other than RAM, for devices that need it.

use std::{
    io,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use devices::memory::{AddressSpace, GuestWrites, HostMemory, Mapping};
use hypervisor::{DirtyLog, MemorySlot, SlotId, Vm};
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};
use vm_memory::GuestAddress;

/// A window of guest-physical addresses from which devices allocate space for their own memory.
pub struct ExtraMemory {
    vm: Arc<Vm>,
    window: Arc<Mutex<AddressAllocator>>,
}

struct Placed {
    vm: Arc<Vm>,
    window: Arc<Mutex<AddressAllocator>>,
    range: RangeInclusive,
    slot: SlotId,
}

impl ExtraMemory {
    /// Allocates addresses from the `len` bytes at `start`.
    pub fn new(vm: Arc<Vm>, start: u64, len: u64) -> io::Result<Self> {
        let window = AddressAllocator::new(start, len).map_err(io::Error::other)?;
        Ok(Self {
            vm,
            window: Arc::new(Mutex::new(window)),
        })
    }
}

impl AddressSpace for ExtraMemory {
    fn map(
        &self,
        memory: HostMemory,
        align: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>> {
        let policy = at.map_or(AllocPolicy::FirstMatch, |address| {
            AllocPolicy::ExactMatch(address.0)
        });
        let range = self
            .window
            .lock_unpoisoned()
            .allocate(memory.len, align, policy)
            .map_err(io::Error::other)?;
        let slot = MemorySlot {
            guest: range.start(),
            len: memory.len,
            host: memory.address,
            read_only: memory.read_only,
        };
        // SAFETY: `HostMemory` promises that the memory stays mapped until the result is dropped,
        // which unmaps the slot; see `stays` for where KVM refuses that.
        match unsafe { self.vm.map(slot) } {
            Ok(slot) => Ok(Box::new(Placed {
                vm: Arc::clone(&self.vm),
                window: Arc::clone(&self.window),
                range,
                slot,
            })),
            Err(error) => {
                free(&self.window, &range);
                Err(io::Error::other(error))
            }
        }
    }
}

/// Memory at the addresses that the guest assigns to the BARs of physical devices. PCI segments keep BARs within their
/// windows and apart from each other.
pub struct ExactMemory(Arc<Vm>);

impl ExactMemory {
    /// In the address space of `vm`.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self(vm)
    }
}

struct Exact {
    vm: Arc<Vm>,
    guest: GuestAddress,
    slot: SlotId,
}

impl AddressSpace for ExactMemory {
    fn map(
        &self,
        memory: HostMemory,
        _align: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>> {
        let guest = at.ok_or(io::ErrorKind::InvalidInput)?;
        let slot = MemorySlot {
            guest: guest.0,
            len: memory.len,
            host: memory.address,
            read_only: memory.read_only,
        };
        // SAFETY: `HostMemory` promises that the memory stays mapped until the result is dropped,
        // which unmaps the slot; see `stays` for where KVM refuses that.
        let slot = unsafe { self.0.map(slot) }.map_err(io::Error::other)?;
        Ok(Box::new(Exact {
            vm: Arc::clone(&self.0),
            guest,
            slot,
        }))
    }
}

impl Mapping for Exact {
    fn guest_address(&self) -> GuestAddress {
        self.guest
    }

    fn watch(&self) -> io::Result<Box<dyn GuestWrites>> {
        let log = self.vm.watch(self.slot).map_err(io::Error::other)?;
        Ok(Box::new(Writes(log)))
    }
}

/// KVM's dirty log of a slot.
struct Writes(DirtyLog);

impl GuestWrites for Writes {
    fn read(&self) -> io::Result<Vec<u64>> {
        self.0.read().map_err(io::Error::other)
    }

    fn arm(&self, first: u64, words: &mut [u64]) -> io::Result<()> {
        self.0.arm(first, words).map_err(io::Error::other)
    }
}

impl Drop for Exact {
    fn drop(&mut self) {
        if let Err(error) = self.vm.unmap(self.slot) {
            stays(self.guest, &error);
        }
    }
}

/// Logs that memory is still mapped into the guest because the kernel had no memory to unmap it. Its device does not
/// know, and from now on the guest sees whatever this process maps at that place.
fn stays(guest: GuestAddress, error: &hypervisor::Error) {
    log::error!("memory at {:#x} stays mapped: {error}", guest.0);
}

fn free(window: &Mutex<AddressAllocator>, range: &RangeInclusive) {
    if let Err(error) = window.lock_unpoisoned().free(range) {
        log::warn!("addresses from {:#x} are lost: {error}", range.start());
    }
}

impl Mapping for Placed {
    fn guest_address(&self) -> GuestAddress {
        GuestAddress(self.range.start())
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        match self.vm.unmap(self.slot) {
            Ok(()) => free(&self.window, &self.range),
            Err(error) => stays(self.guest_address(), &error),
        }
    }
}
