//! The guest's page tables. They are walked once; after that, pages that were written
//! ([`super::watch`]) are compared with what was sent to the mediator.
//!
//! Isolation does not depend on this: the mediator validates everything. A guest that changes its
//! tables while they are read gets an undefined mapping.

use std::collections::{HashMap, HashSet, hash_map::Entry};

use gf100::format::{
    Aperture, LARGE, LARGE_SHIFT, PAGE, PAGE_SHIFT, Target, VA_BITS,
    directory::{self, ENTRIES, LARGE_ENTRIES, Pde, SMALL_ENTRIES, Table},
    instance::Space as Root,
    pte::Pte,
};
use gpu_mediator::gpu::wire::{Directory, MOST_RUNS, MOST_SPACES, MOST_TABLES, Request, Run, Size};

use super::{
    link::Link,
    memory::Vram,
    views::Views,
    watch::{Moment, Watch},
};

/// Number of 4 KiB pages per large page.
pub const PER_LARGE: u32 = (LARGE / PAGE) as u32;
/// Number of entries per page of a table.
const PER_PAGE: usize = PAGE as usize / 8;

/// Identifies a table by its first page of VRAM and its page size.
type Key = (u32, Size);

/// A table known to the mediator.
struct Known {
    id: u32,
    /// Its entries as they were last sent.
    told: Vec<u64>,
    /// Number of entries in use: the rest of a table of large pages may contain other data.
    count: usize,
    /// Number of directory entries that refer to it.
    users: u32,
    /// When its pages were last compared; `None` if never.
    seen: Option<Moment>,
}

/// An address space known to the mediator.
struct Told {
    id: u32,
    /// Its directory as it was last read.
    raw: Vec<u64>,
    entries: HashMap<u16, Pde>,
    /// Its tables may have changed since they were compared.
    stale: bool,
    seen: Option<Moment>,
}

/// Counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Number of comparisons of an address space with what was sent.
    pub syncs: u64,
    /// Number of directories and tables that were read completely, instead of only where they were
    /// written.
    pub walks: u64,
    /// Number of table entries that were compared.
    pub compared: u64,
    /// Number of entries that were sent.
    pub told: u64,
}

/// All tables and address spaces known to the mediator, by their pages of VRAM.
#[derive(Default)]
pub struct Tables {
    tables: HashMap<Key, Known>,
    spaces: HashMap<u32, Told>,
    table_ids: Ids,
    space_ids: Ids,
    /// Counters.
    pub counts: Counts,
}

/// An allocator of numbers.
#[derive(Default)]
struct Ids {
    free: Vec<u32>,
    next: u32,
}

impl Ids {
    fn take(&mut self, end: u32) -> Option<u32> {
        if let Some(id) = self.free.pop() {
            return Some(id);
        }
        let id = self.next;
        (id < end).then(|| {
            self.next += 1;
            id
        })
    }
}

/// First page of a table with `entries` entries, if it is completely within VRAM.
fn place(table: Option<Table>, entries: usize, vram: &Vram) -> Option<u32> {
    let table = table.filter(|table| table.aperture == Aperture::Vram)?;
    let end = u64::from(table.number) * PAGE + entries as u64 * 8;
    (end <= vram.len()).then_some(table.number)
}

/// A directory entry without those tables that cannot be shadowed.
pub fn usable(entry: Pde, vram: &Vram) -> Pde {
    let large = place(entry.large, entry.large_entries(), vram).and(entry.large);
    Pde {
        small: place(entry.small, SMALL_ENTRIES, vram).and(entry.small),
        large,
        large_shift: large.map_or(0, |_| entry.large_shift),
    }
}

/// The tables of a directory entry, and their numbers of entries.
fn tables_of(entry: Pde) -> impl Iterator<Item = (Key, usize)> {
    let small = entry
        .small
        .map(|table| ((table.number, Size::Small), SMALL_ENTRIES));
    let large = entry
        .large
        .map(|table| ((table.number, Size::Large), entry.large_entries()));
    small.into_iter().chain(large)
}

impl Tables {
    /// The number of the address space with a directory at a page of VRAM. If it is new, the
    /// mediator is told first. `None` if there are too many, or the directory is outside VRAM.
    pub fn space(
        &mut self,
        directory: u32,
        views: &mut Views,
        vram: &Vram,
        link: &mut Link,
    ) -> Option<u32> {
        if let Some(space) = self.spaces.get(&directory) {
            return Some(space.id);
        }
        let end = u64::from(directory) * PAGE + directory::BYTES;
        if end > vram.len() {
            return None;
        }
        let id = self.space_ids.take(MOST_SPACES)?;
        link.send(&Request::Space { space: id });
        let told = Told {
            id,
            raw: vec![0; ENTRIES],
            entries: HashMap::new(),
            stale: true,
            seen: None,
        };
        views.watch.add(directory, directory::BYTES as usize);
        self.spaces.insert(directory, told);
        Some(id)
    }

    /// Directories of all known address spaces.
    pub fn directories(&self) -> Vec<u32> {
        self.spaces.keys().copied().collect()
    }

