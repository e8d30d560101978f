//! Selects the pages to send, and stores received pages.

use std::{
    arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_setzero_si128},
    mem,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hypervisor::{DirtyLog, dirty_log::BLOCK_PAGES};
use vm_memory::VolatileSlice;
use vmm_machine::moving::MovingRegion;
use vmm_memory::{
    Backing, Mapping,
    data::{self, Pagemap},
};

use super::{
    Error, Result,
    connection::{Connection, Pages},
    frame::{Header, MAX_RUNS, Run, encode_runs, protocol},
    lanes::Lanes,
    progress::Progress,
};

/// Size of a page in bytes.
pub const PAGE: u64 = 4096;

/// Number of bitmap words whose pages are armed and sent at once: 2 MiB of memory.
const STEP: usize = 8;

/// A region of RAM to migrate.
pub struct Region {
    /// Guest-physical address.
    pub guest: u64,
    /// The memory.
    pub mapping: Arc<Mapping>,
}

impl Region {
    /// Fresh memory that belongs to no machine, for tests and fuzzers.
    pub fn unused(guest: u64, len: u64) -> Result<Self> {
        let mapping = Mapping::new(len, &Backing::default(), 0)
            .map_err(|error| Error::Machine(error.to_string()))?;
        Ok(Self {
            guest,
            mapping: Arc::new(mapping),
        })
    }

    /// Number of 4 KiB pages.
    fn pages(&self) -> u64 {
        self.mapping.size() as u64 / PAGE
    }

    /// Consecutive pages, which the guest may be writing.
    fn slice(&self, page: u64, pages: u32) -> VolatileSlice<'_> {
        let len = pages as usize * PAGE as usize;
        // SAFETY: the pages are within the mapping, which lives as long as `self`; users of a slice do not assume that
        // its bytes stay unchanged.
        unsafe { VolatileSlice::new(self.page_address(page), len) }
    }

    /// Whether a page is all zero now. A later write marks the page as dirty.
    fn is_zero(&self, page: u64) -> bool {
        let first = self.page_address(page).cast::<__m128i>().cast_const();
        // SAFETY: reads four vectors of a page that is within the mapping, which lives as long as `self`. Others may be
        // writing the page, which is why the reads are volatile.
        let part = |at: usize| unsafe {
            let vector = |number| first.add(at + number).read_volatile();
            let all = _mm_or_si128(
                _mm_or_si128(vector(0), vector(1)),
                _mm_or_si128(vector(2), vector(3)),
            );
            _mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_setzero_si128())) == 0xffff
        };
        (0..PAGE as usize / size_of::<__m128i>())
            .step_by(4)
            .all(part)
    }

    /// Copies a page into a buffer; the guest may be writing it.
    fn copy_page(&self, page: u64, into: &mut Vec<u8>) {
        let len = PAGE as usize;
        into.reserve(len);
        // SAFETY: `page` is within the mapping, which lives as long as `self`; the target is fresh memory of this
        // process, of the size that was reserved. A concurrent writer marks the page as dirty afterwards, so a mix of
        // old and new bytes is sent again.
        unsafe {
            let end = into.as_mut_ptr().add(into.len());
            std::ptr::copy_nonoverlapping(self.page_address(page), end, len);
            into.set_len(into.len() + len);
        }
    }

    /// The address of a page, which must be within the mapping.
    fn page_address(&self, page: u64) -> *mut u8 {
        self.mapping.address().wrapping_add((page * PAGE) as usize)
    }
}

/// A region whose writes are tracked.
struct Watched {
    region: Region,
    moving: Option<MovingRegion>,
    guest_log: Option<DirtyLog>,
    /// Pages that devices have written since they were last sent.
    pending: Vec<u64>,
    /// Pages sent in the previous round. If they are written again they are held back for one round: they are likely to
    /// be written once more.
    recent: Vec<u64>,
}

/// RAM that is being sent.
pub struct Departing {
    regions: Vec<Watched>,
    /// Shows which pages of private memory have ever been touched.
    pagemap: Option<Pagemap>,
    contents: Vec<u8>,
    /// The lanes that carry the pages, if there are any.
    lanes: Lanes,
}

