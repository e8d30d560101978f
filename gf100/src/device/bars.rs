//! What the CPU sees through BAR 1 and BAR 3: each shows an address space.
//!
//! Accesses to BAR 1 are translated one by one. Those to BAR 3 can be, too. But at start-up a driver clears and writes page
//! tables word by word, more than a million words (the first ones through the window in BAR 0), and each would be a
//! message from the client. So clients may map BAR 3 and the window as files. Pages of VRAM that they show are backed
//! by those files as long as they are shown, so both sides see the same bytes. This has two limits: a page that is
//! shown twice is coherent in only one place, the last one in BAR 3; and system memory is not shown. nouveau does
//! neither.

use std::{
    collections::{HashMap, HashSet},
    ffi::CStr,
    fs::File,
    io,
    ops::Range,
};

use log::warn;

use super::{
    mapping::{Mapping, memory_file},
    mmu::{BadAddress, Memory, PhysicalAddress},
    tlb::User,
};
use crate::format::{
    LARGE, PAGE, Target,
    directory::Table,
    instance::{BYTES, InstanceBlock, Space},
    pte::Pte,
};

/// Size of BAR 1 in bytes.
pub const BAR1_BYTES: u64 = 128 << 20;
/// Size of BAR 3 in bytes.
pub const BAR3_BYTES: u64 = 64 << 20;

const BAR3_PAGES: usize = (BAR3_BYTES / PAGE) as usize;
const PER_LARGE: usize = (LARGE / PAGE) as usize;

/// The address space that a BAR shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct View {
    space: Option<Space>,
}

impl View {
    /// Shows the address space of an instance block.
    pub fn bind(&mut self, instance: Option<Target>, memory: &Memory) {
        self.space = instance.and_then(|instance| {
            let mut block = [0; BYTES];
            memory
                .read(PhysicalAddress::of(instance), &mut block)
                .then(|| InstanceBlock::parse(&block))?
                .map(|block| block.space)
        });
    }

    /// The page directory of the space, if the BAR shows one.
    pub fn directory(&self) -> Option<Target> {
        self.space.map(Space::directory)
    }

    /// Reads at an offset; returns all ones where nothing is mapped.
    pub fn read(&self, memory: &Memory, at: u64, data: &mut [u8]) -> Result<(), BadAddress> {
        data.fill(0xff);
        let Some(space) = self.space else {
            return Ok(());
        };
        memory.read_at(User::Bar, space, at, data)
    }

    /// Writes at an offset; the write is dropped if the BAR shows nothing.
    pub fn write(&self, memory: &Memory, at: u64, data: &[u8]) -> Result<(), BadAddress> {
        match self.space {
            Some(space) => memory.write_at(User::Bar, space, at, data),
            None => Ok(()),
        }
    }
}

/// Size in bytes of the window in BAR 0.
pub const WINDOW_BYTES: u64 = 1 << 20;
/// Offset of the window in BAR 0.
pub const WINDOW_START: u64 = 0x70_0000;

/// A range of a BAR that is (part of) a file.
struct Surface {
    file: File,
    mapping: Mapping,
    /// Offset in the file, which is the same as in the BAR.
    start: u64,
    /// The page of VRAM that each page of the range shows.
    shown: Vec<Option<u32>>,
}

impl Surface {
    fn new(name: &CStr, start: u64, len: u64) -> io::Result<Self> {
        let file = memory_file(name, start + len)?;
        let mapping = Mapping::new(&file, start, len)?;
        Ok(Self {
            file,
            mapping,
            start,
            shown: vec![None; (len / PAGE) as usize],
        })
    }

    /// Gives pages that are no longer shown their own memory back, with the current contents of the BAR.
    fn hide(&self, wanted: &[Option<u32>], memory: &mut Memory) {
        for (first, range) in runs(&self.shown, |page| self.shown[page] != wanted[page]) {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            self.mapping.read(first as u64 * PAGE, &mut bytes);
            if let Err(error) = memory.vram.restore(&range) {
                warn!("pages of a BAR: {error}");
            }
            memory.vram.write(range.start, &bytes);
        }
    }

    fn show(&mut self, wanted: Vec<Option<u32>>, memory: &mut Memory) {
        for (first, range) in runs(&wanted, |page| self.shown[page] != wanted[page]) {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            memory.vram.read(range.start, &mut bytes);
            let at = first as u64 * PAGE;
            self.mapping.write(at, &bytes);
            if let Err(error) = memory.vram.show(&range, &self.file, self.start + at) {
                warn!("pages of a BAR: {error}");
            }
        }
        self.shown = wanted;
    }
}

/// BAR 3 and the window in BAR 0 as files.
pub struct Mapped {
    bar3: Surface,
    window: Surface,
    /// The last followed state: the bytes of the page tables, and the window's address in VRAM.
    tables: Tables,
    base: Option<u64>,
}

