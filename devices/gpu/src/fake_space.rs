//! A fake of KVM's address space: memory that the guest accesses, and logs of its writes.

use std::{
    io,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use device_model::memory::{AddressSpace, GuestWrites, HostMemory, Mapping};
use gf100::format::PAGE;
use vm_memory::GuestAddress;

/// A log, if one was started.
type Log = Arc<Mutex<Option<Vec<u64>>>>;

struct Slot {
    at: u64,
    memory: HostMemory,
    log: Log,
}

/// The address space.
#[derive(Default)]
pub struct FakeSpace {
    slots: Arc<Mutex<Vec<Slot>>>,
}

struct Placed {
    at: u64,
    slots: Arc<Mutex<Vec<Slot>>>,
    log: Log,
    pages: usize,
}

struct Writes(Log);

impl Mapping for Placed {
    fn guest_address(&self) -> GuestAddress {
        GuestAddress(self.at)
    }

    fn watch(&self) -> io::Result<Box<dyn GuestWrites>> {
        *self.log.lock_unpoisoned() = Some(vec![u64::MAX; self.pages.div_ceil(64)]);
        Ok(Box::new(Writes(Arc::clone(&self.log))))
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.slots
            .lock_unpoisoned()
            .retain(|slot| slot.at != self.at);
    }
}

impl GuestWrites for Writes {
    fn read(&self) -> io::Result<Vec<u64>> {
        Ok(self.0.lock_unpoisoned().clone().unwrap_or_default())
    }

    fn arm(&self, first: u64, words: &mut [u64]) -> io::Result<()> {
        let mut log = self.0.lock_unpoisoned();
        let log = log.iter_mut().flatten().skip(first as usize);
        log.zip(words).for_each(|(log, word)| *log &= !*word);
        Ok(())
    }
}

impl AddressSpace for FakeSpace {
    fn map(
        &self,
        memory: HostMemory,
        _: u64,
        at: Option<GuestAddress>,
    ) -> io::Result<Box<dyn Mapping>> {
        let at = at.ok_or(io::ErrorKind::InvalidInput)?.0;
        let log = Log::default();
        let slot = Slot {
            at,
            memory,
            log: Arc::clone(&log),
        };
        self.slots.lock_unpoisoned().push(slot);
        Ok(Box::new(Placed {
            at,
            slots: Arc::clone(&self.slots),
            log,
            pages: (memory.len / PAGE) as usize,
        }))
    }
}

impl FakeSpace {
    /// Writes a word as the guest; false if that would be an exit.
    pub fn write(&self, address: u64, word: u32) -> bool {
        let slots = self.slots.lock_unpoisoned();
        let contains = |slot: &&Slot| (slot.at..slot.at + slot.memory.len).contains(&address);
        let Some(slot) = slots
            .iter()
            .find(contains)
            .filter(|slot| !slot.memory.read_only)
        else {
            return false;
        };
        let offset = (address - slot.at) as usize;
        let page = offset / PAGE as usize;
        if let Some(log) = &mut *slot.log.lock_unpoisoned() {
            log[page / 64] |= 1 << (page % 64);
        }
        // SAFETY: within the slot, whose memory exists as long as it is listed; tests write words
        // at multiples of 4.
        unsafe {
            slot.memory
                .address
                .add(offset)
                .cast::<u32>()
                .write_volatile(word)
        };
        true
    }

    /// Reads a word as the guest; `None` if that would be an exit.
    pub fn read(&self, address: u64) -> Option<u32> {
        let slots = self.slots.lock_unpoisoned();
        let contains = |slot: &&Slot| (slot.at..slot.at + slot.memory.len).contains(&address);
        let slot = slots.iter().find(contains)?;
        let offset = (address - slot.at) as usize;
        // SAFETY: as in `write`.
        Some(unsafe {
            slot.memory
                .address
                .add(offset)
                .cast::<u32>()
                .read_volatile()
        })
    }
}
