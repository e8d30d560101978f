//! Engine contexts of channels that are not in the channel table. A driver may remove a channel, give its number to
//! another one, and insert it again at any number. When a channel leaves the engines, a name for its context is written
//! into its instance block. A driver that creates a new channel in the same page clears the name together with the rest
//! of the block.

use std::collections::VecDeque;

use super::mmu::{Memory, PhysicalAddress};
use crate::format::Target;

/// Offset of the name in an instance block. nouveau and NVIDIA's headers do not use this field.
const NAME: u64 = 0xc0;
/// The limit is one context per this many bytes of VRAM, but at least [`LEAST`]. At the limit, contexts whose names are
/// gone are dropped, then the oldest. A mediator's guests with 64 MiB of VRAM have 128 channels each. A context takes
/// at most 128 KiB here.
const VRAM: u64 = 512 << 10;
const LEAST: usize = 1024;

/// The name of a context; 0 means none.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Name(u64);

impl Name {
    fn read(instance: Target, memory: &Memory) -> Option<Self> {
        memory
            .word(PhysicalAddress::of(instance).after(NAME))
            .filter(|name| *name != 0)
            .map(Self)
    }
}

struct Entry<T> {
    name: Name,
    instance: Target,
    context: T,
}

/// The contexts that are kept.
pub struct Kept<T> {
    all: VecDeque<Entry<T>>,
    most: usize,
    /// Number of contexts at which those whose names are gone are searched for.
    sweep: usize,
    last: u64,
}

impl<T> Kept<T> {
    /// Creates an empty collection for a GPU with this many bytes of VRAM.
    pub fn new(vram: u64) -> Self {
        let most = usize::try_from(vram / VRAM).unwrap_or(usize::MAX);
        Self {
            all: VecDeque::new(),
            most: most.max(LEAST),
            sweep: LEAST,
            last: 0,
        }
    }

    /// Writes a new name into an instance block.
    pub fn name(&mut self, instance: Target, memory: &Memory) -> Name {
        self.last += 1;
        let place = PhysicalAddress::of(instance).after(NAME);
        // If the block is outside memory, the context cannot be found again.
        memory.write(place, &self.last.to_le_bytes());
        Name(self.last)
    }

    /// Keeps the context that an instance block names.
    pub fn keep(&mut self, name: Name, instance: Target, context: T, memory: &Memory) {
        if self.all.len() >= self.sweep {
            self.all
                .retain(|entry| Name::read(entry.instance, memory) == Some(entry.name));
            // This amortizes to checking two names per channel.
            self.sweep = (2 * self.all.len()).clamp(LEAST, self.most);
        }
        if self.all.len() >= self.most {
            self.all.pop_front();
        }
        self.all.push_back(Entry {
            name,
            instance,
            context,
        });
    }

    /// Removes and returns the context that an instance block names.
    pub fn take(&mut self, instance: Target, memory: &Memory) -> Option<T> {
        let name = Name::read(instance, memory)?;
        let is_it = |entry: &Entry<T>| entry.name == name && entry.instance == instance;
        let at = self.all.iter().position(is_it)?;
        self.all.remove(at).map(|entry| entry.context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::VramPage;

    #[test]
    fn all_channels_of_all_guests_that_vram_has_room_for_are_kept() {
        let vram = 1 << 30;
        let memory = Memory::new(vram).expect("there is room");
        let mut kept = Kept::new(vram);
        let blocks = (1..=16 * 128).map(|page| Target::Vram(VramPage(page)));
        for (number, instance) in blocks.clone().enumerate() {
            let name = kept.name(instance, &memory);
            kept.keep(name, instance, number, &memory);
        }
        for (number, instance) in blocks.enumerate() {
            assert_eq!(kept.take(instance, &memory), Some(number));
        }
    }

    #[test]
    fn what_nobody_names_any_more_goes_first_and_then_the_oldest() {
        let memory = Memory::new(64 << 20).expect("there is room");
        let mut kept = Kept::new(0);
        let block = |page| Target::Vram(VramPage(page));
        for page in 1..=LEAST as u32 {
            let name = kept.name(block(page), &memory);
            kept.keep(name, block(page), page, &memory);
        }
        // A new channel is created in the page of an old one.
        kept.name(block(5), &memory);
        for page in [2000, 2001] {
            let name = kept.name(block(page), &memory);
            kept.keep(name, block(page), page, &memory);
        }
        let mut take = |page| kept.take(block(page), &memory);
        assert_eq!([5, 1, 2].map(&mut take), [None, None, Some(2)]);
        assert_eq!([2000, 2001].map(&mut take), [Some(2000), Some(2001)]);
    }
}
