//! Shadows of a VM's page tables, which the physical GPU walks.
//!
//! A shadow belongs to a table of the guest, not to a directory entry: a thousand entries that refer to one table share
//! one shadow. When a VM's quota is used up, the space that uses most of it ends together with its channels, and the
//! others continue. The last entry of every directory belongs to the mediator ([`CONTROL`]): it maps the rings and
//! completion words of the space's channels.

use std::collections::HashMap;

use gf100::format::{
    Aperture, LARGE, LARGE_SHIFT, PAGE, Target, VramPage,
    directory::{self, ENTRIES, LARGE_ENTRIES, Pde, SMALL_ENTRIES, Table},
    pte::Pte,
};

use super::{
    memory::{Pages, PhysPage, Reserve},
    partition::{PER_LARGE, Partition},
    wire::{Directory, Run, Size},
};

/// The directory entry that no guest gets.
pub const CONTROL: u16 = (ENTRIES - 1) as u16;
/// Number of channels that share a pair of control pages.
pub const GROUP: usize = 16;
/// log2 of the divisor of a full table for the size of the control table: 128 entries.
const CONTROL_SHIFT: u8 = 3;
/// Maximum number of pairs per space: enough for more channels than exist.
const GROUPS: usize = (LARGE_ENTRIES >> CONTROL_SHIFT) / 2;

const DIRECTORY_PAGES: u32 = (directory::BYTES / PAGE) as u32;
/// Number of pages of a space without tables and channels.
const SPACE_PAGES: u32 = DIRECTORY_PAGES + 1;
/// What a new space requires.
pub const SPACE: &[Wanted] = &[Wanted::pages(DIRECTORY_PAGES), Wanted::pages(1)];

