//! Registers as memory of the guest. [Quiet](is_quiet) registers are plain memory: neither reads
//! nor writes cause exits. Other [plain](is_plain) registers are read without an exit, but writes
//! cause exits.

use std::{io, ops::Range, sync::Arc};

use base::{Access, Mapping as Memory};
use device_model::memory::{AddressSpace, HostMemory, Mapping};
use gf100::{
    format::PAGE,
    registers::{BAR0_BYTES, is_plain, is_quiet},
};
use vm_memory::GuestAddress;

/// BAR 0 as memory.
pub struct Mirror {
    /// The guest's mappings; dropped before the memory.
    placed: Vec<Box<dyn Mapping>>,
    memory: Memory,
    space: Arc<dyn AddressSpace>,
    trapped: bool,
}

/// The ranges of BAR 0 whose registers are memory, in whole pages, and whether the guest may write
/// to them.
fn ranges() -> Vec<(Range<u32>, bool)> {
    let mut ranges: Vec<(Range<u32>, bool)> = Vec::new();
    let pages = (0..BAR0_BYTES).step_by(PAGE as usize);
    for at in pages.filter(|at| is_plain(*at)) {
        let (end, writable) = (at + PAGE as u32, is_quiet(at));
        match ranges.last_mut() {
            Some((last, its)) if last.end == at && *its == writable => last.end = end,
            _ => ranges.push((at..end, writable)),
        }
    }
    ranges
}

impl Mirror {
    /// Creates registers with the given values, by address; all others are 0. With `trapped`, the
    /// memory is not mapped into the guest.
    pub fn new(
        values: impl Iterator<Item = (u32, u32)>,
        space: Arc<dyn AddressSpace>,
        trapped: bool,
    ) -> io::Result<Self> {
        let mirror = Self {
            placed: Vec::new(),
            memory: Memory::anonymous(BAR0_BYTES as usize, Access::ReadWrite)?,
            space,
            trapped,
        };
        values.for_each(|(at, value)| mirror.set(at, value));
        Ok(mirror)
    }

    /// Sets the registers to the given values, by address, and all others to 0.
    pub fn reset(&self, values: impl Iterator<Item = (u32, u32)>) -> io::Result<()> {
        self.memory.clear(0, self.memory.len(), Access::ReadWrite)?;
        values.for_each(|(at, value)| self.set(at, value));
        Ok(())
    }

    /// Value of a register.
    pub fn get(&self, at: u32) -> u32 {
        let at = (at & !3) as usize;
        if at + 4 > self.memory.len() {
            return 0;
        }
        // SAFETY: within the mapping and aligned; it is accessed only by volatile accesses.
        u32::from_le(unsafe { self.memory.start().add(at).cast::<u32>().read_volatile() })
    }

    /// Sets the value of the register at `at`, a multiple of 4.
    pub fn set(&self, at: u32, value: u32) {
        let at = (at & !3) as usize;
        if at + 4 <= self.memory.len() {
            // SAFETY: within the mapping and aligned; apart from this, only the guest accesses it.
            unsafe {
                let word = self.memory.start().add(at).cast::<u32>();
                word.write_volatile(value.to_le());
            }
        }
    }

    /// BAR 0 is now decoded at an address, or nowhere.
    pub fn place(&mut self, address: Option<u64>) -> io::Result<()> {
        self.placed.clear();
        let Some(address) = address.filter(|_| !self.trapped) else {
            return Ok(());
        };
        for (range, writable) in ranges() {
            let memory = HostMemory {
                address: self.memory.start().wrapping_add(range.start as usize),
                len: u64::from(range.end - range.start),
                read_only: !writable,
            };
            let guest = GuestAddress(address + u64::from(range.start));
            self.placed.push(self.space.map(memory, PAGE, Some(guest))?);
        }
        Ok(())
    }
}
