//! The guest's page tables. They are walked once; after that, pages that were written
//! ([`super::watch`]) are compared with what was sent to the mediator.
//!
//! Isolation does not depend on this: the mediator validates everything. A guest that changes its
//! tables while they are read gets an undefined mapping.

use std::collections::{HashMap, HashSet, VecDeque, hash_map::Entry};

use gf100::format::{
    Aperture, LARGE, LARGE_SHIFT, PAGE, PAGE_SHIFT, Target, VA_BITS,
    directory::{self, ENTRIES, Pde, SMALL_ENTRIES, Table},
    instance::Space as Root,
    pte::Pte,
};
use gpu_mediator::gpu::wire::{Directory, MOST_RUNS, MOST_SPACES, MOST_TABLES, Request, Run, Size};

use super::{
    deadline::Deadline,
    directory::{PER_LARGE, usable},
    link::Link,
    memory::Vram,
    views::Views,
    watch::{Moment, Watch},
};

/// Number of entries per page of a table.
const PER_PAGE: usize = PAGE as usize / 8;

/// Identifies a table by its first page of VRAM and its page size.
type Key = (u32, Size);

/// A table known to the mediator.
struct Known {
    id: u32,
    /// Its entries in use, as they were last sent: the rest of a table of large pages may contain
    /// other data.
    told: Vec<u64>,
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
    /// Its directory with only those tables that are known; each entry counts as their user.
    linked: Vec<u64>,
    /// Its tables may have changed since they were compared.
    stale: bool,
    seen: Option<Moment>,
}

/// Size in bytes of what is kept of an address space.
const SPACE_BYTES: usize = 2 * directory::BYTES as usize;

/// The comparison of one address space with what was sent, as far as it has got.
struct Job {
    directory: u32,
    space: u32,
    /// Directory entries that have changed, and what was linked there before.
    changed: Vec<(u16, u64)>,
    /// Number of changed entries whose tables are known, and number of those that were linked.
    known: usize,
    linked: usize,
    /// All newly watched pages were armed before the last refresh.
    is_armed: bool,
    /// Tables that have not been compared yet; `None` until all of them are known.
    keys: Option<Vec<Key>>,
    current: Option<Comparison>,
    /// Tables that a directory entry no longer refers to.
    unused: Vec<Key>,
}

/// The comparison of one table, which is linked in the job's address space.
struct Comparison {
    key: Key,
    /// Its pages that are left, last first.
    pages: Vec<usize>,
    /// Changes that have not been sent yet.
    runs: Vec<Run>,
}

/// What the mediator need not know any more, but still has to be undone here, in steps.
enum Leaving {
    Space {
        linked: Vec<u64>,
        left: usize,
    },
    Table {
        key: Key,
        id: u32,
        told: Vec<u64>,
        left: usize,
    },
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
    /// Number of tables that were left out because all tables together exceed VRAM.
    pub refused: u64,
}

/// All tables and address spaces known to the mediator, by their pages of VRAM.
///
/// Tables that do not overlap fit into VRAM, so what is kept of them is limited to its size. Work
/// is done in steps: see [`Deadline`].
pub struct Tables {
    tables: HashMap<Key, Known>,
    spaces: HashMap<u32, Told>,
    table_ids: Ids,
    space_ids: Ids,
    job: Option<Job>,
    leaving: VecDeque<Leaving>,
    /// Bytes that are kept of tables and directories, and their limit.
    kept: usize,
    most: usize,
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
    /// Knows no tables of a partition of `vram` bytes yet.
    pub fn new(vram: u64) -> Self {
        Self {
            tables: HashMap::new(),
            spaces: HashMap::new(),
            table_ids: Ids::default(),
            space_ids: Ids::default(),
            job: None,
            leaving: VecDeque::new(),
            kept: 0,
            // The partition is mapped, so this fits a usize.
            most: vram as usize,
            counts: Counts::default(),
        }
    }

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
        if end > vram.len() || self.kept + SPACE_BYTES > self.most {
            return None;
        }
        let id = self.space_ids.take(MOST_SPACES)?;
        link.send(&Request::Space { space: id });
        let told = Told {
            id,
            raw: vec![0; ENTRIES],
            linked: vec![0; ENTRIES],
            stale: true,
            seen: None,
        };
        self.kept += SPACE_BYTES;
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
    /// those pages of its tables are read that were written since then. Returns whether all of
    /// them were sent; otherwise it must be called again.
    pub fn sync(
        &mut self,
        directory: u32,
        views: &mut Views,
        vram: &Vram,
        link: &mut Link,
        until: Deadline,
    ) -> bool {
        loop {
            if !self.advance(views, vram, link, until) {
                return false;
            }
            let Some(space) = self.spaces.get_mut(&directory) else {
                return true;
            };
            if !std::mem::take(&mut space.stale) {
                return true;
            }
            let space = space.id;
            self.counts.syncs += 1;
            views.refresh(vram);
            let changed = self.read_directory(directory, &views.watch, vram);
            self.job = Some(Job {
                directory,
                space,
                changed,
                known: 0,
                linked: 0,
                is_armed: true,
                keys: None,
                current: None,
                unused: Vec::new(),
            });
        }
    }

