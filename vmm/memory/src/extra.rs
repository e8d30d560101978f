//! Guest-physical memory other than RAM, for devices that need it.

use std::{
    io,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
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
        // which unmaps the slot; see `unmap` for where KVM refuses that.
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
        // which unmaps the slot; see `unmap` for where KVM refuses that.
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
        unmap(self.guest, || self.vm.unmap(self.slot), end);
    }
}

/// Number of attempts to unmap memory of the guest, and the time between two of them.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// Unmaps memory of the guest, which its owner unmaps from this process next: whatever took its place there would be
/// the guest's. KVM refuses only while the kernel has no memory. If that lasts, `end` must end the VM.
fn unmap<E: std::error::Error>(
    guest: GuestAddress,
    mut try_unmap: impl FnMut() -> Result<(), E>,
    end: impl FnOnce(),
) {
    for _ in 1..ATTEMPTS {
        match try_unmap() {
            Ok(()) => return,
            Err(error) => log::warn!("cannot unmap guest memory at {:#x} yet: {error}", guest.0),
        }
        thread::sleep(PAUSE);
    }
    if let Err(error) = try_unmap() {
        log::error!(
            "guest memory at {:#x} cannot be unmapped, so the VM ends: {error}",
            guest.0
        );
        end();
    }
}

/// Ends the process at once, and the VM with it.
fn end() {
    // SAFETY: ends the process, so nothing of it is used any more.
    unsafe { libc::_exit(libc::EXIT_FAILURE) };
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
        unmap(self.guest_address(), || self.vm.unmap(self.slot), end);
        free(&self.window, &self.range);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_stays_in_the_guest_ends_the_vm_before_it_is_reused() {
        for (refusals, ends) in [(0, false), (ATTEMPTS - 1, false), (ATTEMPTS, true)] {
            let (mut left, mut has_ended) = (refusals, false);
            let try_unmap = || {
                if left == 0 {
                    return Ok(());
                }
                left -= 1;
                Err(io::Error::from(io::ErrorKind::OutOfMemory))
            };
            unmap(GuestAddress(0x1000), try_unmap, || has_ended = true);
            assert_eq!((left, has_ended), (0, ends), "{refusals} refusals");
        }
    }
}
