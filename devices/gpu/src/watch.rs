//! Detects which pages of VRAM with page tables may have changed.
//!
//! Code that keeps a copy of such a page adds it here. Before the copy is compared,
//! [`Watch::refresh`] determines what may have been written, by
//! - the guest, through BARs: KVM's log of their pages, in which the pages that show a watched page
//!   are armed; a write to an armed page causes no exit to this process;
//! - this process, which performs trapped accesses and reports channels' progress
//!   ([`Vram::touch`]);
//! - the GPU: a page that it may write through any table that was sent to the mediator always
//!   counts as written.
//!
//! A page is armed before it is read, so that writes meanwhile are found next time. Isolation does
//! not depend on this, because the mediator validates everything. Only the visibility of a guest's
//! own changes to its own channels depends on it.

use gf100::format::{PAGE, pte::Pte};
use gpu_mediator::gpu::wire::Size;

use super::{aperture::Aperture, directory::PER_LARGE, memory::Vram};

/// Counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Number of reads of the logs.
    pub refreshes: u64,
    /// Number of times that a watched page was found written.
    pub written: u64,
}

/// A point in time: see [`Watch::changed_since`].
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Moment(u64);

/// The watched pages of a partition.
pub struct Watch {
    /// Number of tables that each page is part of.
    users: Vec<u32>,
    /// One bit per page with users.
    watched: Vec<u64>,
    /// Number of entries through which the GPU may write each page.
    writers: Vec<u32>,
    /// One bit per page with writers.
    writable: Vec<u64>,
    /// When each page was last found written.
    written: Vec<Moment>,
    now: Moment,
    /// Changes whenever the set of watched pages does.
    edition: u64,
    /// Without logs: every page always counts as written.
    scans: bool,
    /// Counters.
    pub counts: Counts,
}

impl Watch {
    /// Watches no page of a partition of `vram` bytes yet. With `scans`, all pages count as
    /// written.
    pub fn new(vram: u64, scans: bool) -> Self {
        // The partition is mapped, so this fits a usize.
        let pages = (vram / PAGE) as usize;
        let words = pages.div_ceil(64);
        Self {
            users: vec![0; pages],
            watched: vec![0; words],
            writers: vec![0; pages],
            writable: vec![0; words],
            written: vec![Moment::default(); pages],
            now: Moment::default(),
            edition: 1,
            scans,
            counts: Counts::default(),
        }
    }

    /// Adds a table that begins at page `first` and has `bytes` bytes; both are within VRAM.
    pub fn add(&mut self, first: u32, bytes: usize) {
        for page in pages(first, bytes) {
            if let Some(users) = self.users.get_mut(page) {
                *users += 1;
                if *users == 1 {
                    self.watched[page / 64] |= 1 << (page % 64);
                    self.edition += 1;
                }
            }
        }
    }

    /// Removes a table.
    pub fn remove(&mut self, first: u32, bytes: usize) {
        for page in pages(first, bytes) {
            if let Some(users) = self.users.get_mut(page) {
                *users = users.saturating_sub(1);
                if *users == 0 {
                    self.watched[page / 64] &= !(1 << (page % 64));
                    self.edition += 1;
                }
            }
        }
    }

    /// Records that a table entry sent to the mediator has replaced another one.
    pub fn told(&mut self, old: u64, new: u64, size: Size, vram: &Vram) {
        for page in self.reaches(new, size) {
            self.writers[page] += 1;
            self.writable[page / 64] |= 1 << (page % 64);
        }
        for page in self.reaches(old, size) {
            self.writers[page] = self.writers[page].saturating_sub(1);
            if self.writers[page] == 0 {
                self.writable[page / 64] &= !(1 << (page % 64));
                // It may have been written until now.
                vram.touch(page as u32);
            }
        }
    }

    /// Records that no table entry is known to the mediator any more.
    pub fn forget_writers(&mut self, vram: &Vram) {
        for (page, writers) in (0..).zip(&mut self.writers) {
            if std::mem::take(writers) > 0 {
                // It may have been written until now.
                vram.touch(page);
            }
        }
        self.writable.fill(0);
    }

    /// The pages of VRAM that the GPU may write through an entry.
    fn reaches(&self, raw: u64, size: Size) -> std::ops::Range<usize> {
        let entry = Pte::parse(raw).ok().flatten();
        let entry = entry.filter(|entry| !entry.read_only);
        let Some(gf100::format::Target::Vram(first)) = entry.map(Pte::target) else {
            return 0..0;
        };
        let count = match size {
            Size::Small => 1,
            Size::Large => PER_LARGE as usize,
        };
        let end = self.users.len();
        let first = first.0 as usize;
        first.min(end)..(first + count).min(end)
    }

    /// Reads the logs of all apertures through which the guest can write, and the touched pages;
    /// arms the pages that were written.
    pub fn refresh<'a>(&mut self, shown: impl Iterator<Item = &'a mut Aperture>, vram: &Vram) {
        self.counts.refreshes += 1;
        self.now.0 += 1;
        for nth in 0..self.watched.len() {
            let watched = self.watched[nth];
            if watched == 0 {
                continue;
            }
            let touched = vram.take_touched(nth, watched);
            let bits = match self.scans {
                true => watched,
                false => touched | watched & self.writable[nth],
            };
            self.mark(nth, bits);
        }
        if self.scans {
            return;
        }
        for aperture in shown {
            let found = aperture.written(self.edition, |page| self.is_watched(page));
            for page in found {
                self.mark(page as usize / 64, 1 << (page % 64));
            }
        }
    }

    fn mark(&mut self, nth: usize, mut bits: u64) {
        while bits != 0 {
            let page = nth * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            if self.written[page] != self.now {
                self.written[page] = self.now;
                self.counts.written += 1;
            }
        }
    }

    /// Whether a page is part of a table.
    pub fn is_watched(&self, page: u32) -> bool {
        let word = self.watched.get(page as usize / 64);
        word.is_some_and(|word| word & 1 << (page % 64) != 0)
    }

    /// The time of the last refresh.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// The pages of a table, counted from its first, that were found written after `moment`.
    pub fn changed_since(&self, moment: Moment, first: u32, bytes: usize) -> Vec<usize> {
        let is_written = |page: usize| self.written.get(page).is_some_and(|at| *at > moment);
        let all = pages(first, bytes).enumerate();
        let changed = all.filter(|(_, page)| is_written(*page));
        changed.map(|(nth, _)| nth).collect()
    }
}

/// The pages of `bytes` bytes from a page on. Page numbers have 28 bits.
fn pages(first: u32, bytes: usize) -> std::ops::Range<usize> {
    let first = first as usize;
    first..first + bytes.div_ceil(PAGE as usize)
}
