//! The parts of VRAM that the guest sees: the address spaces that BAR 1 and BAR 3 show, and the
//! window in BAR 0.

use std::{collections::VecDeque, io, ops::Range, sync::Arc};

use device_model::memory::AddressSpace;
use gf100::format::{
    Aperture as Where, PAGE, Target,
    directory::{Pde, Table},
    instance::Space,
    pte::Pte,
};

use super::{
    aperture::{Aperture, Pieces},
    deadline::Deadline,
    directory::{PER_LARGE, usable},
    memory::Vram,
    watch::{Moment, Watch},
};

/// Size of BAR 1 in bytes.
pub const BAR1_BYTES: u64 = 128 << 20;
/// Size of BAR 3 in bytes.
pub const BAR3_BYTES: u64 = 64 << 20;
/// Size of the window in BAR 0 in bytes.
const WINDOW_BYTES: u64 = 1 << 20;
/// Number of entries per page of a table.
const PER_PAGE: usize = PAGE as usize / 8;
/// The first entry of a directory covers more than the size of a BAR.
const _: () = assert!(BAR1_BYTES <= 1 << gf100::format::directory::SHIFT);

/// A BAR that shows an address space.
struct Bar {
    root: Option<Space>,
    /// The only relevant entry of its directory, as last read.
    entry: Pde,
    seen: Moment,
    /// Pages that may have to show something else.
    left: VecDeque<Range<usize>>,
    aperture: Aperture,
}

/// Everything that the guest sees, and the watched pages.
pub struct Views {
    /// The pages that contain tables.
    pub watch: Watch,
    bars: [Bar; 2],
    /// The window in BAR 0.
    pub window: Aperture,
}

impl Bar {
    fn new(bytes: u64, space: Arc<dyn AddressSpace>, trapped: bool) -> io::Result<Self> {
        Ok(Self {
            root: None,
            entry: Pde::default(),
            seen: Moment::default(),
            left: VecDeque::new(),
            aperture: Aperture::new(bytes, space, trapped, Pieces::of_process())?,
        })
    }

    /// Its tables, with the number of relevant bytes.
    fn tables(&self) -> [Option<(Table, usize)>; 2] {
        let pages = self.aperture.pages();
        let large = self.entry.large_entries().min(pages / PER_LARGE as usize);
        [
            self.entry.small.map(|table| (table, pages * 8)),
            self.entry.large.map(|table| (table, large * 8)),
        ]
    }

    /// Reads the directory's entry again; true if it has changed.
    fn take_entry(&mut self, watch: &mut Watch, vram: &Vram) -> bool {
        let root = self.root.filter(|root| root.aperture == Where::Vram);
        let raw = root.and_then(|root| vram.word(u64::from(root.number) * PAGE));
        let entry = usable(Pde::parse(raw.unwrap_or(0)), vram);
        if entry == self.entry {
            return false;
        }
        for (table, bytes) in self.tables().into_iter().flatten() {
            watch.remove(table.number, bytes);
        }
        self.entry = entry;
        for (table, bytes) in self.tables().into_iter().flatten() {
            watch.add(table.number, bytes);
        }
        true
    }

    /// Pages of the BAR whose entries were written since they were last read.
    fn changed(&mut self, watch: &Watch) -> Vec<Range<usize>> {
        let since = std::mem::replace(&mut self.seen, watch.now());
        let mut ranges = Vec::new();
        for (place, per) in self.tables().into_iter().zip([1, PER_LARGE as usize]) {
            let Some((table, bytes)) = place else {
                continue;
            };
            for nth in watch.changed_since(since, table.number, bytes) {
                ranges.push(nth * PER_PAGE * per..(nth + 1) * PER_PAGE * per);
            }
        }
        ranges
    }

    /// The pages of VRAM to be shown in a range of pages.
    fn wanted(&self, range: Range<usize>, vram: &Vram) -> Vec<Option<u32>> {
        let mut all = vec![None; range.len()];
        let Some(root) = self.root else { return all };
        let count = (vram.len() / PAGE) as u32;
        let mut put = |index: usize, page: u32| {
            let is_within = page < count && index as u64 * PAGE <= root.limit;
            if let Some(shown) = index
                .checked_sub(range.start)
                .and_then(|at| all.get_mut(at))
            {
                *shown = is_within.then_some(page);
            }
        };
        let read = |table: Table, from: usize, to: usize| {
            let at = u64::from(table.number) * PAGE + from as u64 * 8;
            let words = vram.words(at, to.saturating_sub(from)).unwrap_or_default();
            (from..).zip(words)
        };
        let target = |raw| match Pte::parse(raw).ok().flatten()?.target() {
            Target::Vram(page) => Some(page.0),
            Target::Ram(_) => None,
        };
        let per = PER_LARGE as usize;
        let [small, large] = self.tables();
        if let Some((table, bytes)) = large {
            let to = range.end.div_ceil(per).min(bytes / 8);
            for (index, raw) in read(table, range.start / per, to) {
                let Some(first) = target(raw) else { continue };
                for step in 0..PER_LARGE {
                    // Page numbers have 28 bits.
                    put(index * per + step as usize, first + step);
                }
            }
        }
        if let Some((table, bytes)) = small {
            for (index, raw) in read(table, range.start, range.end.min(bytes / 8)) {
                if let Some(page) = target(raw) {
                    put(index, page);
                }
            }
        }
        all
    }
}