/// The front has violated the protocol, or has exhausted its quota.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refused {
    /// The number is already in use.
    #[error("{what} {number} exists already")]
    Taken {
        /// The type of the object.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// There is no such object.
    #[error("there is no {what} {number}")]
    Unknown {
        /// The type of the object.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// The object is still in use.
    #[error("{what} {number} is in use")]
    InUse {
        /// The type of the object.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// The entries are beyond the end of the table.
    #[error("entries {index} to {end} of a table that has {entries}")]
    Entries {
        /// The first entry.
        index: u32,
        /// The entry after the last.
        end: u32,
        /// Number of entries of the table.
        entries: u32,
    },
    /// The table has a different page size.
    #[error("table {0} has pages of another size")]
    Size(u32),
    /// A message has too many entries.
    #[error("more than {MOST_MAPPED} entries in one message")]
    Long,
    /// No memory is left for its shadows.
    #[error("its page tables need more than its {limit} pages of the GPU's memory")]
    Quota {
        /// The quota in pages.
        limit: u32,
    },
}

/// Maximum number of entries that a message may write: two tables.
const MOST_MAPPED: u32 = 2 * SMALL_ENTRIES as u32;

/// A request for consecutive pages.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Number of pages.
    pub count: u32,
    /// Alignment of the first page number.
    pub align: u32,
}

impl Wanted {
    const fn pages(count: u32) -> Self {
        Self { count, align: 1 }
    }
}

/// The pages of the mediator's memory that belong to a VM. They form one range, so no other VM has any between them.
///
/// The GPU may keep translations that were read from a page until it flushes them. A page that is reused before that,
/// for memory that engines write, would be a page table that the guest writes. So freed pages wait for a flush.
#[derive(Debug)]
pub struct Quota {
    first: PhysPage,
    pages: Pages,
    /// Pages that were freed since the last flush.
    freed: Vec<(PhysPage, u32)>,
    used: u32,
    limit: u32,
}

impl Quota {
    /// Creates a quota of these pages, which have been allocated.
    pub fn new(first: PhysPage, limit: u32) -> Self {
        Self {
            first,
            pages: Pages::new(first.0, limit),
            freed: Vec::new(),
            used: 0,
            limit,
        }
    }

    /// Allocates zeroed pages.
    pub fn take(
        &mut self,
        reserve: &mut Reserve,
        count: u32,
        align: u32,
    ) -> Result<PhysPage, Refused> {
        let refused = Refused::Quota { limit: self.limit };
        let page = PhysPage(self.pages.take(count, align).ok_or(refused)?);
        reserve.clear(page, count);
        self.used += count;
        Ok(page)
    }

    /// Whether all of these requests can be satisfied, each with consecutive, aligned pages. Free pages may be
    /// fragmented.
    pub fn fits(&mut self, wanted: &[Wanted]) -> bool {
        let mut taken = Vec::with_capacity(wanted.len());
        for one in wanted {
            match self.pages.take(one.count, one.align) {
                Some(first) => taken.push((first, one.count)),
                None => break,
            }
        }
        let fits = taken.len() == wanted.len();
        for (first, count) in taken {
            self.pages.give(first, count);
        }
        fits
    }

    /// The whole range: first page and number of pages.
    pub fn all(&self) -> (PhysPage, u32) {
        (self.first, self.limit)
    }

    /// Frees pages. They are allocated again only after a flush.
    pub fn give(&mut self, first: PhysPage, count: u32) {
        self.freed.push((first, count));
        self.used -= count;
    }

    /// Whether freed pages wait for a flush.
    pub fn awaits_flush(&self) -> bool {
        !self.freed.is_empty()
    }

    /// The GPU has flushed its translations since the last page was freed.
    pub fn flushed(&mut self) {
        for (first, count) in self.freed.drain(..) {
            self.pages.give(first.0, count);
        }
    }
}

/// What the shadow of a table requires.
pub fn table(size: Size) -> Wanted {
    Wanted::pages(pages(size))
}

/// Number of pages of a table's shadow.
fn pages(size: Size) -> u32 {
    let entries = match size {
        Size::Small => SMALL_ENTRIES,
        Size::Large => LARGE_ENTRIES,
    };
    // At most 64.
    ((entries * 8) as u32).div_ceil(PAGE as u32)
}

struct Shadow {
    size: Size,
    /// `None` if there was no memory for it, or it was taken away: the table maps nothing, for good.
    at: Option<PhysPage>,
    /// Number of directory entries that refer to it.
    users: u32,
    /// The space whose quota it counts towards: the first one that referred to it.
    space: u32,
}

/// A pair of large pages: one for rings, which the channels' engines cannot write, and one for completion words, which
/// they can.
#[derive(Clone, Copy)]
struct Group {
    rings: PhysPage,
    words: PhysPage,
    used: u16,
}

/// The memory of a space: what the GPU walks, and the control memory of its channels.
struct Memory {
    directory: PhysPage,
    control: PhysPage,
    groups: Vec<Group>,
}

struct Space {
    /// `None` if it has ended, or there was no memory for it: no channel of it runs any more.
    memory: Option<Memory>,
    links: HashMap<u16, Directory>,
}

impl Memory {
    /// Number of pages that it has.
    fn pages(&self) -> u32 {
        // At most 64 groups.
        SPACE_PAGES + self.groups.len() as u32 * 2 * PER_LARGE
    }

    fn give(self, quota: &mut Quota) {
        for group in self.groups {
            quota.give(group.rings, PER_LARGE);
            quota.give(group.words, PER_LARGE);
        }
        quota.give(self.control, 1);
        quota.give(self.directory, DIRECTORY_PAGES);
    }
}

/// Location of a channel's control memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Slot {
    /// The space.
    pub space: u32,
    group: usize,
    index: usize,
    /// Physical address of two pages for the ring and what it points to.
    pub ring: u64,
    /// Virtual address of the ring.
    pub ring_va: u64,
    /// Physical address of the completion word.
    pub word: u64,
    /// Virtual address of the completion word.
    pub word_va: u64,
}

/// All shadows of a VM.
pub struct Spaces {
    tables: HashMap<u32, Shadow>,
    spaces: HashMap<u32, Space>,
    /// The VM's pages of the mediator's memory.
    pub quota: Quota,
    /// Number of refused entries. They map nothing.
    pub refused: u64,
}

fn virtual_address(group: usize, words: bool) -> u64 {
    let page = group as u64 * 2 + u64::from(words);
    (u64::from(CONTROL) << directory::SHIFT) + (page << LARGE_SHIFT)
}

impl Spaces {
    /// Creates an empty set with these pages.
    pub fn new(quota: Quota) -> Self {
        Self {
            tables: HashMap::new(),
            spaces: HashMap::new(),
            quota,
            refused: 0,
        }
    }