/// A page frame that is being filled.
struct Batch {
    runs: Vec<Run>,
    /// Bytes of non-zero pages.
    bytes: usize,
    /// Copies of those pages, if they cannot be sent in place: another thread sends them, or they need a checksum.
    copied: Option<Vec<u8>>,
    /// Maximum number of bytes of pages.
    most: usize,
}

impl Departing {
    /// Starts tracking writes to all RAM. `pagemap` is this process's `/proc/self/pagemap`, if it is readable.
    pub fn watch(regions: Vec<MovingRegion>, pagemap: Option<Pagemap>) -> Result<Self> {
        let mut watched = Vec::new();
        for moving in regions {
            let guest_log = moving.watch()?;
            moving.with_log(devices::write_log::WriteLog::start);
            let region = Region {
                guest: moving.guest,
                mapping: Arc::clone(&moving.mapping),
            };
            watched.push(Watched {
                pending: vec![0; region.pages().div_ceil(64) as usize],
                recent: vec![0; region.pages().div_ceil(64) as usize],
                region,
                moving: Some(moving),
                guest_log: Some(guest_log),
            });
        }
        devices::write_log::order_writes().map_err(Error::Order)?;
        Ok(Self {
            regions: watched,
            pagemap,
            contents: Vec::new(),
            lanes: Lanes::default(),
        })
    }

    /// Memory whose only writes are those of [`Departing::mark`], for tests.
    #[cfg(test)]
    pub fn unwatched(regions: Vec<Region>) -> Self {
        let regions = regions.into_iter().map(|region| Watched {
            pending: vec![0; region.pages().div_ceil(64) as usize],
            recent: vec![0; region.pages().div_ceil(64) as usize],
            region,
            moving: None,
            guest_log: None,
        });
        Self {
            regions: regions.collect(),
            pagemap: None,
            contents: Vec::new(),
            lanes: Lanes::default(),
        }
    }

    /// Marks a page as written.
    #[cfg(test)]
    pub fn mark(&mut self, region: usize, page: usize) {
        self.regions[region].pending[page / 64] |= 1 << (page % 64);
    }

    /// Sends pages on these lanes from now on.
    pub fn set_lanes(&mut self, lanes: Lanes) {
        self.lanes = lanes;
    }

    /// Size of RAM in bytes.
    pub fn total(&self) -> u64 {
        let sizes = self.regions.iter();
        sizes
            .map(|watched| watched.region.mapping.size() as u64)
            .sum()
    }

    /// Number of bytes that were written and not sent yet.
    pub fn outstanding(&mut self) -> Result<u64> {
        let mut pages = 0;
        for watched in &mut self.regions {
            let words = watched.words()?;
            pages += words
                .iter()
                .map(|word| u64::from(word.count_ones()))
                .sum::<u64>();
        }
        Ok(pages * PAGE)
    }

    /// Sends what has been written since it was last sent, or everything in the first round, and waits until all of it
    /// has arrived. Pages that were sent in the previous round and written again are left for the next one. Returns the
    /// number of bytes of pages that were sent.
    pub fn send_round(
        &mut self,
        round: u32,
        connection: &mut Connection,
        progress: &Progress,
    ) -> Result<u64> {
        self.send(round, true, connection, progress)
    }

    /// As [`Departing::send_round`], for a paused machine: sends everything that is left.
    pub fn send_rest(
        &mut self,
        round: u32,
        connection: &mut Connection,
        progress: &Progress,
    ) -> Result<u64> {
        self.send(round, false, connection, progress)
    }