    /// Marks an address space as possibly changed.
    pub fn touch(&mut self, directory: u32) {
        if let Some(space) = self.spaces.get_mut(&directory) {
            space.stale = true;
        }
    }

    /// If an address space may have changed since the last comparison, sends its changes: only
    /// those pages of its tables are read that were written since then.
    pub fn sync(&mut self, directory: u32, views: &mut Views, vram: &Vram, link: &mut Link) {
        let Some(space) = self.spaces.get_mut(&directory) else {
            return;
        };
        if !std::mem::take(&mut space.stale) {
            return;
        }
        self.counts.syncs += 1;
        views.refresh(vram);
        let changed = self.read_directory(directory, &views.watch, vram);
        let Some(space) = self.spaces.get(&directory) else {
            return;
        };
        let id = space.id;
        let mut is_armed = true;
        for (_, entry) in &changed {
            for table in tables_of(*entry) {
                is_armed &= !self.know(id, table, &mut views.watch, link);
            }
        }
        if !is_armed {
            views.refresh(vram);
        }
        let Some(space) = self.spaces.get(&directory) else {
            return;
        };
        let entries = space.entries.values();
        let entries = entries.chain(changed.iter().map(|(_, entry)| entry));
        let keys: HashSet<Key> = entries
            .flat_map(|entry| tables_of(*entry))
            .map(|(key, _)| key)
            .collect();
        for key in keys {
            self.sync_table(key, &mut views.watch, vram, link);
        }
        let mut unused = Vec::new();
        for (index, entry) in changed {
            self.link(directory, id, index, entry, link, &mut unused);
        }
        for key in unused {
            if self.tables.get(&key).is_some_and(|table| table.users == 0) {
                self.forget_table(key, &mut views.watch, vram, link);
            }
        }
    }

    /// The entries of a directory that have changed.
    fn read_directory(&mut self, directory: u32, watch: &Watch, vram: &Vram) -> Vec<(u16, Pde)> {
        let Some(space) = self.spaces.get_mut(&directory) else {
            return Vec::new();
        };
        let bytes = directory::BYTES as usize;
        let pages: Vec<usize> = match space.seen {
            Some(seen) => watch.changed_since(seen, directory, bytes),
            None => {
                self.counts.walks += 1;
                (0..bytes / PAGE as usize).collect()
            }
        };
        space.seen = Some(watch.now());
        let mut changed = Vec::new();
        for nth in pages {
            let at = (u64::from(directory) + nth as u64) * PAGE;
            let words = vram.words(at, PER_PAGE).unwrap_or_default();
            for (index, raw) in (nth * PER_PAGE..).zip(words) {
                if std::mem::replace(&mut space.raw[index], raw) != raw {
                    // A directory has 2^13 entries.
                    changed.push((index as u16, usable(Pde::parse(raw), vram)));
                }
            }
        }
        changed
    }

