//! Ranges of BARs that show pages of VRAM: memory of the guest, without exits.
//!
//! Each is one range of addresses in this process, in which pages of the partition are mapped over
//! private zeroes. Pages that the guest's tables do not map show the zeroes. The guest's writes to
//! pages that are watched are found in the log of the range ([`super::watch`]).

use std::{io, ops::Range, sync::Arc};

use base::{Access, Mapping as Memory};
use device_model::memory::{AddressSpace, GuestWrites, HostMemory, Mapping};
use gf100::format::PAGE;
use vm_memory::GuestAddress;

use super::memory::Vram;

/// Pieces of VRAM that one range may show, at most: a process may have 65,530 mappings in all, and
/// there is another one between two pieces.
const MOST_PIECES: usize = 20_000;

/// Pages in a word of a log.
const WORD: usize = 64;

/// A part of the range that the guest sees. The mapping goes before its log does.
struct Placed {
    _mapping: Box<dyn Mapping>,
    /// None if the host keeps no log: its pages count as written always.
    log: Option<Box<dyn GuestWrites>>,
    /// Pages of the range.
    pages: Range<usize>,
    /// A bit per page that shows a watched page.
    watched: Vec<u64>,
}

/// A range of a BAR.
pub struct Aperture {
    /// The guest's view goes before the memory does.
    placed: Vec<Placed>,
    memory: Memory,
    /// Pages of VRAM by page.
    shown: Vec<Option<u32>>,
    /// Runs of consecutive pages among them.
    pieces: usize,
    /// Pages that the guest cannot write without an exit.
    read_only: Range<usize>,
    address: Option<u64>,
    space: Arc<dyn AddressSpace>,
    /// Of the watched pages that `placed` knows; 0 if it knows none.
    edition: u64,
    /// The guest's accesses are trapped, all of them.
    trapped: bool,
    /// Pieces that were mapped, in all.
    pub mapped: u64,
    /// Pages that were armed, in all.
    pub armed: u64,
}

impl Aperture {
    /// A range of so many bytes, which shows nothing. A trapped one is no memory for the guest.
    pub fn new(len: u64, space: Arc<dyn AddressSpace>, trapped: bool) -> io::Result<Self> {
        let bytes = usize::try_from(len).map_err(io::Error::other)?;
        Ok(Self {
            placed: Vec::new(),
            memory: Memory::anonymous(bytes, Access::ReadWrite)?,
            shown: vec![None; bytes / PAGE as usize],
            pieces: 0,
            read_only: 0..0,
            address: None,
            space,
            edition: 0,
            trapped,
            mapped: 0,
            armed: 0,
        })
    }

    /// Pages.
    pub fn pages(&self) -> usize {
        self.shown.len()
    }

    /// The guest sees the range at an address from now on, or nowhere.
    pub fn place(&mut self, address: Option<u64>, vram: &Vram) -> io::Result<()> {
        if !self.placed.is_empty() {
            self.placed.clear();
            // Their logs are gone.
            self.shown
                .iter()
                .flatten()
                .for_each(|page| vram.touch(*page));
        }
        self.edition = 0;
        self.address = address;
        let Some(address) = address.filter(|_| !self.trapped) else {
            return Ok(());
        };
        let end = self.shown.len();
        let middle = self.read_only.clone();
        for (pages, read_only) in [
            (0..middle.start, false),
            (middle.clone(), true),
            (middle.end..end, false),
        ] {
            if pages.is_empty() {
                continue;
            }
            let at = pages.start * PAGE as usize;
            let memory = HostMemory {
                address: self.memory.start().wrapping_add(at),
                len: pages.len() as u64 * PAGE,
                read_only,
            };
            let guest = GuestAddress(address + at as u64);
            let mapping = self.space.map(memory, PAGE, Some(guest))?;
            if read_only {
                // What is written there is written by this process.
                self.placed.push(Placed {
                    _mapping: mapping,
                    log: None,
                    watched: Vec::new(),
                    pages,
                });
                continue;
            }
            self.placed.push(Placed {
                log: mapping.watch().ok(),
                _mapping: mapping,
                watched: vec![0; pages.len().div_ceil(WORD)],
                pages,
            });
        }
        Ok(())
    }

    /// The guest's writes to these pages come as exits from now on; reads do not.
    pub fn trap_writes(&mut self, pages: Range<usize>, vram: &Vram) -> io::Result<()> {
        let end = pages.end.min(self.shown.len());
        let pages = pages.start.min(end)..end;
        if pages == self.read_only {
            return Ok(());
        }
        self.read_only = pages;
        self.place(self.address, vram)
    }

    /// The page of VRAM that is shown at an offset.
    pub fn at(&self, offset: u64) -> Option<u32> {
        let page = usize::try_from(offset / PAGE).ok()?;
        self.shown.get(page).copied().flatten()
    }

