//! Translations that the GPU keeps, and requests to flush them.
//!
//! What has been translated stays as it was until a flush of its address space has finished, whatever the page tables
//! contain by then. Requests take time, one after another. Hardware may forget a translation earlier. Here it does not,
//! so a driver that forgets a flush, or does not wait for its end, uses old pages.

use std::collections::{HashMap, VecDeque};

use crate::{
    format::{Target, directory::Pde, pte::Pte},
    registers::Flush,
};

/// Maximum number of requests that have not finished. The register for their status has eight bits for this.
pub const MOST_PENDING: u8 = u8::MAX;
/// Maximum number of translations of each type; at this number, all are forgotten.
const MOST_KEPT: usize = 1 << 16;

/// Who uses an address. Each has translations of its own.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum User {
    /// The CPU, through a BAR.
    Bar,
    /// An engine or a channel's command fetch unit.
    Engine,
}

#[derive(Clone, Copy, Eq, Hash, PartialEq)]
struct Key {
    user: User,
    /// The page directory of the address space.
    directory: Target,
    /// Number of the directory entry or page.
    number: u64,
}

impl Key {
    fn is_covered_by(&self, flush: &Flush) -> bool {
        let is_hub = self.user == User::Bar || !flush.hub_only;
        is_hub && flush.directory.is_none_or(|its| its == self.directory)
    }
}

/// A translated page.
#[derive(Clone, Copy)]
pub struct Page {
    /// Its entry.
    pub entry: Pte,
    /// Its size in bytes.
    pub size: u64,
}

/// Translations of one type.
struct Level<T>(HashMap<Key, T>);

impl<T> Default for Level<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Copy> Level<T> {
    fn get_or<E>(&mut self, key: Key, walk: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        if let Some(kept) = self.0.get(&key) {
            return Ok(*kept);
        }
        let found = walk()?;
        if self.0.len() >= MOST_KEPT {
            self.0.clear();
        }
        self.0.insert(key, found);
        Ok(found)
    }

    fn forget(&mut self, flushes: &[Flush]) {
        self.0
            .retain(|key, _| !flushes.iter().any(|flush| key.is_covered_by(flush)));
    }
}

/// The translations of one user in one address space.
pub struct Space<'a> {
    tlb: &'a mut Tlb,
    user: User,
    directory: Target,
}

impl Space<'_> {
    fn key(&self, number: u64) -> Key {
        Key {
            user: self.user,
            directory: self.directory,
            number,
        }
    }

    /// Returns a directory entry: the kept one, or what `walk` finds.
    pub fn entry<E>(
        &mut self,
        index: u64,
        walk: impl FnOnce() -> Result<Pde, E>,
    ) -> Result<Pde, E> {
        let key = self.key(index);
        self.tlb.entries.get_or(key, walk)
    }

    /// Returns what an address translates to, by its number of small pages: the kept page, or what `walk` finds.
    pub fn page<E>(
        &mut self,
        number: u64,
        walk: impl FnOnce() -> Result<Page, E>,
    ) -> Result<Page, E> {
        let key = self.key(number);
        self.tlb.pages.get_or(key, walk)
    }
}

/// The kept translations.
#[derive(Default)]
pub struct Tlb {
    entries: Level<Pde>,
    pages: Level<Page>,
}

impl Tlb {
    /// The translations of one user in the address space of a page directory.
    pub fn of(&mut self, user: User, directory: Target) -> Space<'_> {
        Space {
            tlb: self,
            user,
            directory,
        }
    }

    /// Forgets what any of these flushes covers.
    pub fn forget(&mut self, flushes: &[Flush]) {
        self.entries.forget(flushes);
        self.pages.forget(flushes);
    }
}

/// Flushes that have not finished.
pub struct Flushes {
    /// Each with the time of its end, in ascending order.
    pending: VecDeque<(u64, Flush)>,
    length: u64,
}

impl Flushes {
    /// None yet; each will take `length` nanoseconds.
    pub fn new(length: u64) -> Self {
        Self {
            pending: VecDeque::new(),
            length,
        }
    }

    /// Number of flushes that have not finished.
    pub fn pending(&self) -> u8 {
        // `request` limits it to `MOST_PENDING`.
        self.pending.len() as u8
    }

    /// Starts a flush after the earlier ones. Returns false if there is no room for it.
    pub fn request(&mut self, flush: Flush, now: u64) -> bool {
        if self.pending.len() >= usize::from(MOST_PENDING) {
            return false;
        }
        let start = self.pending.back().map_or(now, |(end, _)| now.max(*end));
        let end = start.saturating_add(self.length);
        self.pending.push_back((end, flush));
        true
    }

    /// Removes and returns those that have finished by now.
    pub fn finished(&mut self, now: u64) -> Vec<Flush> {
        let count = self.pending.partition_point(|(end, _)| *end <= now);
        self.pending
            .drain(..count)
            .map(|(_, flush)| flush)
            .collect()
    }
}
