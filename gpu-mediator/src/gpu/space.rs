//! Shadows of a VM's page tables: what the physical GPU walks.
//!
//! A shadow belongs to a table of the guest, not to an entry of a directory: a thousand entries that
//! name one table share one shadow. The last entry of every directory is the mediator's own
//! ([`CONTROL`]): rings and completion words of the space's channels.

use std::collections::HashMap;

use gf100::format::{
    Aperture, LARGE, LARGE_SHIFT, PAGE, Target, VramPage,
    directory::{self, ENTRIES, LARGE_ENTRIES, Pde, SMALL_ENTRIES, Table},
    pte::Pte,
};

use super::{
    memory::{PhysPage, Reserve},
    partition::{PER_LARGE, Partition},
    wire::{Directory, Run, Size},
};

/// The directory entry that no guest gets.
pub const CONTROL: u16 = (ENTRIES - 1) as u16;
/// Channels that share a pair of control pages.
pub const GROUP: usize = 16;
/// log2 of the part of a full table that the control table has: 128 entries.
const CONTROL_SHIFT: u8 = 3;
/// Pairs that a space can have: for more channels than there are.
const GROUPS: usize = (LARGE_ENTRIES >> CONTROL_SHIFT) / 2;

const DIRECTORY_PAGES: u32 = (directory::BYTES / PAGE) as u32;

/// A front has broken the rules, or has used what it may.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refused {
    /// A number that is taken.
    #[error("{what} {number} exists already")]
    Taken {
        /// What it is.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// A number of nothing.
    #[error("there is no {what} {number}")]
    Unknown {
        /// What it would be.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// Somebody needs it.
    #[error("{what} {number} is in use")]
    InUse {
        /// What it is.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// Entries beyond a table's end.
    #[error("entries {index} to {end} of a table that has {entries}")]
    Entries {
        /// The first.
        index: u32,
        /// Behind the last.
        end: u32,
        /// Entries of the table.
        entries: u32,
    },
    /// A table of the other size.
    #[error("table {0} has pages of another size")]
    Size(u32),
    /// Too many entries in one message.
    #[error("more than {MOST_MAPPED} entries in one message")]
    Long,
    /// No memory is left for its shadows.
    #[error("its page tables need more than its {limit} pages of the GPU's memory")]
    Quota {
        /// Its quota, in pages.
        limit: u32,
    },
}

/// Entries that a message may write, at most: two tables.
const MOST_MAPPED: u32 = 2 * SMALL_ENTRIES as u32;

/// Pages that a VM may take of the mediator's memory.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// In use.
    pub used: u32,
    /// At most.
    pub limit: u32,
}

impl Quota {
    /// Takes pages.
    pub fn take(
        &mut self,
        reserve: &mut Reserve,
        count: u32,
        align: u32,
    ) -> Result<PhysPage, Refused> {
        let refused = Refused::Quota { limit: self.limit };
        if self.limit - self.used < count {
            return Err(refused);
        }
        let page = reserve.take(count, align).ok_or(refused)?;
        self.used += count;
        Ok(page)
    }

    /// Gives them back.
    pub fn give(&mut self, reserve: &mut Reserve, first: PhysPage, count: u32) {
        reserve.give(first, count);
        self.used -= count;
    }
}

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
    at: PhysPage,
    /// Entries of directories that name it.
    users: u32,
}

/// A pair of large pages: rings, which the channels' engines cannot write, and completion words,
/// which they can.
#[derive(Clone, Copy)]
struct Group {
    rings: PhysPage,
    words: PhysPage,
    used: u16,
}

struct Space {
    directory: PhysPage,
    control: PhysPage,
    groups: Vec<Group>,
    links: HashMap<u16, Directory>,
}

/// Where a channel's control memory is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Slot {
    /// The space.
    pub space: u32,
    group: usize,
    index: usize,
    /// Two pages for the ring and what it points to, by physical address and by virtual one.
    pub ring: u64,
    /// Its virtual address.
    pub ring_va: u64,
    /// The completion word.
    pub word: u64,
    /// Its virtual address.
    pub word_va: u64,
}

/// All shadows of a VM.
pub struct Spaces {
    tables: HashMap<u32, Shadow>,
    spaces: HashMap<u32, Space>,
    /// Pages of the mediator's memory.
    pub quota: Quota,
    /// Entries that were refused: they map nothing.
    pub refused: u64,
}

fn virtual_address(group: usize, words: bool) -> u64 {
    let page = group as u64 * 2 + u64::from(words);
    (u64::from(CONTROL) << directory::SHIFT) + (page << LARGE_SHIFT)
}

impl Spaces {
    /// Of a VM that may take so many pages for them.
    pub fn new(limit: u32) -> Self {
        Self {
            tables: HashMap::new(),
            spaces: HashMap::new(),
            quota: Quota { used: 0, limit },
            refused: 0,
        }
    }