impl Views {
    /// Creates BARs and a window that show nothing. With `trapped`, every access is trapped; with
    /// `scans`, tables are compared regardless of what was written.
    pub fn new(
        vram: u64,
        space: &Arc<dyn AddressSpace>,
        trapped: bool,
        scans: bool,
    ) -> io::Result<Self> {
        let bar = |bytes| Bar::new(bytes, Arc::clone(space), trapped);
        Ok(Self {
            watch: Watch::new(vram, scans),
            bars: [bar(BAR1_BYTES)?, bar(BAR3_BYTES)?],
            window: Aperture::new(
                WINDOW_BYTES,
                Arc::clone(space),
                trapped,
                Pieces::of_process(),
            )?,
        })
    }

    /// The aperture of BAR 1 (index 0) or BAR 3 (index 1).
    pub fn bar(&mut self, index: usize) -> &mut Aperture {
        &mut self.bars[index].aperture
    }

    /// The page of VRAM at an offset in a BAR.
    pub fn at(&self, index: usize, offset: u64) -> Option<u32> {
        self.bars[index].aperture.at(offset)
    }

    /// The directory of the address space that a BAR shows.
    pub fn directory(&self, index: usize) -> Option<Target> {
        Some(self.bars[index].root?.directory())
    }

    /// All apertures, for the counters.
    pub fn apertures(&self) -> impl Iterator<Item = &Aperture> {
        let bars = self.bars.iter().map(|bar| &bar.aperture);
        bars.chain(std::iter::once(&self.window))
    }

    /// Determines which pages with tables may have been written.
    pub fn refresh(&mut self, vram: &Vram) {
        let bars = self.bars.iter_mut().map(|bar| &mut bar.aperture);
        let all = bars.chain(std::iter::once(&mut self.window));
        self.watch.refresh(all, vram);
    }

    /// Sets the address space that a BAR shows, if any. [`Self::advance`] shows it.
    pub fn set_root(&mut self, index: usize, root: Option<Space>, vram: &Vram) {
        self.bars[index].root = root;
        self.look(index, true, vram);
    }

    /// Finds out what a BAR's tables may have changed. [`Self::advance`] shows it.
    pub fn look_at(&mut self, index: usize, vram: &Vram) {
        self.look(index, false, vram);
    }

    fn look(&mut self, index: usize, anew: bool, vram: &Vram) {
        let is_other = self.bars[index].take_entry(&mut self.watch, vram);
        // New pages must be armed before they are read.
        self.refresh(vram);
        let Self { watch, bars, .. } = self;
        let bar = &mut bars[index];
        let ranges = bar.changed(watch);
        let pages = bar.aperture.pages();
        // A BAR has at most 64 pages of tables with small pages, and one with large pages.
        if anew || is_other || bar.left.len() > pages / PER_PAGE {
            bar.left = VecDeque::from_iter(std::iter::once(0..pages));
            return;
        }
        for range in ranges {
            let range = range.start.min(pages)..range.end.min(pages);
            bar.left.push_back(range);
        }
    }

    /// Whether a BAR may have to show something else.
    pub fn is_behind(&self) -> bool {
        self.bars.iter().any(|bar| !bar.left.is_empty())
    }

    /// Shows in the BARs what has changed. Returns whether nothing is left.
    ///
    /// Each step reads a bounded number of entries, regardless of how many are left: what is read
    /// and not shown yet is read again in the next step.
    pub fn advance(&mut self, vram: &Vram, until: Deadline) -> bool {
        let Self { watch, bars, .. } = self;
        for bar in bars {
            while let Some(range) = bar.left.pop_front() {
                let end = range.end.min(range.start + PER_PAGE);
                let wanted = bar.wanted(range.start..end, vram);
                let is_watched = |page| watch.is_watched(page);
                let aperture = &mut bar.aperture;
                let shown =
                    aperture.show(range.start, &wanted, vram, is_watched, || until.is_over());
                let done = shown.unwrap_or_else(|error| {
                    log::warn!("cannot show VRAM in a BAR: {error}");
                    wanted.len()
                });
                let left = range.start + done..range.end;
                if !left.is_empty() {
                    bar.left.push_front(left);
                }
                if until.is_over() {
                    return !self.is_behind();
                }
            }
        }
        true
    }

    /// The window shows VRAM from an address on, a multiple of 64 KiB.
    pub fn show_window(&mut self, base: u64, vram: &Vram) {
        let count = vram.len() / PAGE;
        let pages = (base / PAGE..).take(self.window.pages());
        // Pages within VRAM have 28 bits.
        let wanted: Vec<_> = pages
            .map(|page| (page < count).then_some(page as u32))
            .collect();
        let watch = &self.watch;
        let shown = self
            .window
            .show(0, &wanted, vram, |page| watch.is_watched(page), || false);
        if let Err(error) = shown {
            log::warn!("cannot show VRAM in a window: {error}");
        }
    }
}