    /// Continues the work that earlier calls have left. Returns whether nothing is left.
    pub fn advance(
        &mut self,
        views: &mut Views,
        vram: &Vram,
        link: &mut Link,
        until: Deadline,
    ) -> bool {
        // First what is to be forgotten: its numbers and memory are needed.
        while let Some(leaving) = self.leaving.pop_front() {
            self.leave(leaving, &mut views.watch, vram, link);
            if until.is_over() {
                break;
            }
        }
        if !self.leaving.is_empty() {
            return false;
        }
        while let Some(mut job) = self.job.take() {
            let goes_on = self.go_on(&mut job, views, vram, link);
            if goes_on {
                self.job = Some(job);
                if until.is_over() {
                    return false;
                }
            }
        }
        true
    }

    /// Does a bounded part of a job; false if it is finished.
    fn go_on(&mut self, job: &mut Job, views: &mut Views, vram: &Vram, link: &mut Link) -> bool {
        if let Some((index, _)) = job.changed.get(job.known) {
            job.is_armed &= !self.know(job.directory, job.space, *index, views, vram, link);
            job.known += 1;
            return true;
        }
        let Some(keys) = &mut job.keys else {
            if !job.is_armed {
                views.refresh(vram);
            }
            let space = self.spaces.get(&job.directory);
            let linked = space.iter().flat_map(|space| &space.linked);
            let keys: HashSet<Key> = linked
                .filter(|raw| **raw != 0)
                .flat_map(|raw| tables_of(Pde::parse(*raw)))
                .map(|(key, _)| key)
                .collect();
            job.keys = Some(keys.into_iter().collect());
            return true;
        };
        if job.current.is_none() {
            job.current = keys.pop().map(|key| Comparison {
                key,
                pages: self.changed(key, &views.watch),
                runs: Vec::new(),
            });
        }
        if let Some(current) = &mut job.current {
            if let Some(nth) = current.pages.pop() {
                self.compare(current, nth, &mut views.watch, vram);
            }
            let is_full = current.runs.len() + PER_PAGE > MOST_RUNS;
            if is_full || current.pages.is_empty() {
                self.send(current, link);
            }
            if current.pages.is_empty() {
                job.current = None;
            }
            return true;
        }
        if let Some((index, old)) = job.changed.get(job.linked) {
            self.link(
                job.directory,
                job.space,
                *index,
                *old,
                link,
                &mut job.unused,
            );
            job.linked += 1;
            return true;
        }
        if let Some(key) = job.unused.pop() {
            self.forget_table(key, &mut views.watch);
            return true;
        }
        false
    }