    /// Adds a table that maps nothing and counts towards the quota of a space. If there is no memory for it, it never
    /// maps anything.
    pub fn add_table(
        &mut self,
        reserve: &mut Reserve,
        number: u32,
        size: Size,
        space: u32,
    ) -> Result<(), Refused> {
        if self.tables.contains_key(&number) {
            let what = "table";
            return Err(Refused::Taken { what, number });
        }
        // A space that has ended gets no more memory.
        let lives = self.directory(space)?.is_some();
        let at = lives.then(|| self.quota.take(reserve, pages(size), 1));
        let shadow = Shadow {
            size,
            at: at.and_then(Result::ok),
            users: 0,
            space,
        };
        self.tables.insert(number, shadow);
        Ok(())
    }

    /// Chooses the space that must give way if `asker` wants more memory than is left: `asker` itself if it would
    /// exceed an equal share of all pages, otherwise the space that has the most. `None` if all have ended.
    pub fn victim(&self, asker: Option<u32>, wanted: &[Wanted]) -> Option<u32> {
        let used = self.used();
        let part = self.quota.limit / u32::try_from(used.len().max(1)).unwrap_or(u32::MAX);
        let wanted: u32 = wanted.iter().map(|wanted| wanted.count).sum();
        let exceeds = |space: &u32| used.get(space).is_some_and(|used| used + wanted > part);
        if let Some(asker) = asker.filter(exceeds) {
            return Some(asker);
        }
        // The one with the lowest number, if several use the same amount.
        let used = used.into_iter();
        let most = used.max_by_key(|(number, used)| (*used, !*number));
        most.map(|(number, _)| number)
    }

    /// Number of pages of each space that has not ended.
    fn used(&self) -> HashMap<u32, u32> {
        let spaces = self.spaces.iter();
        let spaces =
            spaces.filter_map(|(number, space)| Some((*number, space.memory.as_ref()?.pages())));
        let mut used: HashMap<u32, u32> = spaces.collect();
        for table in self.tables.values().filter(|table| table.at.is_some()) {
            if let Some(used) = used.get_mut(&table.space) {
                *used += pages(table.size);
            }
        }
        used
    }

    /// Ends a space and frees its memory, and that of its tables that no other space refers to. No channel of it may be
    /// running, and the GPU must flush its translations.
    pub fn end(&mut self, number: u32) {
        let Some(space) = self.spaces.get_mut(&number) else {
            return;
        };
        if let Some(memory) = space.memory.take() {
            memory.give(&mut self.quota);
        }
        for entry in std::mem::take(&mut space.links).into_values() {
            self.count(entry, false);
        }
        let ended = |space: u32| {
            let space = self.spaces.get(&space);
            space.is_none_or(|space| space.memory.is_none())
        };
        // Also tables of spaces that ended earlier, while this space still referred to them.
        let unused = |table: &&mut Shadow| table.users == 0 && ended(table.space);
        for table in self.tables.values_mut().filter(unused) {
            if let Some(at) = table.at.take() {
                self.quota.give(at, pages(table.size));
            }
        }
    }

    /// Whether a directory entry refers to a table that never maps anything.
    pub fn is_poor(&self, entry: Directory) -> bool {
        let tables = [entry.small, entry.large].into_iter().flatten();
        let mut tables = tables.filter_map(|number| self.tables.get(&number));
        tables.any(|table| table.at.is_none())
    }

    /// Removes a table that no directory refers to.
    pub fn remove_table(&mut self, number: u32) -> Result<(), Refused> {
        let what = "table";
        let table = self.tables.get(&number);
        let table = table.ok_or(Refused::Unknown { what, number })?;
        if table.users > 0 {
            return Err(Refused::InUse { what, number });
        }
        let (at, size) = (table.at, table.size);
        self.tables.remove(&number);
        if let Some(at) = at {
            self.quota.give(at, pages(size));
        }
        Ok(())
    }

