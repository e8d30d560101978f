//! The guest's page tables: walked, compared with what the mediator was told, and told.
//!
//! Nothing here isolates anybody: the mediator validates what it is told. A guest that changes its
//! tables while they are read gets what it deserves.

use std::collections::{HashMap, HashSet};

use gf100::format::{
    Aperture, LARGE, LARGE_SHIFT, PAGE, PAGE_SHIFT, Target, VA_BITS,
    directory::{self, ENTRIES, LARGE_ENTRIES, Pde, SMALL_ENTRIES, Table},
    instance::Space as Root,
    pte::Pte,
};
use gpu_mediator::gpu::wire::{Directory, MOST_RUNS, MOST_SPACES, MOST_TABLES, Request, Run, Size};

use super::{link::Link, memory::Vram};

/// 4 KiB pages of a large page.
const PER_LARGE: u32 = (LARGE / PAGE) as u32;

/// A table that the mediator knows.
struct Known {
    id: u32,
    /// Its entries as they were told.
    told: Vec<u64>,
    /// Entries of directories that name it.
    users: u32,
}

/// An address space that the mediator knows.
struct Told {
    id: u32,
    entries: HashMap<u16, Pde>,
    /// Tables may have changed since they were compared.
    stale: bool,
}

/// Counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Spaces that were compared with what was told.
    pub walks: u64,
    /// Entries of tables that were compared.
    pub compared: u64,
    /// Entries that were told.
    pub told: u64,
}

/// All tables and spaces that the mediator knows, by their pages of VRAM.
#[derive(Default)]
pub struct Tables {
    tables: HashMap<(u32, Size), Known>,
    spaces: HashMap<u32, Told>,
    table_ids: Ids,
    space_ids: Ids,
    /// Counters.
    pub counts: Counts,
}

/// Numbers that are free.
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

/// Where a table of so many entries is, if it lies wholly in VRAM.
fn place(table: Option<Table>, entries: usize, vram: &Vram) -> Option<u32> {
    let table = table.filter(|table| table.aperture == Aperture::Vram)?;
    let end = u64::from(table.number) * PAGE + entries as u64 * 8;
    (end <= vram.len()).then_some(table.number)
}

/// The entry of a directory without tables that cannot be shadowed.
fn usable(entry: Pde, vram: &Vram) -> Pde {
    let large = place(entry.large, entry.large_entries(), vram).and(entry.large);
    Pde {
        small: place(entry.small, SMALL_ENTRIES, vram).and(entry.small),
        large,
        large_shift: large.map_or(0, |_| entry.large_shift),
    }
}