    fn send(
        &mut self,
        round: u32,
        hold_back: bool,
        connection: &mut Connection,
        progress: &Progress,
    ) -> Result<u64> {
        let copies = !connection.keeps_bytes() || !self.lanes.is_empty();
        let mut batch = Batch {
            copied: copies.then(Vec::new),
            ..Batch::of(self.lanes.frame())
        };
        let mut sent = 0;
        for index in 0..self.regions.len() {
            let watched = &mut self.regions[index];
            let mut words = match round {
                0 => vec![u64::MAX; watched.pending.len()],
                _ => watched.words()?,
            };
            watched.hold_back(&mut words, round, hold_back);
            let mut search = data::Search::default();
            for first in (0..words.len()).step_by(STEP) {
                let last = words.len().min(first + STEP);
                let step = &mut words[first..last];
                if step.iter().all(|word| *word == 0) {
                    continue;
                }
                let watched = &mut self.regions[index];
                watched.arm(first, step)?;
                let pages = first as u64 * BLOCK_PAGES
                    ..watched.region.pages().min(last as u64 * BLOCK_PAGES);
                let there = match round {
                    0 => self.present(index, &pages, &mut search),
                    _ => None,
                };
                let step = words[first..last].to_vec();
                for page in pages.clone() {
                    let at = (page - pages.start) as usize;
                    if step[at / 64] >> (at % 64) & 1 == 0 {
                        continue;
                    }
                    if there.as_ref().is_some_and(|there| !there[at]) {
                        continue;
                    }
                    let region = &self.regions[index].region;
                    if batch.add(region, page) {
                        sent += self.send_batch(&mut batch, round, connection, progress)?;
                    }
                }
            }
        }
        sent += self.send_batch(&mut batch, round, connection, progress)?;
        self.lanes.barrier(round, connection)?;
        connection.barrier(round)?;
        connection.hear(0)?;
        Ok(sent)
    }

    /// Sends a batch, unless it is empty, and returns the number of bytes of its pages.
    fn send_batch(
        &mut self,
        batch: &mut Batch,
        round: u32,
        connection: &mut Connection,
        progress: &Progress,
    ) -> Result<u64> {
        if batch.runs.is_empty() {
            return Ok(0);
        }
        encode_runs(&batch.runs, &mut self.contents);
        match &mut batch.copied {
            Some(copied) if !self.lanes.is_empty() => {
                let list = mem::take(&mut self.contents);
                let pages = mem::take(copied);
                connection.keep_pace(list.len() + pages.len(), Some(round))?;
                self.lanes.send(round, list, pages, connection)?;
            }
            Some(copied) => {
                connection.send_pages(round, &self.contents, Pages::Copied(copied))?;
            }
            None => {
                let runs = batch.runs.iter().filter(|run| !run.zero);
                let memory: Vec<_> = runs.filter_map(|run| self.slice(run)).collect();
                connection.send_pages(round, &self.contents, Pages::InPlace(&memory))?;
            }
        }
        let bytes = batch.bytes as u64;
        let zeroes = batch.runs.iter().filter(|run| run.zero);
        let zeroes: u64 = zeroes.map(|run| u64::from(run.pages)).sum();
        progress.update(|info| {
            info.sent_bytes += bytes;
            info.zero_pages += zeroes;
            info.remaining_bytes = info.remaining_bytes.saturating_sub(bytes + zeroes * PAGE);
        });
        batch.clear();
        Ok(bytes)
    }