    /// Adds a table that maps nothing.
    pub fn add_table(
        &mut self,
        reserve: &mut Reserve,
        number: u32,
        size: Size,
    ) -> Result<(), Refused> {
        if self.tables.contains_key(&number) {
            let what = "table";
            return Err(Refused::Taken { what, number });
        }
        let at = self.quota.take(reserve, pages(size), 1)?;
        let users = 0;
        self.tables.insert(number, Shadow { size, at, users });
        Ok(())
    }

    /// Removes a table that no directory names.
    pub fn remove_table(&mut self, reserve: &mut Reserve, number: u32) -> Result<(), Refused> {
        let what = "table";
        let table = self.tables.get(&number);
        let table = table.ok_or(Refused::Unknown { what, number })?;
        if table.users > 0 {
            return Err(Refused::InUse { what, number });
        }
        let (at, size) = (table.at, table.size);
        self.tables.remove(&number);
        self.quota.give(reserve, at, pages(size));
        Ok(())
    }

    /// Writes entries of a table. Pages that are not wholly the VM's own are not mapped.
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
                    // Below 2^28 and 2^16 times 32.
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
                let at = table.at.address() + u64::from(index) * 8;
                reserve.set64(at, entry.map_or(0, Pte::encode));
            }
        }
        Ok(())
    }

    /// Adds a space that maps nothing of the guest's.
    pub fn add_space(&mut self, reserve: &mut Reserve, number: u32) -> Result<(), Refused> {
        if self.spaces.contains_key(&number) {
            let what = "space";
            return Err(Refused::Taken { what, number });
        }
        let directory = self.quota.take(reserve, DIRECTORY_PAGES, 1)?;
        let control = match self.quota.take(reserve, 1, 1) {
            Ok(control) => control,
            Err(refused) => {
                self.quota.give(reserve, directory, DIRECTORY_PAGES);
                return Err(refused);
            }
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
        let space = Space {
            directory,
            control,
            groups: Vec::new(),
            links: HashMap::new(),
        };
        self.spaces.insert(number, space);
        Ok(())
    }

    /// Removes a space that no channel is bound to.
    pub fn remove_space(&mut self, reserve: &mut Reserve, number: u32) -> Result<(), Refused> {
        let what = "space";
        let space = self.spaces.get(&number);
        let space = space.ok_or(Refused::Unknown { what, number })?;
        if space.groups.iter().any(|group| group.used != 0) {
            return Err(Refused::InUse { what, number });
        }
        let Some(space) = self.spaces.remove(&number) else {
            return Ok(());
        };
        for entry in space.links.values() {
            self.count(*entry, false);
        }
        for group in space.groups {
            self.quota.give(reserve, group.rings, PER_LARGE);
            self.quota.give(reserve, group.words, PER_LARGE);
        }
        self.quota.give(reserve, space.control, 1);
        self.quota.give(reserve, space.directory, DIRECTORY_PAGES);
        Ok(())
    }

    /// Counts a directory's entry among its tables' users, or no longer.
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
        Ok(Some(Table {
            aperture: Aperture::Vram,
            number: shadow.at.0,
        }))
    }

    /// Writes an entry of a directory.
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
        let at = space.directory.address() + u64::from(index) * 8;
        let old = space.links.insert(index, entry);
        reserve.set64(at, raw.encode());
        self.count(entry, true);
        if let Some(old) = old {
            self.count(old, false);
        }
        Ok(())
    }

    /// The directory of a space.
    pub fn directory(&self, number: u32) -> Result<PhysPage, Refused> {
        let what = "space";
        let space = self.spaces.get(&number);
        let space = space.ok_or(Refused::Unknown { what, number })?;
        Ok(space.directory)
    }

    /// Control memory for a channel of a space.
    pub fn take_slot(&mut self, reserve: &mut Reserve, number: u32) -> Result<Slot, Refused> {
        let what = "space";
        let space = self.spaces.get_mut(&number);
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
                        self.quota.give(reserve, rings, PER_LARGE);
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
        // Below 16: not all are used.
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

    /// The channel does not need it any more.
    pub fn give_slot(&mut self, slot: Slot) {
        if let Some(space) = self.spaces.get_mut(&slot.space)
            && let Some(group) = space.groups.get_mut(slot.group)
        {
            group.used &= !(1 << slot.index);
        }
    }

    /// Gives all memory back.
    pub fn clear(&mut self, reserve: &mut Reserve) {
        for space in std::mem::take(&mut self.spaces).into_values() {
            for group in space.groups {
                self.quota.give(reserve, group.rings, PER_LARGE);
                self.quota.give(reserve, group.words, PER_LARGE);
            }
            self.quota.give(reserve, space.control, 1);
            self.quota.give(reserve, space.directory, DIRECTORY_PAGES);
        }
        for table in std::mem::take(&mut self.tables).into_values() {
            self.quota.give(reserve, table.at, pages(table.size));
        }
    }
}
