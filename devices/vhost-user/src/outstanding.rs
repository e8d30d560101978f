//! Which requests of a queue a back end has not returned, for another back end that is to go on with them.
//!
//! The rings alone do not tell: an entry of the available ring is overwritten while its request may still be served, if
//! others are returned before it. So they are looked at whenever the back end interrupts the driver.

use std::sync::atomic::Ordering;

use device_model::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::layout::Layout;

/// Requests that were made available and not returned.
#[derive(Debug)]
pub(crate) struct Outstanding {
    /// The first descriptors of them, in the order in which they were made available. `None` if more has happened between two
    /// looks than the rings hold: unknown until nothing is outstanding.
    heads: Option<Vec<u16>>,
    /// The indexes up to which the rings were looked at.
    available: u16,
    used: u16,
    /// The back end interrupts the driver. A driver that polls may do more between two looks than indexes can count.
    has_called: bool,
}

impl Outstanding {
    /// Those of a queue whose back end begins with the entry `base`.
    pub(crate) fn new(base: u16, layout: &Layout, memory: &GuestMemory) -> Self {
        let used = layout.used_index(memory);
        Self {
            heads: (used == Some(base)).then(Vec::new),
            available: base,
            used: used.unwrap_or(base),
            has_called: false,
        }
    }

    /// Looks at the rings, because the back end has interrupted the driver.
    pub(crate) fn called(&mut self, layout: &Layout, memory: &GuestMemory) {
        self.has_called = true;
        self.look(layout, memory);
    }

    /// Makes those that are outstanding the next entries of the available ring, which is how a back end that begins with the
    /// returned entry finds them. The driver does not read its entries again. `None` if they are not known.
    pub(crate) fn offer_again(&mut self, layout: &Layout, memory: &GuestMemory) -> Option<u16> {
        let before = self.used;
        self.look(layout, memory)?;
        if !self.has_called && self.used != before {
            return None;
        }
        let heads = self.heads.as_ref()?;
        let memory = memory.memory();
        for (number, head) in heads.iter().enumerate() {
            // Fewer than entries of the queue.
            let at = layout.available_entry(self.used.wrapping_add(number as u16))?;
            memory
                .store(head.to_le(), GuestAddress(at), Ordering::Relaxed)
                .ok()?;
        }
        Some(self.used)
    }

    /// `None` if the rings cannot be read.
    fn look(&mut self, layout: &Layout, memory: &GuestMemory) -> Option<()> {
        // In this order: what was returned had been made available.
        let used = layout.used_index(memory)?;
        let available = layout.available_index(memory)?;
        let ram = memory.memory();
        let returned = used.wrapping_sub(self.used);
        let added = available.wrapping_sub(self.available);
        if returned.max(added) > layout.size() {
            self.heads = None;
        }
        if let Some(heads) = &mut self.heads {
            for number in 0..added {
                let at = layout.available_entry(self.available.wrapping_add(number))?;
                let head: u16 = ram.load(GuestAddress(at), Ordering::Relaxed).ok()?;
                heads.push(u16::from_le(head));
            }
            let mut are_known = heads.len() <= usize::from(layout.size());
            for number in 0..returned {
                let at = layout.used_entry(self.used.wrapping_add(number))?;
                let id: u32 = ram.load(GuestAddress(at), Ordering::Relaxed).ok()?;
                let id = u32::from_le(id);
                match heads.iter().position(|head| u32::from(*head) == id) {
                    Some(place) => drop(heads.remove(place)),
                    None => are_known = false,
                }
            }
            are_known &= heads.len() <= usize::from(layout.size());
            if !are_known {
                self.heads = None;
            }
        }
        (self.available, self.used) = (available, used);
        if available == used {
            self.heads.get_or_insert_default().clear();
        }
        Some(())
    }
}
