//! Which pages of VRAM with page tables may have changed.
//!
//! Whoever keeps a copy of such a page adds it here. Before the copy is compared, [`Watch::refresh`]
//! finds out what may have been written, by
//!
//! - the guest, through BARs: KVM's log of their pages, in which those that show a watched page are
//!   armed; a write to an armed page costs no exit of the process;
//! - this process, which does trapped accesses and tells channels' progress ([`Vram::touch`]);
//! - the GPU: a page that it may write by any table that it was told of counts as written always.
//!
//! A page is armed before it is read: what is written meanwhile is found next time. No isolation
//! relies on this: the mediator validates what it is told. What relies on it is that a guest's own
//! channels see the guest's own changes.

use gf100::format::{PAGE, pte::Pte};
use gpu_mediator::gpu::wire::Size;

use super::{aperture::Aperture, memory::Vram, tables::PER_LARGE};

/// Counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Looks at the logs.
    pub refreshes: u64,
    /// Watched pages that were found written.
    pub written: u64,
}

/// A moment: see [`Watch::changed_since`].
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Moment(u64);

/// The watched pages of a partition.
pub struct Watch {
    /// How many tables a page is part of.
    users: Vec<u32>,
    /// A bit per page with users.
    watched: Vec<u64>,
    /// How many entries let the GPU write a page.
    writers: Vec<u32>,
    /// A bit per page with writers.
    writable: Vec<u64>,
    /// When a page was last found written.
    written: Vec<Moment>,
    now: Moment,
    /// Changes when other pages are watched.
    edition: u64,
    /// Without logs: every page counts as written always.
    scans: bool,
    /// Counters.
    pub counts: Counts,
}

impl Watch {
    /// No page of a partition of so many bytes. Whoever `scans` takes all for written.
    pub fn new(vram: u64, scans: bool) -> Self {
        // It is mapped.
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

    /// A table begins at page `first` and has `bytes`; both are within VRAM.
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

    /// It is no table any more.
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

    /// An entry of a table was told to the mediator in the place of another.
    pub fn told(&mut self, old: u64, new: u64, size: Size, vram: &Vram) {
        for page in self.reaches(new, size) {
            self.writers[page] += 1;
            self.writable[page / 64] |= 1 << (page % 64);
        }
        for page in self.reaches(old, size) {
            self.writers[page] = self.writers[page].saturating_sub(1);
            if self.writers[page] == 0 {
                self.writable[page / 64] &= !(1 << (page % 64));
                // It may have been written up to now.
                vram.touch(page as u32);
            }
        }
    }

    /// Pages of VRAM that an entry lets the GPU write.
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

    /// Looks at the logs of everything through which the guest can write, and at what was touched;
    /// arms what was written.
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

    /// The last refresh.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// The pages of a table, counted from its first, that were found written after a moment.
    pub fn changed_since(&self, moment: Moment, first: u32, bytes: usize) -> Vec<usize> {
        let is_written = |page: usize| self.written.get(page).is_some_and(|at| *at > moment);
        let all = pages(first, bytes).enumerate();
        let changed = all.filter(|(_, page)| is_written(*page));
        changed.map(|(nth, _)| nth).collect()
    }
}

/// Pages of bytes from a page on. Page numbers have 28 bits.
fn pages(first: u32, bytes: usize) -> std::ops::Range<usize> {
    let first = first as usize;
    first..first + bytes.div_ceil(PAGE as usize)
}