    /// Writes entries of a table. Pages that do not belong completely to the VM are not mapped.
    pub fn map(
        &mut self,
        reserve: &Reserve,
        partition: &Partition,
        number: u32,
        runs: &[Run],
    ) -> Result<(), Refused> {
        let what = "table";
        let table = self.tables.get(&number);
        let table = table.ok_or(Refused::Unknown { what, number })?;
        let (entries, step) = match table.size {
            Size::Small => (SMALL_ENTRIES as u32, 1),
            Size::Large => (LARGE_ENTRIES as u32, PER_LARGE),
        };
        // At most 1,024 runs of 65,535.
        if runs.iter().map(|run| u32::from(run.count)).sum::<u32>() > MOST_MAPPED {
            return Err(Refused::Long);
        }
        for run in runs {
            let index = u32::from(run.index);
            let end = index + u32::from(run.count);
            if end > entries {
                return Err(Refused::Entries {
                    index,
                    end,
                    entries,
                });
            }
            for (nth, index) in (index..end).enumerate() {
                let entry = run.first.and_then(|first| {
                    // Less than 2^28 plus 2^16 times 32.
                    let number = match first {
                        Target::Vram(page) => page.0,
                        Target::Ram(page) => page.0,
                    } + nth as u32 * step;
                    let target = match first {
                        Target::Vram(_) => Target::Vram(VramPage(number)),
                        Target::Ram(_) => Target::Ram(gf100::format::Gfn(number)),
                    };
                    let entry = partition.entry(target, table.size, run.read_only, run.kind);
                    self.refused += u64::from(entry.is_none());
                    entry
                });
                if let Some(table) = table.at {
                    let at = table.address() + u64::from(index) * 8;
                    reserve.set64(at, entry.map_or(0, Pte::encode));
                }
            }
        }
        Ok(())
    }

    /// Adds a space that maps nothing of the guest. If there is no memory for it, it has ended immediately.
    pub fn add_space(&mut self, reserve: &mut Reserve, number: u32) -> Result<(), Refused> {
        if self.spaces.contains_key(&number) {
            let what = "space";
            return Err(Refused::Taken { what, number });
        }
        let space = Space {
            memory: self.space_memory(reserve),
            links: HashMap::new(),
        };
        self.spaces.insert(number, space);
        Ok(())
    }

    fn space_memory(&mut self, reserve: &mut Reserve) -> Option<Memory> {
        let directory = self.quota.take(reserve, DIRECTORY_PAGES, 1).ok()?;
        let Ok(control) = self.quota.take(reserve, 1, 1) else {
            self.quota.give(directory, DIRECTORY_PAGES);
            return None;
        };
        let entry = Pde {
            small: None,
            large: Some(Table {
                aperture: Aperture::Vram,
                number: control.0,
            }),
            large_shift: CONTROL_SHIFT,
        };
        let at = directory.address() + u64::from(CONTROL) * 8;
        reserve.set64(at, entry.encode());
        Some(Memory {
            directory,
            control,
            groups: Vec::new(),
        })
    }

    /// Removes a space that no channel is bound to.
    pub fn remove_space(&mut self, number: u32) -> Result<(), Refused> {
        let what = "space";
        let space = self.spaces.get(&number);
        let space = space.ok_or(Refused::Unknown { what, number })?;
        let mut groups = space.memory.iter().flat_map(|memory| &memory.groups);
        if groups.any(|group| group.used != 0) {
            return Err(Refused::InUse { what, number });
        }
        let Some(space) = self.spaces.remove(&number) else {
            return Ok(());
        };
        for entry in space.links.values() {
            self.count(*entry, false);
        }
        if let Some(memory) = space.memory {
            memory.give(&mut self.quota);
        }
        Ok(())
    }

    /// Updates the user counts of the tables in a directory entry.
    fn count(&mut self, entry: Directory, is_new: bool) {
        for number in [entry.small, entry.large].into_iter().flatten() {
            if let Some(table) = self.tables.get_mut(&number) {
                table.users = match is_new {
                    true => table.users + 1,
                    false => table.users.saturating_sub(1),
                };
            }
        }
    }

    fn shadow(&self, number: Option<u32>, size: Size) -> Result<Option<Table>, Refused> {
        let Some(number) = number else {
            return Ok(None);
        };
        let what = "table";
        let shadow = self.tables.get(&number);
        let shadow = shadow.ok_or(Refused::Unknown { what, number })?;
        if shadow.size != size {
            return Err(Refused::Size(number));
        }
        Ok(shadow.at.map(|at| Table {
            aperture: Aperture::Vram,
            number: at.0,
        }))
    }

