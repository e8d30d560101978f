//! Memory that programs share with their devices, and from which both take pages: one file in memory for each program, or
//! the window of a virtual machine for all programs of its guest.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{
        Arc, Mutex, Weak,
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

/// Who has a piece.
#[derive(Clone, Copy, Debug)]
pub enum Holder {
    /// The program, until it returns the piece.
    Program,
    /// An object of the driver, or a range of addresses.
    Object,
}

/// A piece in use: the driver may still have pages pinned that the program has returned.
struct Piece {
    length: u64,
    is_programs: bool,
    /// How many objects and ranges have it.
    objects: u64,
}

/// A program's slice. Memory is committed as it is touched.
pub struct Slice {
    file: File,
    /// Where pieces may begin: what lies before is for other purposes.
    first: u64,
    mapping: Mapping,
    /// Pieces in use, by their offset.
    pieces: Mutex<BTreeMap<u64, Piece>>,
    /// Where to go on touching pages ahead. 0: that has not begun.
    ahead: AtomicU64,
}

impl Slice {
    /// A slice of `length` bytes.
    pub fn new(length: u64) -> io::Result<Self> {
        Self::over(memfd::sealed(c"gantry-slice", length)?, 0, length)
    }

    /// A slice over `length` bytes of a file in memory, whose pieces begin at `first`, a multiple of 2 MiB.
    pub fn over(file: File, first: u64, length: u64) -> io::Result<Self> {
        let size = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping::shared(&file, 0, size, Access::ReadWrite)?;
        Ok(Self {
            file,
            first,
            mapping,
            pieces: Mutex::default(),
            ahead: AtomicU64::new(0),
        })
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Whether it is a window that several programs take pieces of.
    pub fn is_common(&self) -> bool {
        self.first > 0
    }

    /// Takes a zeroed piece. `None`: there is no room, or `length` is 0.
    pub fn take(&self, length: u64, holder: Holder) -> Option<u64> {
        let length = length.checked_next_multiple_of(UNIT)?;
        let alignment = if length < LARGE { UNIT } else { LARGE };
        let mut pieces = self.pieces.lock_unpoisoned();
        let mut start = self.first;
        for (&offset, piece) in pieces.iter() {
            if offset.checked_sub(start).is_some_and(|room| room >= length) {
                break;
            }
            // Cannot overflow: pieces lie in the file.
            start = (offset + piece.length).next_multiple_of(alignment);
        }
        if length == 0 || start.checked_add(length)? > self.length() {
            return None;
        }
        let piece = Piece {
            length,
            is_programs: matches!(holder, Holder::Program),
            objects: matches!(holder, Holder::Object).into(),
        };
        pieces.insert(start, piece);
        Some(start)
    }

    /// Notes that another object has the piece that a range lies in. `None`: it lies in none.
    pub fn share(&self, offset: u64, length: u64) -> Option<()> {
        let mut pieces = self.pieces.lock_unpoisoned();
        holding(&mut pieces, offset, length)?.1.objects += 1;
        Some(())
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
            let slice = Arc::downgrade(self);
            let touch = move || touch(&slice, number * LARGE);
            // Without them pages are committed as they are pinned.
            let _ = thread::Builder::new().name("pages".into()).spawn(touch);
        }
    }

    /// Commits the pages at `offset`. Answers where to go on, if that is ahead.
    fn touch(&self, offset: u64) -> Option<u64> {
        let end = AHEAD.min(self.length() - self.first);
        let length = end.checked_sub(offset)?.min(LARGE) as usize;
        // Both lie in the mapping.
        let start = (self.mapping.start()).wrapping_add((self.first + offset) as usize);
        // SAFETY: these pages of the mapping become present, with the contents that a read would see.
        let touched = unsafe { libc::madvise(start.cast(), length, libc::MADV_POPULATE_WRITE) };
        (touched == 0).then(|| self.ahead.fetch_add(LARGE, Ordering::Relaxed))
    }