    /// The entries of a directory that have changed, and what was linked there.
    fn read_directory(&mut self, directory: u32, watch: &Watch, vram: &Vram) -> Vec<(u16, u64)> {
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
                    changed.push((index as u16, std::mem::take(&mut space.linked[index])));
                }
            }
        }
        changed
    }

    /// Makes the tables of a changed directory entry known to the mediator, if there is room for
    /// them. Returns whether pages were added to the watched ones.
    fn know(
        &mut self,
        directory: u32,
        space: u32,
        index: u16,
        views: &mut Views,
        vram: &Vram,
        link: &mut Link,
    ) -> bool {
        let index = usize::from(index);
        let raw = self.spaces.get(&directory).map(|space| space.raw[index]);
        let mut entry = usable(Pde::parse(raw.unwrap_or(0)), vram);
        let mut added = false;
        for (key, count) in tables_of(entry) {
            match self.know_table(space, key, count, &mut views.watch, link) {
                Some(is_new) => added |= is_new,
                None => {
                    self.counts.refused += 1;
                    match key.1 {
                        Size::Small => entry.small = None,
                        Size::Large => (entry.large, entry.large_shift) = (None, 0),
                    }
                }
            }
        }
        if let Some(space) = self.spaces.get_mut(&directory) {
            space.linked[index] = entry.encode();
        }
        added
    }

    /// Adds a user to a table with `count` entries, which becomes known to the mediator. Returns
    /// whether pages were added to the watched ones; `None` if there is no room.
    fn know_table(
        &mut self,
        space: u32,
        key: Key,
        count: usize,
        watch: &mut Watch,
        link: &mut Link,
    ) -> Option<bool> {
        let (page, size) = key;
        let before = self.tables.get(&key).map_or(0, |known| known.told.len());
        let more = count.saturating_sub(before) * 8;
        if self.kept + more > self.most {
            return None;
        }
        let known = match self.tables.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let table = self.table_ids.take(MOST_TABLES)?;
                link.send(&Request::Table { table, size, space });
                vacant.insert(Known {
                    id: table,
                    told: Vec::new(),
                    users: 0,
                    seen: None,
                })
            }
        };
        known.users += 1;
        if more == 0 {
            return Some(false);
        }
        watch.add(page, count * 8);
        watch.remove(page, before * 8);
        known.told.resize(count, 0);
        known.seen = None;
        self.kept += more;
        Some(true)
    }

    /// Sends a directory entry, which replaces `old`.
    fn link(
        &mut self,
        directory: u32,
        space: u32,
        index: u16,
        old: u64,
        link: &mut Link,
        unused: &mut Vec<Key>,
    ) {
        let linked = self.spaces.get(&directory);
        let linked = linked.map_or(0, |space| space.linked[usize::from(index)]);
        if old != linked {
            let entry = Pde::parse(linked);
            let number =
                |table: Option<Table>, size| Some(self.tables.get(&(table?.number, size))?.id);
            let entry = Directory {
                small: number(entry.small, Size::Small),
                large: number(entry.large, Size::Large),
                large_shift: entry.large_shift,
            };
            link.send(&Request::Link {
                space,
                index,
                entry,
            });
        }
        unused.extend(self.release(old));
    }

    /// Removes a directory entry from the users of its tables. Returns those that have no other.
    fn release(&mut self, linked: u64) -> impl Iterator<Item = Key> + use<> {
        let mut unused = [None; 2];
        for ((key, _), unused) in tables_of(Pde::parse(linked)).zip(&mut unused) {
            if let Some(known) = self.tables.get_mut(&key) {
                known.users = known.users.saturating_sub(1);
                *unused = (known.users == 0).then_some(key);
            }
        }
        unused.into_iter().flatten()
    }

    /// The pages of a table that may have changed, last first.
    fn changed(&mut self, key: Key, watch: &Watch) -> Vec<usize> {
        let Some(known) = self.tables.get_mut(&key) else {
            return Vec::new();
        };
        let bytes = known.told.len() * 8;
        let mut pages: Vec<usize> = match known.seen {
            Some(seen) => watch.changed_since(seen, key.0, bytes),
            None => {
                self.counts.walks += 1;
                (0..bytes.div_ceil(PAGE as usize)).collect()
            }
        };
        known.seen = Some(watch.now());
        pages.reverse();
        pages
    }

    /// Sends the changes that a comparison has found.
    fn send(&self, current: &mut Comparison, link: &mut Link) {
        let runs = std::mem::take(&mut current.runs);
        if let Some(known) = self.tables.get(&current.key).filter(|_| !runs.is_empty()) {
            let table = known.id;
            link.send(&Request::Map { table, runs });
        }
    }

    /// Compares a page of a table.
    fn compare(&mut self, current: &mut Comparison, nth: usize, watch: &mut Watch, vram: &Vram) {
        let Some(known) = self.tables.get_mut(&current.key) else {
            return;
        };
        let (page, size) = current.key;
        let runs = &mut current.runs;
        let step = match size {
            Size::Small => 1,
            Size::Large => PER_LARGE,
        };
        let first = nth * PER_PAGE;
        let count = PER_PAGE.min(known.told.len().saturating_sub(first));
        let at = (u64::from(page) + nth as u64) * PAGE;
        let Some(words) = vram.words(at, count) else {
            return;
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
                _ => runs.push(new),
            }
        }
    }

    /// Forgets a table if it has no users.
    fn forget_table(&mut self, key: Key, watch: &mut Watch) {
        let Entry::Occupied(known) = self.tables.entry(key) else {
            return;
        };
        if known.get().users > 0 {
            return;
        }
        let Known { id, told, .. } = known.remove();
        watch.remove(key.0, told.len() * 8);
        let left = told.len();
        self.leaving.push_back(Leaving::Table {
            key,
            id,
            told,
            left,
        });
    }

    /// Forgets a part of a table or directory, and puts back what is left of it.
    fn leave(&mut self, leaving: Leaving, watch: &mut Watch, vram: &Vram, link: &mut Link) {
        match leaving {
            Leaving::Space { linked, left } => {
                let next = left.saturating_sub(PER_PAGE);
                for raw in linked[next..left].iter().filter(|raw| **raw != 0) {
                    for key in self.release(*raw) {
                        self.forget_table(key, watch);
                    }
                }
                match next {
                    0 => self.kept -= SPACE_BYTES,
                    left => self.leaving.push_front(Leaving::Space { linked, left }),
                }
            }
            Leaving::Table {
                key,
                id,
                told,
                left,
            } => {
                if left == told.len() {
                    link.send(&Request::TableGone { table: id });
                }
                let next = left.saturating_sub(PER_PAGE);
                for raw in &told[next..left] {
                    watch.told(*raw, 0, key.1, vram);
                }
                match next {
                    0 => {
                        self.kept -= told.len() * 8;
                        self.table_ids.free.push(id);
                    }
                    left => self.leaving.push_front(Leaving::Table {
                        key,
                        id,
                        told,
                        left,
                    }),
                }
            }
        }
    }

    /// Whether work is left.
    pub fn is_behind(&self) -> bool {
        self.job.is_some() || !self.leaving.is_empty()
    }

    /// Handles the loss of the mediator, which knew all tables and address spaces.
    pub fn lose(&mut self, watch: &mut Watch, vram: &Vram) {
        for ((page, _), known) in &self.tables {
            watch.remove(*page, known.told.len() * 8);
        }
        for directory in self.spaces.keys() {
            watch.remove(*directory, directory::BYTES as usize);
        }
        watch.forget_writers(vram);
        let counts = self.counts;
        *self = Self {
            counts,
            ..Self::new(vram.len())
        };
    }

    /// Discards an address space to which no channel is bound. Its tables follow in steps.
    pub fn forget(&mut self, directory: u32, watch: &mut Watch, link: &mut Link) {
        let Some(space) = self.spaces.remove(&directory) else {
            return;
        };
        link.send(&Request::SpaceGone { space: space.id });
        self.space_ids.free.push(space.id);
        watch.remove(directory, directory::BYTES as usize);
        if let Some(job) = self.job.take_if(|job| job.directory == directory) {
            if let Some(mut current) = job.current {
                self.send(&mut current, link);
                // It is read again, as it was not compared completely.
                if let Some(known) = self.tables.get_mut(&current.key) {
                    known.seen = None;
                }
            }
            for (_, old) in job.changed.get(job.linked..).unwrap_or_default() {
                for key in self.release(*old) {
                    self.forget_table(key, watch);
                }
            }
            for key in job.unused {
                self.forget_table(key, watch);
            }
        }
        let (linked, left) = (space.linked, ENTRIES);
        self.leaving.push_back(Leaving::Space { linked, left });
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