    /// The memory of a run, which must be within a region.
    fn slice(&self, run: &Run) -> Option<VolatileSlice<'_>> {
        let regions = self.regions.iter().map(|watched| &watched.region);
        let mut regions = regions.filter(|region| region.guest <= run.guest);
        let region = regions.find(|region| {
            let len = region.mapping.size() as u64;
            run.guest - region.guest < len
        })?;
        Some(region.slice((run.guest - region.guest) / PAGE, run.pages))
    }

    /// Which of the pages have ever been touched; `None` if unknown. Untouched pages are zero at the destination, too.
    /// Their writes must be tracked already: whatever is untouched now and written later is in the next round.
    fn present(
        &self,
        index: usize,
        pages: &Range<u64>,
        search: &mut data::Search,
    ) -> Option<Vec<bool>> {
        let region = &self.regions[index].region;
        let count = (pages.end - pages.start) as usize;
        let bytes = |page: u64| (page * PAGE) as usize;
        let mut there = vec![false; count];
        let within = bytes(pages.start)..bytes(pages.end);
        for part in search.touched(&region.mapping, within, self.pagemap.as_ref())? {
            let first = part.start / PAGE as usize - pages.start as usize;
            let end = part.end.div_ceil(PAGE as usize) - pages.start as usize;
            there[first..end].fill(true);
        }
        Some(there)
    }

    /// A hash of all RAM, which must not be written meanwhile.
    pub fn hash(&self) -> u64 {
        let mut hash = Hash::default();
        for index in 0..self.regions.len() {
            let region = &self.regions[index].region;
            let step = STEP as u64 * BLOCK_PAGES;
            let mut search = data::Search::default();
            for first in (0..region.pages()).step_by(step as usize) {
                let pages = first..region.pages().min(first + step);
                let there = self.present(index, &pages, &mut search);
                for page in pages.clone() {
                    let at = (page - first) as usize;
                    if there.as_ref().is_none_or(|there| there[at]) {
                        hash.add(region, page);
                    }
                }
            }
        }
        hash.value
    }
}

impl Watched {
    /// Bitmap of all pages that were written and not sent yet.
    fn words(&mut self) -> Result<Vec<u64>> {
        if let Some(moving) = &self.moving {
            let pending = &mut self.pending;
            moving.with_log(|log| log.take_into(pending));
        }
        let mut words = match &self.guest_log {
            Some(log) => log.read()?,
            None => vec![0; self.pending.len()],
        };
        for (word, pending) in words.iter_mut().zip(&self.pending) {
            *word |= pending;
        }
        Ok(words)
    }

    /// Removes the pages to hold back from a round, and remembers the others as recently sent.
    fn hold_back(&mut self, words: &mut [u64], round: u32, hold_back: bool) {
        for (word, recent) in words.iter_mut().zip(&mut self.recent) {
            if hold_back {
                *word &= !*recent;
            }
            // The first round contains every page, whether it is written or not.
            *recent = if round == 0 { 0 } else { *word };
        }
    }

    /// Re-arms tracking for the pages of the words from `first`, which are about to be sent.
    fn arm(&mut self, first: usize, words: &[u64]) -> Result<()> {
        if let Some(log) = &self.guest_log {
            log.arm(first as u64, &mut words.to_vec())?;
        }
        for (pending, word) in self.pending[first..].iter_mut().zip(words) {
            *pending &= !word;
        }
        Ok(())
    }
}

impl Drop for Departing {
    fn drop(&mut self) {
        for watched in &self.regions {
            if let Some(moving) = &watched.moving {
                moving.with_log(devices::write_log::WriteLog::stop);
            }
        }
    }
}

impl Batch {
    /// An empty batch with room for `most` bytes of pages.
    fn of(most: usize) -> Self {
        Self {
            runs: Vec::new(),
            bytes: 0,
            copied: None,
            most,
        }
    }

    /// Adds a page; returns whether the batch is full.
    fn add(&mut self, region: &Region, page: u64) -> bool {
        let zero = region.is_zero(page);
        if let Some(data) = &mut self.copied
            && !zero
        {
            if data.is_empty() {
                data.reserve_exact(self.most);
            }
            region.copy_page(page, data);
        }
        if !zero {
            self.bytes += PAGE as usize;
        }
        let guest = region.guest + page * PAGE;
        match self.runs.last_mut() {
            Some(run)
                if run.zero == zero
                    && page > 0
                    && run.guest + u64::from(run.pages) * PAGE == guest =>
            {
                run.pages += 1;
            }
            _ => self.runs.push(Run {
                guest,
                pages: 1,
                zero,
            }),
        }
        self.bytes >= self.most || self.runs.len() == MAX_RUNS
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.bytes = 0;
        if let Some(data) = &mut self.copied {
            data.clear();
        }
    }
}

/// RAM that is being received, by several threads at once.
pub struct Arriving {
    regions: Vec<Taken>,
}