    /// Gives up what lies at `offset`. The contents of a piece that nobody has any longer are gone.
    pub fn give(&self, offset: u64, holder: Holder) {
        let mut pieces = self.pieces.lock_unpoisoned();
        let Some((start, piece)) = holding(&mut pieces, offset, 1) else {
            return;
        };
        match holder {
            Holder::Program => piece.is_programs = false,
            Holder::Object => piece.objects = piece.objects.saturating_sub(1),
        }
        if piece.is_programs || piece.objects > 0 {
            return;
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (at, length) = (start as i64, piece.length as i64);
        // SAFETY: a call without pointers. Both numbers are less than the length of the file, a positive off_t.
        let result = unsafe { libc::fallocate(self.file.as_raw_fd(), mode, at, length) };
        if result < 0 {
            // Its next user would see old contents: it stays taken.
            piece.objects = 1;
        } else {
            pieces.remove(&start);
        }
    }

    /// Where the piece begins that `offset` lies in. `None`: it lies in none.
    pub fn start_of(&self, offset: u64) -> Option<u64> {
        let mut pieces = self.pieces.lock_unpoisoned();
        holding(&mut pieces, offset, 1).map(|(start, _)| start)
    }

    /// The address of a range that lies in one piece.
    pub fn address(&self, offset: u64, length: u64) -> Option<*mut u8> {
        let mut pieces = self.pieces.lock_unpoisoned();
        // The piece lies in the mapping.
        holding(&mut pieces, offset, length)
            .map(|_| self.mapping.start().wrapping_add(offset as usize))
    }
}

/// The piece that a range lies in, and where the piece begins.
fn holding(
    pieces: &mut BTreeMap<u64, Piece>,
    offset: u64,
    length: u64,
) -> Option<(u64, &mut Piece)> {
    let end = offset.checked_add(length)?;
    let (start, piece) = pieces.range_mut(..=offset).next_back()?;
    // Cannot overflow: pieces lie in the file.
    (length > 0 && end <= start + piece.length).then_some((*start, piece))
}

/// Commits pages from `offset` on, as long as somebody has the slice.
fn touch(slice: &Weak<Slice>, mut offset: u64) {
    while let Some(next) = slice.upgrade().and_then(|slice| slice.touch(offset)) {
        offset = next;
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
        assert_eq!(slice.take(1, Holder::Object), Some(0));
        assert_eq!(slice.take(UNIT + 1, Holder::Object), Some(UNIT));
        assert_eq!(slice.take(LARGE, Holder::Object), Some(LARGE));
        assert_eq!(
            slice.take(UNIT, Holder::Object),
            Some(3 * UNIT),
            "before the large one"
        );
        slice.give(UNIT, Holder::Object);
        assert_eq!(
            slice.take(2 * UNIT, Holder::Object),
            Some(UNIT),
            "in the gap"
        );
    }

    #[test]
    fn a_piece_that_does_not_fit_is_refused() {
        let slice = slice();
        for length in [0, (8 << 20) + 1, u64::MAX, u64::MAX - UNIT] {
            assert_eq!(slice.take(length, Holder::Object), None, "{length}");
        }
        assert_eq!(slice.take(8 << 20, Holder::Object), Some(0));
        assert_eq!(slice.take(1, Holder::Object), None);
    }

    #[test]
    fn a_range_outside_pieces_or_across_two_has_no_address() {
        let slice = slice();
        assert_eq!(
            slice
                .take(UNIT, Holder::Object)
                .zip(slice.take(UNIT, Holder::Object)),
            Some((0, UNIT))
        );
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
    fn a_piece_is_taken_until_nobody_has_it() {
        let slice = slice();
        let piece = slice.take(LARGE, Holder::Program).expect("there is room");
        assert_eq!(slice.share(piece + UNIT, LARGE), None, "not all of it");
        assert!(slice.share(piece + UNIT, UNIT).is_some());
        slice.give(piece, Holder::Program);
        slice.give(piece, Holder::Program);
        assert!(slice.address(piece, LARGE).is_some(), "an object has it");
        slice.give(piece + UNIT, Holder::Object);
        assert!(slice.address(piece, 1).is_none());
    }

    #[test]
    fn a_piece_that_was_given_back_is_zero_again() {
        let slice = slice();
        let at = |offset| slice.address(offset, 1).expect("it is taken");
        let offset = slice.take(UNIT, Holder::Object).expect("there is room");
        // SAFETY: the mapping lives, and nobody else has it.
        unsafe { at(offset).write_volatile(7) };
        slice.give(offset, Holder::Object);
        let again = slice.take(UNIT, Holder::Object).expect("there is room");
        assert_eq!(again, offset);
        // SAFETY: as above.
        assert_eq!(unsafe { at(again).read_volatile() }, 0);
    }
}