    /// Makes a table with `count` entries, which an address space refers to, known to the mediator,
    /// if a number is left. Returns whether pages were added to the watched ones.
    fn know(
        &mut self,
        space: u32,
        (key, count): (Key, usize),
        watch: &mut Watch,
        link: &mut Link,
    ) -> bool {
        let (page, size) = key;
        let known = match self.tables.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let Some(id) = self.table_ids.take(MOST_TABLES) else {
                    return false;
                };
                link.send(&Request::Table {
                    table: id,
                    size,
                    space,
                });
                let entries = match size {
                    Size::Small => SMALL_ENTRIES,
                    Size::Large => LARGE_ENTRIES,
                };
                vacant.insert(Known {
                    id,
                    told: vec![0; entries],
                    count: 0,
                    users: 0,
                    seen: None,
                })
            }
        };
        if known.count >= count {
            return false;
        }
        watch.add(page, count * 8);
        watch.remove(page, known.count * 8);
        known.count = count;
        known.seen = None;
        true
    }

    fn link(
        &mut self,
        directory: u32,
        id: u32,
        index: u16,
        entry: Pde,
        link: &mut Link,
        unused: &mut Vec<Key>,
    ) {
        let Some(space) = self.spaces.get_mut(&directory) else {
            return;
        };
        let old = space.entries.get(&index).copied().unwrap_or_default();
        if old == entry {
            return;
        }
        match entry == Pde::default() {
            true => space.entries.remove(&index),
            false => space.entries.insert(index, entry),
        };
        let mut number = |table: Option<Table>, size| {
            let known = self.tables.get_mut(&(table?.number, size))?;
            known.users += 1;
            Some(known.id)
        };
        let told = Directory {
            small: number(entry.small, Size::Small),
            large: number(entry.large, Size::Large),
            large_shift: entry.large_shift,
        };
        link.send(&Request::Link {
            space: id,
            index,
            entry: told,
        });
        for (key, _) in tables_of(old) {
            if let Some(known) = self.tables.get_mut(&key) {
                known.users = known.users.saturating_sub(1);
                unused.push(key);
            }
        }
    }

    fn sync_table(&mut self, key: Key, watch: &mut Watch, vram: &Vram, link: &mut Link) {
        let Some(known) = self.tables.get_mut(&key) else {
            return;
        };
        let (page, size) = key;
        let step = match size {
            Size::Small => 1,
            Size::Large => PER_LARGE,
        };
        let bytes = known.count * 8;
        let pages: Vec<usize> = match known.seen {
            Some(seen) => watch.changed_since(seen, page, bytes),
            None => {
                self.counts.walks += 1;
                (0..bytes.div_ceil(PAGE as usize)).collect()
            }
        };
        known.seen = Some(watch.now());
        let table = known.id;
        let mut runs: Vec<Run> = Vec::new();
        for nth in pages {
            let first = nth * PER_PAGE;
            let count = PER_PAGE.min(known.count.saturating_sub(first));
            let at = (u64::from(page) + nth as u64) * PAGE;
            let Some(words) = vram.words(at, count) else {
                continue;
            };
            self.counts.compared += count as u64;
            for (index, raw) in (first..).zip(words) {
                let told = std::mem::replace(&mut known.told[index], raw);
                if told == raw {
                    continue;
                }
                watch.told(told, raw, size, vram);
                self.counts.told += 1;
                let page = Pte::parse(raw).ok().flatten();
                let new = Run {
                    // Tables have at most 2^15 entries.
                    index: index as u16,
                    count: 1,
                    first: page.map(Pte::target),
                    read_only: page.is_some_and(|page| page.read_only),
                    kind: page.map_or(0, |page| page.kind),
                };
                match runs.last_mut() {
                    Some(last) if goes_on(last, &new, step) => last.count += 1,
                    _ => {
                        if runs.len() == MOST_RUNS {
                            let runs = std::mem::take(&mut runs);
                            link.send(&Request::Map { table, runs });
                        }
                        runs.push(new);
                    }
                }
            }
        }
        if !runs.is_empty() {
            link.send(&Request::Map { table, runs });
        }
    }

    fn forget_table(&mut self, key: Key, watch: &mut Watch, vram: &Vram, link: &mut Link) {
        let Some(table) = self.tables.remove(&key) else {
            return;
        };
        link.send(&Request::TableGone { table: table.id });
        self.table_ids.free.push(table.id);
        watch.remove(key.0, table.count * 8);
        for raw in table.told {
            watch.told(raw, 0, key.1, vram);
        }
    }

    /// Discards an address space to which no channel is bound.
    pub fn forget(&mut self, directory: u32, watch: &mut Watch, vram: &Vram, link: &mut Link) {
        let Some(space) = self.spaces.remove(&directory) else {
            return;
        };
        link.send(&Request::SpaceGone { space: space.id });
        self.space_ids.free.push(space.id);
        watch.remove(directory, directory::BYTES as usize);
        for entry in space.entries.values() {
            for (key, _) in tables_of(*entry) {
                let Some(known) = self.tables.get_mut(&key) else {
                    continue;
                };
                known.users = known.users.saturating_sub(1);
                if known.users == 0 {
                    self.forget_table(key, watch, vram, link);
                }
            }
        }
    }
}

/// Whether an entry continues a run.
fn goes_on(last: &Run, new: &Run, step: u32) -> bool {
    let same = last.read_only == new.read_only && last.kind == new.kind;
    let distance = u32::from(last.count) * step;
    let follows = match (last.first, new.first) {
        (None, None) => true,
        (Some(Target::Vram(first)), Some(Target::Vram(page))) => {
            first.0.checked_add(distance) == Some(page.0)
        }
        (Some(Target::Ram(first)), Some(Target::Ram(page))) => {
            first.0.checked_add(distance) == Some(page.0)
        }
        _ => false,
    };
    same && follows && last.index + last.count == new.index && last.count < u16::MAX
}

/// Translates an address of a guest's address space with its current tables: target page, offset in
/// it, and number of bytes up to its end.
pub fn translate(root: Root, address: u64, vram: &Vram) -> Option<(Target, u64, u64)> {
    if address > root.limit || address >> VA_BITS != 0 || root.aperture != Aperture::Vram {
        return None;
    }
    let at = u64::from(root.number) * PAGE + (address >> directory::SHIFT) * 8;
    let entry = usable(Pde::parse(vram.word(at)?), vram);
    let small = (address >> PAGE_SHIFT) % SMALL_ENTRIES as u64;
    let large = small >> (LARGE_SHIFT - PAGE_SHIFT);
    let page = |table: Table, index: u64| {
        let raw = vram.word(u64::from(table.number) * PAGE + index * 8)?;
        Pte::parse(raw).ok().flatten()
    };
    if let Some(found) = entry.small.and_then(|table| page(table, small)) {
        let offset = address % PAGE;
        return Some((found.target(), offset, PAGE - offset));
    }
    if large >= entry.large_entries() as u64 {
        return None;
    }
    let found = page(entry.large?, large)?;
    let offset = address % LARGE;
    Some((found.target(), offset, LARGE - offset))
}
