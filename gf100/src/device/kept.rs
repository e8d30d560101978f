//! What engines have of channels that are not in the channel table: a driver may take a channel out,
//! give its number to another, and put it in again at any number. The channel's instance block names
//! what belongs to it, and is written when the channel leaves the engines. A driver that makes a new channel
//! in the same page clears the name with the rest of the block.

use std::collections::VecDeque;

use super::mmu::{Memory, PhysicalAddress};
use crate::format::Target;

/// Where an instance block has the name: nouveau and NVIDIA's headers have nothing there.
const NAME: u64 = 0xc0;
/// Contexts at most; then those whose names are gone are forgotten, and the oldest.
const MOST: usize = 1024;

/// A name; 0 is none.
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

/// What is kept.
pub struct Kept<T> {
    all: VecDeque<Entry<T>>,
    last: u64,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self {
            all: VecDeque::new(),
            last: 0,
        }
    }
}

impl<T> Kept<T> {
    /// Writes a new name into an instance block.
    pub fn name(&mut self, instance: Target, memory: &Memory) -> Name {
        self.last += 1;
        let place = PhysicalAddress::of(instance).after(NAME);
        // Outside of memory: then nothing is kept.
        memory.write(place, &self.last.to_le_bytes());
        Name(self.last)
    }

    /// Keeps what an instance block names.
    pub fn keep(&mut self, name: Name, instance: Target, context: T, memory: &Memory) {
        if self.all.len() >= MOST {
            self.all
                .retain(|entry| Name::read(entry.instance, memory) == Some(entry.name));
        }
        if self.all.len() >= MOST {
            self.all.pop_front();
        }
        self.all.push_back(Entry {
            name,
            instance,
            context,
        });
    }

    /// What an instance block names, which is not kept any longer.
    pub fn take(&mut self, instance: Target, memory: &Memory) -> Option<T> {
        let name = Name::read(instance, memory)?;
        let is_it = |entry: &Entry<T>| entry.name == name && entry.instance == instance;
        let at = self.all.iter().position(is_it)?;
        self.all.remove(at).map(|entry| entry.context)
    }
}