impl Mapped {
    /// Creates files that show nothing.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            bar3: Surface::new(c"gf100-bar3", 0, BAR3_BYTES)?,
            window: Surface::new(c"gf100-window", WINDOW_START, WINDOW_BYTES)?,
            tables: Tables::default(),
            base: None,
        })
    }

    /// The file that clients map for BAR 3.
    pub fn bar3_file(&self) -> &File {
        &self.bar3.file
    }

    /// The file that clients map for the window in BAR 0, at the window's offset in BAR 0.
    pub fn window_file(&self) -> &File {
        &self.window.file
    }

    /// Makes the files show what BAR 3's page tables map now, and VRAM from `base`.
    pub fn follow(&mut self, view: View, base: u64, memory: &mut Memory) {
        let tables = Tables::read(view.space, memory);
        if tables == self.tables && self.base == Some(base) {
            return;
        }
        let bar3 = tables.pages(memory);
        let elsewhere: HashSet<u32> = bar3.iter().flatten().copied().collect();
        let window: Vec<_> = (0..self.window.shown.len() as u64)
            .map(|step| base / PAGE + step)
            .map(|page| {
                let page = u32::try_from(page).ok()?;
                let is_there = u64::from(page) < memory.vram.len() / PAGE;
                (is_there && !elsewhere.contains(&page)).then_some(page)
            })
            .collect();
        self.bar3.hide(&bar3, memory);
        self.window.hide(&window, memory);
        self.bar3.show(bar3, memory);
        self.window.show(window, memory);
        if self.base != Some(base) {
            self.snapshot(base, memory);
        }
        self.tables = tables;
        self.base = Some(base);
    }

    /// Copies pages that BAR 3 also shows into the window, with their current contents.
    fn snapshot(&self, base: u64, memory: &Memory) {
        for (index, page) in self.window.shown.iter().enumerate() {
            let at = index as u64 * PAGE;
            let mut bytes = [0xff; PAGE as usize];
            if page.is_none() {
                memory.vram.read(base + at, &mut bytes);
                self.window.mapping.write(at, &bytes);
            }
        }
    }
}

/// Groups the chosen pages into ranges of VRAM that are contiguous in the BAR as well. Each comes with its first page
/// in the BAR.
fn runs(pages: &[Option<u32>], chosen: impl Fn(usize) -> bool) -> Vec<(usize, Range<u64>)> {
    let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
    let mut previous = None;
    for (index, page) in pages.iter().enumerate() {
        let page = page.filter(|_| chosen(index));
        let start = page.map(|page| u64::from(page) * PAGE);
        match (start, runs.last_mut()) {
            (Some(start), Some((_, range))) if previous == Some(start) => {
                range.end = start + PAGE;
            }
            (Some(start), _) => runs.push((index, start..start + PAGE)),
            (None, _) => {}
        }
        previous = start.map(|start| start + PAGE);
    }
    runs
}

/// The contents of BAR 3's page tables when they were last read.
#[derive(Default, Eq, PartialEq)]
struct Tables {
    limit: u64,
    small: Vec<u8>,
    large: Vec<u8>,
}

impl Tables {
    fn read(space: Option<Space>, memory: &Memory) -> Self {
        let Some((space, entry)) =
            space.and_then(|space| memory.directory_entry(space, 0).map(|entry| (space, entry)))
        else {
            return Self::default();
        };
        let table = |table: Option<Table>, count: usize| {
            let mut bytes = vec![0; count * 8];
            match table {
                Some(table) if memory.read(PhysicalAddress::of(table.target()), &mut bytes) => {
                    bytes
                }
                _ => Vec::new(),
            }
        };
        Self {
            limit: space.limit,
            small: table(entry.small, BAR3_PAGES),
            large: table(
                entry.large,
                entry.large_entries().min(BAR3_PAGES / PER_LARGE),
            ),
        }
    }

    /// The page of VRAM for each page of the BAR. If a page of VRAM is mapped twice, only its last place counts.
    fn pages(&self, memory: &Memory) -> Vec<Option<u32>> {
        let vram = memory.vram.len() / PAGE;
        let mut pages = vec![None; BAR3_PAGES];
        let mut places = HashMap::new();
        let mut put = |index: usize, page: u32| {
            let is_shown = index as u64 * PAGE <= self.limit && u64::from(page) < vram;
            if index < BAR3_PAGES && is_shown {
                if let Some(other) = places.insert(page, index) {
                    pages[other] = None;
                }
                pages[index] = Some(page);
            }
        };
        for (index, page) in entries(&self.large) {
            for step in 0..PER_LARGE {
                // Page numbers have 28 bits.
                put(index * PER_LARGE + step, page + step as u32);
            }
        }
        for (index, page) in entries(&self.small) {
            put(index, page);
        }
        pages
    }
}

/// The entries of a table that map VRAM: index and first page.
fn entries(table: &[u8]) -> impl Iterator<Item = (usize, u32)> {
    table
        .chunks_exact(8)
        .enumerate()
        .filter_map(|(index, chunk)| {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            match Pte::parse(u64::from_le_bytes(word)).ok()??.target() {
                Target::Vram(page) => Some((index, page.0)),
                Target::Ram(_) => None,
            }
        })
}