/// A region that is being filled.
struct Taken {
    region: Region,
    /// One bit per page: set if the page may be non-zero.
    touched: Vec<AtomicU64>,
}

impl Taken {
    /// The first page of a run, if the whole run is within the region.
    fn first(&self, run: &Run) -> Option<u64> {
        let at = run.guest.checked_sub(self.region.guest)?;
        let end = at.checked_add(u64::from(run.pages) * PAGE)?;
        (end <= self.region.mapping.size() as u64).then_some(at / PAGE)
    }

    fn is_touched(&self, page: u64) -> bool {
        self.touched[page as usize / 64].load(Ordering::Relaxed) >> (page % 64) & 1 == 1
    }

    /// Clears a page's bit; returns whether it was set.
    fn forget(&self, page: u64) -> bool {
        let bit = 1 << (page % 64);
        // Most are not set, so test before the atomic operation.
        self.is_touched(page)
            && self.touched[page as usize / 64].fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }
}

impl Arriving {
    /// Unused RAM, all zero.
    pub fn new(regions: Vec<Region>) -> Self {
        let taken = |region: Region| Taken {
            touched: (0..region.pages().div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            region,
        };
        Self {
            regions: regions.into_iter().map(taken).collect(),
        }
    }

    /// Receives the contents of a page frame, which are untrusted, directly into memory. If that fails, some of the
    /// pages may have been written. Returns the number of bytes of pages.
    pub fn receive(&self, header: Header, connection: &mut Connection) -> Result<u64> {
        let bytes = connection.receive_pages(header, |runs| self.place(runs))?;
        Ok(bytes as u64)
    }

    /// Returns the memory for the pages of the non-zero runs. The pages of the others are zero afterwards.
    ///
    /// A few bytes can declare any number of pages as zero. Pages that are already zero are not written, and a frame
    /// names no more pages than there are in RAM, so the cost of a frame is bounded by one pass over all RAM.
    fn place(&self, runs: &[Run]) -> Result<Vec<VolatileSlice<'_>>> {
        let all = self.regions.iter().map(|taken| taken.region.pages());
        let named = runs.iter().map(|run| u64::from(run.pages));
        // Cannot overflow: at most 1024 runs of 2^32 pages, and RAM has fewer than 2^52.
        if named.sum::<u64>() > all.sum() {
            return Err(protocol("a frame has more pages than there are"));
        }
        let mut memory = Vec::new();
        for run in runs {
            let (taken, first) = self
                .regions
                .iter()
                .find_map(|taken| Some((taken, taken.first(run)?)))
                .ok_or_else(|| protocol(format!("pages at {:#x} are not RAM", run.guest)))?;
            let pages = first..first + u64::from(run.pages);
            if run.zero {
                for page in pages.filter(|page| taken.forget(*page)) {
                    let target = taken.region.page_address(page);
                    // SAFETY: the page is within the mapping, as was checked, and the mapping lives as long as `self`.
                    // It contains no Rust object, and the machine does not run yet.
                    unsafe { std::ptr::write_bytes(target, 0, PAGE as usize) };
                }
            } else {
                for page in pages {
                    let mark = &taken.touched[page as usize / 64];
                    mark.fetch_or(1 << (page % 64), Ordering::Relaxed);
                }
                memory.push(taken.region.slice(first, run.pages));
            }
        }
        Ok(memory)
    }

    /// The same hash as [`Departing::hash`].
    pub fn hash(&self) -> u64 {
        let mut hash = Hash::default();
        for taken in &self.regions {
            let region = &taken.region;
            for page in (0..region.pages()).filter(|page| taken.is_touched(*page)) {
                hash.add(region, page);
            }
        }
        hash.value
    }
}

/// Detects errors, not attacks: an attacker who can forge memory can forge its hash.
#[derive(Default)]
struct Hash {
    value: u64,
    page: Vec<u8>,
}