    /// Writes a directory entry.
    pub fn link(
        &mut self,
        reserve: &Reserve,
        number: u32,
        index: u16,
        entry: Directory,
    ) -> Result<(), Refused> {
        let raw = Pde {
            small: self.shadow(entry.small, Size::Small)?,
            large: self.shadow(entry.large, Size::Large)?,
            large_shift: entry.large_shift,
        };
        let what = "space";
        let space = self.spaces.get_mut(&number);
        let space = space.ok_or(Refused::Unknown { what, number })?;
        if index >= CONTROL {
            self.refused += 1;
            return Ok(());
        }
        let Some(memory) = &space.memory else {
            return Ok(());
        };
        let at = memory.directory.address() + u64::from(index) * 8;
        let old = space.links.insert(index, entry);
        reserve.set64(at, raw.encode());
        self.count(entry, true);
        if let Some(old) = old {
            self.count(old, false);
        }
        Ok(())
    }

    /// The directory of a space; `None` if it has ended.
    pub fn directory(&self, number: u32) -> Result<Option<PhysPage>, Refused> {
        let what = "space";
        let space = self.spaces.get(&number);
        let space = space.ok_or(Refused::Unknown { what, number })?;
        Ok(space.memory.as_ref().map(|memory| memory.directory))
    }

    /// What the control memory for another channel of a space requires.
    pub fn slot(&self, number: u32) -> &'static [Wanted] {
        const LARGE_PAGE: Wanted = Wanted {
            count: PER_LARGE,
            align: PER_LARGE,
        };
        let memory = self.spaces.get(&number).and_then(|its| its.memory.as_ref());
        let mut groups = memory.iter().flat_map(|memory| &memory.groups);
        match groups.any(|group| group.used != u16::MAX) {
            true => &[],
            false => &[LARGE_PAGE, LARGE_PAGE],
        }
    }

    /// Allocates control memory for a channel of a space.
    pub fn take_slot(&mut self, reserve: &mut Reserve, number: u32) -> Result<Slot, Refused> {
        let what = "space";
        let space = self.spaces.get_mut(&number);
        let space = space.and_then(|space| space.memory.as_mut());
        let space = space.ok_or(Refused::Unknown { what, number })?;
        let free = space.groups.iter().position(|group| group.used != u16::MAX);
        let at = match free {
            Some(at) => at,
            None if space.groups.len() >= GROUPS => {
                return Err(Refused::InUse { what, number });
            }
            None => {
                let rings = self.quota.take(reserve, PER_LARGE, PER_LARGE)?;
                let words = match self.quota.take(reserve, PER_LARGE, PER_LARGE) {
                    Ok(words) => words,
                    Err(refused) => {
                        self.quota.give(rings, PER_LARGE);
                        return Err(refused);
                    }
                };
                let at = space.groups.len();
                for (page, words_page) in [(rings, false), (words, true)] {
                    let entry = Pte {
                        read_only: !words_page,
                        ..Pte::linear(Target::Vram(page.vram()))
                    };
                    let index = at as u64 * 2 + u64::from(words_page);
                    reserve.set64(space.control.address() + index * 8, entry.encode());
                }
                space.groups.push(Group {
                    rings,
                    words,
                    used: 0,
                });
                at
            }
        };
        let group = &mut space.groups[at];
        // Less than 16, since not all are used.
        let index = group.used.trailing_ones() as usize;
        group.used |= 1 << index;
        let (ring, word) = (index as u64 * 2 * PAGE, index as u64 * 16);
        let slot = Slot {
            space: number,
            group: at,
            index,
            ring: group.rings.address() + ring,
            ring_va: virtual_address(at, false) + ring,
            word: group.words.address() + word,
            word_va: virtual_address(at, true) + word,
        };
        debug_assert!(ring + 2 * PAGE <= LARGE);
        for at in (0..2 * PAGE).step_by(8) {
            reserve.set64(slot.ring + at, 0);
        }
        reserve.set64(slot.word, 0);
        Ok(slot)
    }

    /// Frees a channel's control memory.
    pub fn give_slot(&mut self, slot: Slot) {
        if let Some(space) = self.spaces.get_mut(&slot.space)
            && let Some(memory) = &mut space.memory
            && let Some(group) = memory.groups.get_mut(slot.group)
        {
            group.used &= !(1 << slot.index);
        }
    }
}