impl Tables {
    /// The number of the space with a directory at a page of VRAM, which is told first if need be;
    /// none if there are too many, or the directory is outside.
    pub fn space(&mut self, directory: u32, vram: &Vram, link: &mut Link) -> Option<u32> {
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
            entries: HashMap::new(),
            stale: true,
        };
        self.spaces.insert(directory, told);
        Some(id)
    }

    /// Directories of the spaces that there are.
    pub fn directories(&self) -> Vec<u32> {
        self.spaces.keys().copied().collect()
    }

    /// The tables of a space may have changed.
    pub fn touch(&mut self, directory: u32) {
        if let Some(space) = self.spaces.get_mut(&directory) {
            space.stale = true;
        }
    }

    /// Tells what has changed in a space since it was last compared, if it may have.
    pub fn sync(&mut self, directory: u32, vram: &Vram, link: &mut Link) {
        let Some(space) = self.spaces.get_mut(&directory) else {
            return;
        };
        if !std::mem::take(&mut space.stale) {
            return;
        }
        let id = space.id;
        self.counts.walks += 1;
        let at = u64::from(directory) * PAGE;
        let Some(words) = vram.words(at, ENTRIES) else {
            return;
        };
        let mut visited = HashSet::new();
        let mut unused = Vec::new();
        for (index, raw) in (0_u16..).zip(words) {
            let entry = usable(Pde::parse(raw), vram);
            for (table, size) in [(entry.small, Size::Small), (entry.large, Size::Large)] {
                let Some(table) = table else { continue };
                if visited.insert((table.number, size)) {
                    let count = match size {
                        Size::Small => SMALL_ENTRIES,
                        Size::Large => entry.large_entries(),
                    };
                    self.sync_table(table.number, size, count, vram, link);
                }
            }
            self.link(directory, id, index, entry, link, &mut unused);
        }
        for key in unused {
            let is_unused = self.tables.get(&key).is_some_and(|table| table.users == 0);
            if is_unused && let Some(table) = self.tables.remove(&key) {
                link.send(&Request::TableGone { table: table.id });
                self.table_ids.free.push(table.id);
            }
        }
    }

    fn link(
        &mut self,
        directory: u32,
        id: u32,
        index: u16,
        entry: Pde,
        link: &mut Link,
        unused: &mut Vec<(u32, Size)>,
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
        for (table, size) in [(old.small, Size::Small), (old.large, Size::Large)] {
            let Some(table) = table else { continue };
            let key = (table.number, size);
            if let Some(known) = self.tables.get_mut(&key) {
                known.users = known.users.saturating_sub(1);
                unused.push(key);
            }
        }
    }

    fn sync_table(&mut self, page: u32, size: Size, count: usize, vram: &Vram, link: &mut Link) {
        let Some(words) = vram.words(u64::from(page) * PAGE, count) else {
            return;
        };
        self.counts.compared += count as u64;
        let (entries, step) = match size {
            Size::Small => (SMALL_ENTRIES, 1),
            Size::Large => (LARGE_ENTRIES, PER_LARGE),
        };
        let known = match self.tables.entry((page, size)) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let Some(id) = self.table_ids.take(MOST_TABLES) else {
                    return;
                };
                link.send(&Request::Table { table: id, size });
                vacant.insert(Known {
                    id,
                    told: vec![0; entries],
                    users: 0,
                })
            }
        };
        let mut runs: Vec<Run> = Vec::new();
        let table = known.id;
        for (index, (raw, told)) in words.into_iter().zip(&mut known.told).enumerate() {
            if raw == *told {
                continue;
            }
            *told = raw;
            self.counts.told += 1;
            let page = Pte::parse(raw).ok().flatten();
            // Tables have 2^15 entries at most.
            let new = Run {
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
        if !runs.is_empty() {
            link.send(&Request::Map { table, runs });
        }
    }

    /// A space is not needed any more: no channel is bound to it.
    pub fn forget(&mut self, directory: u32, link: &mut Link) {
        let Some(space) = self.spaces.remove(&directory) else {
            return;
        };
        link.send(&Request::SpaceGone { space: space.id });
        self.space_ids.free.push(space.id);
        for entry in space.entries.values() {
            for (table, size) in [(entry.small, Size::Small), (entry.large, Size::Large)] {
                let Some(table) = table else { continue };
                let key = (table.number, size);
                let Some(known) = self.tables.get_mut(&key) else {
                    continue;
                };
                known.users = known.users.saturating_sub(1);
                if known.users == 0
                    && let Some(known) = self.tables.remove(&key)
                {
                    link.send(&Request::TableGone { table: known.id });
                    self.table_ids.free.push(known.id);
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

/// Where an address of a guest's space is, as its tables say now, and how far that goes on.
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

/// Pages of VRAM that a BAR's space shows, by page of the BAR.
pub fn shown(root: Option<Root>, pages: usize, vram: &Vram) -> Vec<Option<u32>> {
    let mut all = vec![None; pages];
    let Some(root) = root.filter(|root| root.aperture == Aperture::Vram) else {
        return all;
    };
    let count = (vram.len() / PAGE) as u32;
    let per_entry = SMALL_ENTRIES;
    for (nth, chunk) in all.chunks_mut(per_entry).enumerate() {
        let at = u64::from(root.number) * PAGE + nth as u64 * 8;
        let Some(raw) = vram.word(at) else { continue };
        let entry = usable(Pde::parse(raw), vram);
        let mut put = |index: usize, page: u32| {
            let address = (nth * per_entry + index) as u64 * PAGE;
            if page < count
                && address <= root.limit
                && let Some(shown) = chunk.get_mut(index)
            {
                *shown = Some(page);
            }
        };
        let pages = |table: Option<Table>, entries| {
            let words = table.and_then(|table| vram.words(u64::from(table.number) * PAGE, entries));
            let targets = words.unwrap_or_default().into_iter().enumerate();
            targets.filter_map(|(index, raw)| match Pte::parse(raw).ok()??.target() {
                Target::Vram(page) => Some((index, page.0)),
                Target::Ram(_) => None,
            })
        };
        for (index, page) in pages(entry.large, entry.large_entries()) {
            for step in 0..PER_LARGE {
                // Page numbers have 28 bits.
                put(index * PER_LARGE as usize + step as usize, page + step);
            }
        }
        for (index, page) in pages(entry.small, SMALL_ENTRIES) {
            put(index, page);
        }
    }
    all
}