impl Hash {
    /// Adds a page. Zero pages do not count, because they may or may not have been touched.
    fn add(&mut self, region: &Region, page: u64) {
        const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
        if region.is_zero(page) {
            return;
        }
        self.page.clear();
        region.copy_page(page, &mut self.page);
        let mut lanes = [region.guest + page * PAGE, 1, 2, 3];
        for block in self.page.chunks_exact(32) {
            for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(word);
                *lane = (*lane ^ u64::from_le_bytes(bytes))
                    .wrapping_mul(MULTIPLIER)
                    .rotate_left(29);
            }
        }
        for lane in lanes {
            self.value = (self.value ^ lane).wrapping_mul(MULTIPLIER).rotate_left(31);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::MAX_PAGES;

    #[test]
    fn a_run_ends_where_its_region_does() {
        let len = 4 * PAGE;
        let regions = [0, len].map(|guest| Region::unused(guest, len).unwrap());
        for copied in [None, Some(Vec::new())] {
            let mut batch = Batch {
                copied,
                ..Batch::of(MAX_PAGES)
            };
            for region in &regions {
                assert!((0..4).all(|page| !batch.add(region, page)));
            }
            let runs: Vec<_> = batch
                .runs
                .iter()
                .map(|run| (run.guest, run.pages))
                .collect();
            assert_eq!(runs, [(0, 4), (len, 4)]);
            assert!(batch.runs.iter().all(|run| run.zero) && batch.bytes == 0);
        }
    }

    #[test]
    fn pages_of_zeroes_are_written_once_and_as_many_as_there_are() {
        let pages = 64;
        let arriving = Arriving::new(vec![Region::unused(0, pages * PAGE).unwrap()]);
        let run = |zero, pages: u64| Run {
            guest: 0,
            pages: pages as u32,
            zero,
        };
        arriving.place(&[run(false, 2)]).unwrap();
        assert!(arriving.regions[0].is_touched(1));
        let address = arriving.regions[0].region.page_address(1);
        // SAFETY: within the mapping, which nothing else uses.
        unsafe { address.write(7) };
        arriving.place(&[run(true, pages)]).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { address.read() }, 0);
        assert!((0..pages).all(|page| !arriving.regions[0].is_touched(page)));
        let error = arriving.place(&[run(true, pages), run(true, 1)]);
        assert!(error.unwrap_err().to_string().contains("more pages"));
    }

    #[test]
    fn the_hash_of_shared_memory_misses_no_page_that_was_written() {
        let pages = 4 * STEP as u64 * BLOCK_PAGES;
        let step = STEP as u64 * BLOCK_PAGES;
        // In one part over several steps, and at the edges of steps.
        let written = (3..2 * step + 5).chain([3 * step - 1, 3 * step, pages - 1]);
        let written: Vec<_> = written.collect();
        let hash = |shared, left_out: Option<u64>| {
            let backing = Backing {
                shared,
                ..Backing::default()
            };
            let mapping = Arc::new(Mapping::new(pages * PAGE, &backing, 0).unwrap());
            let region = Region { guest: 0, mapping };
            for page in written.iter().filter(|page| Some(**page) != left_out) {
                // SAFETY: within the mapping, which nothing else uses.
                unsafe { region.page_address(*page).write(7) };
            }
            Departing::unwatched(vec![region]).hash()
        };
        // All of private memory is read, because there is no page map.
        let all = hash(false, None);
        assert_eq!(hash(true, None), all);
        for page in [3, step, 3 * step, pages - 1] {
            assert_ne!(hash(true, Some(page)), all, "{page}");
        }
    }

    #[test]
    fn a_byte_anywhere_in_a_page_makes_it_no_page_of_zeroes() {
        let region = Region::unused(0, 3 * PAGE).unwrap();
        for at in 0..PAGE as usize {
            let byte = region.page_address(1).wrapping_add(at);
            // SAFETY: within the mapping, which nothing else uses.
            unsafe { byte.write(0x80) };
            assert!(!region.is_zero(1), "{at}");
            // SAFETY: as above.
            unsafe { byte.write(0) };
        }
        assert!((0..3).all(|page| region.is_zero(page)));
    }
}
