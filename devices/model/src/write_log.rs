//! Logs the pages of guest RAM that this process writes.
//!
//! KVM logs the guest's writes. Device writes are logged here, through the crate vm-memory's
//! `Bitmap` of a region of RAM. While no log is active, a write costs one relaxed load.
//!
//! A page is marked after it was written, and its mark is taken before the page is read: a reader
//! that takes a mark and then copies the page either gets what was written or sees another mark.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use vm_memory::bitmap::{Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};

/// Size of a page of the log in bytes.
const PAGE: usize = 4096;

/// The log of one region.
#[derive(Debug, Default)]
pub struct WriteLog {
    on: AtomicBool,
    pages: usize,
    /// One bit per page; allocated when the log is first started.
    words: OnceLock<Box<[AtomicU64]>>,
}

impl WriteLog {
    /// Starts an empty log. Call [`order_writes`] when the logs of all regions are started: from
    /// then on, every write is either visible to the caller or will be marked.
    pub fn start(&self) {
        for word in self.words() {
            word.store(0, Ordering::Relaxed);
        }
        self.on.store(true, Ordering::SeqCst);
    }

    /// Ends the log.
    pub fn stop(&self) {
        self.on.store(false, Ordering::Relaxed);
    }

    /// Moves the marks into a bitmap of the region: bit `n % 64` of word `n / 64` is page `n`.
    /// Marks beyond the end of the bitmap stay in the log.
    pub fn take_into(&self, bitmap: &mut [u64]) {
        let Some(words) = self.words.get() else {
            return;
        };
        for (word, into) in words.iter().zip(bitmap) {
            if word.load(Ordering::Relaxed) != 0 {
                // Pairs with the release in `mark`: the page is read after this.
                *into |= word.swap(0, Ordering::Acquire);
            }
        }
    }

    fn words(&self) -> &[AtomicU64] {
        let make = || {
            (0..self.pages.div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect()
        };
        self.words.get_or_init(make)
    }

    #[cold]
    fn mark(&self, offset: usize, len: usize) {
        let Some(words) = self.words.get().filter(|_| len > 0) else {
            return;
        };
        let first = offset / PAGE;
        let last = (offset.saturating_add(len - 1) / PAGE).min(self.pages.saturating_sub(1));
        for page in first..=last {
            if let Some(word) = words.get(page / 64) {
                word.fetch_or(1 << (page % 64), Ordering::Release);
            }
        }
    }
}

/// Orders the earlier writes of all threads of this process before their later checks of the log
/// (`membarrier`): a thread that has not seen a log started has completed the write that it did not
/// mark.
pub fn order_writes() -> io::Result<()> {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: the command takes no arguments and touches no memory.
    match unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A part of a region's log.
#[derive(Clone, Debug)]
pub struct WriteLogSlice<'a> {
    log: &'a WriteLog,
    offset: usize,
}

impl<'a> WithBitmapSlice<'a> for WriteLog {
    type S = WriteLogSlice<'a>;
}

impl Bitmap for WriteLog {
    #[inline]
    fn mark_dirty(&self, offset: usize, len: usize) {
        if self.on.load(Ordering::Relaxed) {
            self.mark(offset, len);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset / PAGE;
        let word = self.words.get().and_then(|words| words.get(page / 64));
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % 64) & 1 == 1)
    }

    #[inline]
    fn slice_at(&self, offset: usize) -> WriteLogSlice<'_> {
        WriteLogSlice { log: self, offset }
    }
}

impl NewBitmap for WriteLog {
    fn with_len(len: usize) -> Self {
        Self {
            pages: len.div_ceil(PAGE),
            ..Self::default()
        }
    }
}

impl<'a> WithBitmapSlice<'_> for WriteLogSlice<'a> {
    type S = WriteLogSlice<'a>;
}

impl BitmapSlice for WriteLogSlice<'_> {}

impl<'a> Bitmap for WriteLogSlice<'a> {
    #[inline]
    fn mark_dirty(&self, offset: usize, len: usize) {
        // If it saturates, it is beyond any region.
        self.log.mark_dirty(self.offset.saturating_add(offset), len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.dirty_at(self.offset.saturating_add(offset))
    }

    #[inline]
    fn slice_at(&self, offset: usize) -> WriteLogSlice<'a> {
        WriteLogSlice {
            log: self.log,
            offset: self.offset.saturating_add(offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

    use super::*;
    use crate::memory::GuestRam;

    fn marked(log: &WriteLog) -> Vec<u64> {
        let mut bitmap = vec![0; log.pages.div_ceil(64)];
        log.take_into(&mut bitmap);
        (0..log.pages as u64)
            .filter(|page| bitmap[*page as usize / 64] >> (page % 64) & 1 == 1)
            .collect()
    }

    #[test]
    fn writes_are_marked_from_the_moment_when_the_log_is_on_and_once() {
        let ram = GuestRam::from_ranges(&[(GuestAddress(0x10000), 0x100_000)]).unwrap();
        let region = ram.find_region(GuestAddress(0x10000)).unwrap();
        let log = region.get_mmap();
        let log = log.bitmap();
        let write = |at: u64, len| {
            let bytes = vec![1; len];
            ram.write_slice(&bytes, GuestAddress(0x10000 + at)).unwrap();
        };
        write(0, 10);
        assert!(marked(log).is_empty());
        log.start();
        order_writes().unwrap();
        write(0xfff, 2);
        write(0x41000, 1);
        ram.write_obj(7_u64, GuestAddress(0x10000 + 0x50ff8))
            .unwrap();
        ram.store(7_u32, GuestAddress(0x10000 + 0xff000), Ordering::Relaxed)
            .unwrap();
        assert_eq!(marked(log), [0, 1, 0x41, 0x50, 0xff]);
        assert!(marked(log).is_empty());
        let mut read = [0; 100];
        ram.read_slice(&mut read, GuestAddress(0x10000)).unwrap();
        assert!(marked(log).is_empty());
        log.stop();
        write(0, 0x3000);
        assert!(marked(log).is_empty());
    }

    #[test]
    fn marks_beyond_the_region_go_nowhere() {
        let log = WriteLog::with_len(3 * PAGE);
        log.start();
        log.slice_at(PAGE).slice_at(PAGE).mark_dirty(0, usize::MAX);
        log.mark_dirty(usize::MAX, 1);
        log.mark_dirty(0, 0);
        assert_eq!(marked(&log), [2]);
    }
}
