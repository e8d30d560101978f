//! Memory that a program shares with its devices: one file in memory a program, from which both take pages.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use base::{
    Unpoisoned,
    mapping::{Access, Mapping},
    memfd,
};

/// Pieces begin at multiples of this.
const UNIT: u64 = 64 << 10;
/// Pieces of at least this length begin at multiples of it, so that large pages can back them.
const LARGE: u64 = 2 << 20;

/// Bytes at the start that are touched ahead: as many as a context takes, and a little more.
const AHEAD: u64 = 80 << 20;
/// How many threads touch pages ahead.
const TOUCHING: u64 = 2;

/// A program's slice. Memory is committed as it is touched.
pub struct Slice {
    file: File,
    mapping: Mapping,
    /// Lengths of pieces in use, by their offset.
    pieces: Mutex<BTreeMap<u64, u64>>,
    /// Where to go on touching pages ahead. 0: that has not begun.
    ahead: AtomicU64,
}

impl Slice {
    /// A slice of `length` bytes.
    pub fn new(length: u64) -> io::Result<Self> {
        let file = memfd::sealed(c"gantry-slice", length)?;
        let size = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping::shared(&file, 0, size, Access::ReadWrite)?;
        Ok(Self {
            file,
            mapping,
            pieces: Mutex::default(),
            ahead: AtomicU64::new(0),
        })
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Takes a zeroed piece. `None`: there is no room, or `length` is 0.
    pub fn take(&self, length: u64) -> Option<u64> {
        let length = length.checked_next_multiple_of(UNIT)?;
        let alignment = if length < LARGE { UNIT } else { LARGE };
        let mut pieces = self.pieces.lock_unpoisoned();
        let mut start = 0u64;
        for (&offset, &taken) in pieces.iter() {
            if offset.checked_sub(start).is_some_and(|room| room >= length) {
                break;
            }
            // Cannot overflow: pieces lie in the file.
            start = (offset + taken).next_multiple_of(alignment);
        }
        if length == 0 || start.checked_add(length)? > self.length() {
            return None;
        }
        pieces.insert(start, length);
        Some(start)
    }

    /// Commits the first pages, by threads of their own, if nobody has begun to. The driver pins pages that are there in
    /// a fraction of the time that it takes to make them.
    pub fn touch_ahead(self: &Arc<Self>) {
        let begun =
            self.ahead
                .compare_exchange(0, TOUCHING * LARGE, Ordering::Relaxed, Ordering::Relaxed);
        if begun.is_err() {
            return;
        }
        for number in 0..TOUCHING {
            let slice = self.clone();
            let touch = move || slice.touch(number * LARGE);
            // Without them pages are committed as they are pinned.
            let _ = thread::Builder::new().name("pages".into()).spawn(touch);
        }
    }

    fn touch(&self, mut offset: u64) {
        let end = AHEAD.min(self.length());
        while offset < end {
            // Both lie in the mapping.
            let (start, length) = (offset as usize, (end - offset).min(LARGE) as usize);
            let start = self.mapping.start().wrapping_add(start);
            // SAFETY: these pages of the mapping become present, with the contents that a read would see.
            if unsafe { libc::madvise(start.cast(), length, libc::MADV_POPULATE_WRITE) } < 0 {
                return;
            }
            offset = self.ahead.fetch_add(LARGE, Ordering::Relaxed);
        }
    }

    /// Gives a piece back. Its contents are gone.
    pub fn give(&self, offset: u64) {
        let mut pieces = self.pieces.lock_unpoisoned();
        let Some(length) = pieces.remove(&offset) else {
            return;
        };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a call without pointers. Both numbers are less than the length of the file, a positive off_t.
        let result =
            unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset as i64, length as i64) };
        if result < 0 {
            // Its next user would see old contents: it stays taken.
            pieces.insert(offset, length);
        }
    }

    /// The address of a range that lies in one piece.
    pub fn address(&self, offset: u64, length: u64) -> Option<*mut u8> {
        let end = offset.checked_add(length)?;
        let pieces = self.pieces.lock_unpoisoned();
        let (start, taken) = pieces.range(..=offset).next_back()?;
        // The piece lies in the mapping.
        (length > 0 && end <= start + taken)
            .then(|| self.mapping.start().wrapping_add(offset as usize))
    }
}

impl AsFd for Slice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice() -> Slice {
        Slice::new(8 << 20).expect("there is memory")
    }

    #[test]
    fn pieces_lie_side_by_side_and_large_ones_are_aligned() {
        let slice = slice();
        assert_eq!(slice.take(1), Some(0));
        assert_eq!(slice.take(UNIT + 1), Some(UNIT));
        assert_eq!(slice.take(LARGE), Some(LARGE));
        assert_eq!(slice.take(UNIT), Some(3 * UNIT), "before the large one");
        slice.give(UNIT);
        assert_eq!(slice.take(2 * UNIT), Some(UNIT), "in the gap");
    }

    #[test]
    fn a_piece_that_does_not_fit_is_refused() {
        let slice = slice();
        for length in [0, (8 << 20) + 1, u64::MAX, u64::MAX - UNIT] {
            assert_eq!(slice.take(length), None, "{length}");
        }
        assert_eq!(slice.take(8 << 20), Some(0));
        assert_eq!(slice.take(1), None);
    }

    #[test]
    fn a_range_outside_pieces_or_across_two_has_no_address() {
        let slice = slice();
        assert_eq!(slice.take(UNIT).zip(slice.take(UNIT)), Some((0, UNIT)));
        assert!(slice.address(0, UNIT).is_some());
        for (offset, length) in [
            (0, 0),
            (0, UNIT + 1),
            (2 * UNIT, 1),
            (UNIT, u64::MAX),
            (u64::MAX, 1),
        ] {
            assert!(slice.address(offset, length).is_none(), "{offset} {length}");
        }
    }

    #[test]
    fn a_piece_that_was_given_back_is_zero_again() {
        let slice = slice();
        let at = |offset| slice.address(offset, 1).expect("it is taken");
        let offset = slice.take(UNIT).expect("there is room");
        // SAFETY: the mapping lives, and nobody else has it.
        unsafe { at(offset).write_volatile(7) };
        slice.give(offset);
        let again = slice.take(UNIT).expect("there is room");
        assert_eq!(again, offset);
        // SAFETY: as above.
        assert_eq!(unsafe { at(again).read_volatile() }, 0);
    }
}