    /// Watched pages that the guest may have written since the last call, each of which is armed.
    /// `edition` changes with the pages that are watched.
    pub fn written(&mut self, edition: u64, is_watched: impl Fn(u32) -> bool) -> Vec<u32> {
        let is_known = self.edition == edition;
        self.edition = edition;
        let mut found = Vec::new();
        for placed in &mut self.placed {
            if placed.watched.is_empty() {
                continue;
            }
            if !is_known {
                let shown = &self.shown[placed.pages.clone()];
                for (word, pages) in placed.watched.iter_mut().zip(shown.chunks(WORD)) {
                    let bit = |(nth, page): (usize, &Option<u32>)| {
                        u64::from(page.is_some_and(&is_watched)) << nth
                    };
                    *word = pages.iter().enumerate().map(bit).sum();
                }
            }
            let log = placed.log.as_ref().and_then(|log| log.read().ok());
            let mut written = placed.watched.clone();
            if let Some(log) = &log {
                for (word, bits) in written.iter_mut().zip(log) {
                    *word &= bits;
                }
            }
            for (nth, mut bits) in written.iter().copied().enumerate() {
                while bits != 0 {
                    let at = placed.pages.start + nth * WORD + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    found.extend(self.shown.get(at).copied().flatten());
                }
            }
            if log.is_some() {
                self.armed += arm(placed, &mut written);
            }
        }
        found
    }

    /// Shows these pages from page `first` of the range on; each is within VRAM.
    pub fn show(
        &mut self,
        first: usize,
        wanted: &[Option<u32>],
        vram: &Vram,
        is_watched: impl Fn(u32) -> bool,
    ) -> io::Result<()> {
        let count = wanted.len().min(self.shown.len().saturating_sub(first));
        let mut index = 0;
        while index < count {
            let page = wanted[index];
            let len = (1..count - index)
                .find(|step| wanted[index + step] != follower(page, *step))
                .unwrap_or(count - index);
            self.show_piece(first + index..first + index + len, page, vram, &is_watched)?;
            index += len;
        }
        Ok(())
    }

    /// Shows consecutive pages from `first`, or nothing. What is shown already is left as it is.
    fn show_piece(
        &mut self,
        pages: Range<usize>,
        first: Option<u32>,
        vram: &Vram,
        is_watched: impl Fn(u32) -> bool,
    ) -> io::Result<()> {
        let first = first.filter(|_| self.pieces < MOST_PIECES);
        let differs = |nth: &usize| self.shown[pages.start + nth] != follower(first, *nth);
        let Some(from) = (0..pages.len()).find(differs) else {
            return Ok(());
        };
        let to = (from..pages.len()).rfind(differs).unwrap_or(from) + 1;
        let at = (pages.start + from) * PAGE as usize;
        let len = (to - from) * PAGE as usize;
        self.mapped += 1;
        match follower(first, from) {
            Some(page) => {
                let offset = u64::from(page) * PAGE;
                self.memory
                    .replace_from(at, vram.file(), offset, len, Access::ReadWrite)?;
            }
            None => self.memory.clear(at, len, Access::ReadWrite)?,
        }
        let changed = pages.start + from..pages.start + to;
        let before = self.starts(changed.start..changed.end + 1);
        for index in changed.clone() {
            if let Some(page) = self.shown[index] {
                // The guest may have written it up to now, and the log of this place is another's.
                vram.touch(page);
            }
            self.shown[index] = follower(first, index - pages.start);
            self.set_watched(index, self.shown[index].is_some_and(&is_watched));
        }
        let after = self.starts(changed.start..changed.end + 1);
        self.pieces = self.pieces + after - before;
        Ok(())
    }

    /// Pieces that begin in a range of pages.
    fn starts(&self, pages: Range<usize>) -> usize {
        let starts = |index: &usize| {
            let before = index.checked_sub(1).and_then(|before| self.shown[before]);
            self.shown[*index].is_some() && self.shown[*index] != follower(before, 1)
        };
        let end = pages.end.min(self.shown.len());
        (pages.start..end).filter(starts).count()
    }

    fn set_watched(&mut self, page: usize, watched: bool) {
        let placed = self
            .placed
            .iter_mut()
            .find(|placed| placed.pages.contains(&page));
        let Some(placed) = placed else { return };
        let nth = page - placed.pages.start;
        if let Some(word) = placed.watched.get_mut(nth / WORD) {
            *word = *word & !(1 << (nth % WORD)) | u64::from(watched) << (nth % WORD);
        }
    }
}

/// The page of VRAM that is so many pages behind one.
fn follower(first: Option<u32>, step: usize) -> Option<u32> {
    // Pages within VRAM have 28 bits, and ranges 2^15 pages.
    first.map(|first| first + step as u32)
}

/// Arms what is set in `written`; how many pages that are. If the host refuses, they count as written
/// next time too.
fn arm(placed: &Placed, written: &mut [u64]) -> u64 {
    let Some(log) = &placed.log else { return 0 };
    let mut armed = 0;
    let mut nth = 0;
    while nth < written.len() {
        let len = written[nth..].iter().take_while(|word| **word != 0).count();
        if len == 0 {
            nth += 1;
            continue;
        }
        let words = &mut written[nth..nth + len];
        if log.arm(nth as u64, words).is_ok() {
            armed += words
                .iter()
                .map(|word| u64::from(word.count_ones()))
                .sum::<u64>();
        }
        nth += len;
    }
    armed
}
