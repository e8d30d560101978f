//! Ranges of BARs that show pages of VRAM as memory of the guest, without exits.
//!
//! Each is an address range in this process, in which pages of the partition are mapped over
//! private zeroes. Pages that the guest's tables do not map show the zeroes. The log of the range
//! detects the guest's writes to watched pages ([`super::watch`]).

use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use base::{Access, Mapping as Memory};
use device_model::memory::{AddressSpace, GuestWrites, HostMemory, Mapping};
use gf100::format::PAGE;
use vm_memory::GuestAddress;

use super::memory::Vram;

/// Maximum number of pieces of VRAM in all ranges that share a budget: a process can have at most
/// 65,530 mappings, and there is a further one between two pieces.
const MOST_PIECES: usize = 16_000;

/// The pieces of VRAM in the ranges of all virtual GPUs of a process.
#[derive(Debug)]
pub struct Pieces(AtomicUsize);

impl Pieces {
    /// None yet.
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// The pieces of this process.
    pub fn of_process() -> &'static Self {
        static OF_PROCESS: Pieces = Pieces::new();
        &OF_PROCESS
    }

    /// Whether there may be another one. Ranges that ask at the same time may exceed the maximum by
    /// one each.
    fn has_room(&self) -> bool {
        self.0.load(Ordering::Relaxed) < MOST_PIECES
    }

    fn replace(&self, before: usize, after: usize) {
        self.0.fetch_add(after, Ordering::Relaxed);
        self.0.fetch_sub(before, Ordering::Relaxed);
    }
}

/// Number of pages per word of a log.
const WORD: usize = 64;

/// A part of the range that is mapped into the guest. The mapping is dropped before its log.
struct Placed {
    _mapping: Box<dyn Mapping>,
    /// `None` if the host supports no log: then its pages always count as written.
    log: Option<Box<dyn GuestWrites>>,
    /// The pages of the range that it covers.
    pages: Range<usize>,
    /// One bit per page, set if it shows a watched page.
    watched: Vec<u64>,
}

/// A range of a BAR.
pub struct Aperture {
    /// The guest's mappings; dropped before the memory.
    placed: Vec<Placed>,
    memory: Memory,
    /// The page of VRAM that each page shows.
    shown: Vec<Option<u32>>,
    /// Number of runs of consecutive pages in `shown`, and the budget that they count towards.
    pieces: usize,
    budget: &'static Pieces,
    /// Pages to which guest writes cause an exit.
    read_only: Range<usize>,
    address: Option<u64>,
    space: Arc<dyn AddressSpace>,
    /// Edition of the watched pages that `placed` reflects; 0 if none.
    edition: u64,
    /// All accesses of the guest are trapped.
    trapped: bool,
    /// Total number of pieces that were mapped.
    pub mapped: u64,
    /// Total number of pages that were armed.
    pub armed: u64,
}

impl Aperture {
    /// Creates a range of `len` bytes that shows nothing. With `trapped`, it is not mapped into the
    /// guest.
    pub fn new(
        len: u64,
        space: Arc<dyn AddressSpace>,
        trapped: bool,
        budget: &'static Pieces,
    ) -> io::Result<Self> {
        let bytes = usize::try_from(len).map_err(io::Error::other)?;
        Ok(Self {
            placed: Vec::new(),
            memory: Memory::anonymous(bytes, Access::ReadWrite)?,
            shown: vec![None; bytes / PAGE as usize],
            pieces: 0,
            budget,
            read_only: 0..0,
            address: None,
            space,
            edition: 0,
            trapped,
            mapped: 0,
            armed: 0,
        })
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.shown.len()
    }

    /// Maps the range into the guest at an address, or nowhere.
    pub fn place(&mut self, address: Option<u64>, vram: &Vram) -> io::Result<()> {
        if !self.placed.is_empty() {
            self.placed.clear();
            // Their logs are gone, so they count as written.
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
                // The guest's writes there are trapped, so this process performs them.
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

    /// Makes guest writes to these pages cause exits from now on; reads do not.
    pub fn trap_writes(&mut self, pages: Range<usize>, vram: &Vram) -> io::Result<()> {
        let end = pages.end.min(self.shown.len());
        let pages = pages.start.min(end)..end;
        if pages == self.read_only {
            return Ok(());
        }
        self.read_only = pages;
        self.place(self.address, vram)
    }

    /// The page of VRAM that is shown at `offset`.
    pub fn at(&self, offset: u64) -> Option<u32> {
        let page = usize::try_from(offset / PAGE).ok()?;
        self.shown.get(page).copied().flatten()
    }

    /// The watched pages that the guest may have written since the last call; arms each of them.
    /// `edition` changes whenever the set of watched pages does.
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

    /// Shows these pages in the range, from its page `first` on; each must be within VRAM. Returns
    /// how many are done when `is_over` says that others wait.
    pub fn show(
        &mut self,
        first: usize,
        wanted: &[Option<u32>],
        vram: &Vram,
        is_watched: impl Fn(u32) -> bool,
        is_over: impl Fn() -> bool,
    ) -> io::Result<usize> {
        let count = wanted.len().min(self.shown.len().saturating_sub(first));
        let mut index = 0;
        while index < count {
            let page = wanted[index];
            let len = (1..count - index)
                .find(|step| wanted[index + step] != follower(page, *step))
                .unwrap_or(count - index);
            let is_changed =
                self.show_piece(first + index..first + index + len, page, vram, &is_watched)?;
            index += len;
            if is_changed && is_over() {
                return Ok(index);
            }
        }
        Ok(wanted.len())
    }

    /// Shows consecutive pages from `first`, or nothing. Pages that are already shown are not
    /// touched. Returns whether there were others.
    fn show_piece(
        &mut self,
        pages: Range<usize>,
        first: Option<u32>,
        vram: &Vram,
        is_watched: impl Fn(u32) -> bool,
    ) -> io::Result<bool> {
        let first = first.filter(|_| self.budget.has_room());
        let differs = |nth: &usize| self.shown[pages.start + nth] != follower(first, *nth);
        let Some(from) = (0..pages.len()).find(differs) else {
            return Ok(false);
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
                // The guest may have written it until now, and the log no longer belongs to this
                // page.
                vram.touch(page);
            }
            self.shown[index] = follower(first, index - pages.start);
            self.set_watched(index, self.shown[index].is_some_and(&is_watched));
        }
        let after = self.starts(changed.start..changed.end + 1);
        self.pieces = self.pieces + after - before;
        self.budget.replace(before, after);
        Ok(true)
    }

    /// Number of pieces that begin in a range of pages.
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

impl Drop for Aperture {
    fn drop(&mut self) {
        self.budget.replace(self.pieces, 0);
    }
}

/// The page of VRAM that is `step` pages after `first`.
fn follower(first: Option<u32>, step: usize) -> Option<u32> {
    // Pages within VRAM have 28 bits, and ranges have 2^15 pages.
    first.map(|first| first + step as u32)
}

/// Arms the pages that are set in `written`, and returns their number. If the host refuses, they
/// also count as written next time.
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
