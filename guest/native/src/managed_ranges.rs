//! The ranges of managed memory.

use std::{
    io,
    ops::Range,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use crate::mappings::PAGE;

/// The most ranges.
const MOST: usize = 4096;

/// A range of managed memory, or room for one.
pub struct Managed {
    start: AtomicUsize,
    /// Its end: the start and whole pages. 0: room.
    pub end: AtomicUsize,
    /// Where it is in the slice.
    pub offset: AtomicU64,
    /// The number of the file of unified memory.
    pub file: AtomicU32,
}

/// All ranges, in no order. They change under the program's lock only. Looking for one takes no lock: whoever unmaps
/// other memory may have an allocator's lock, or be a thread that forks, and has nothing to wait for.
static RANGES: [Managed; MOST] = [const {
    Managed {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        offset: AtomicU64::new(0),
        file: AtomicU32::new(0),
    }
}; MOST];
/// From this one on there is room only.
static USED: AtomicUsize = AtomicUsize::new(0);

impl Managed {
    /// The addresses. Empty: room.
    pub fn addresses(&self) -> Range<usize> {
        let end = self.end.load(Ordering::Acquire);
        self.start.load(Ordering::Relaxed)..end
    }
}

/// A range that has some of these addresses, which are those of a mapping.
pub fn find(replaced: &Range<usize>) -> Option<&'static Managed> {
    RANGES[..USED.load(Ordering::Acquire)].iter().find(|known| {
        let known = known.addresses();
        known.start < replaced.end && known.end > replaced.start
    })
}

/// Adds a range. This thread has the program's lock.
pub fn add(addresses: Range<usize>, offset: u64, file: u32) -> io::Result<()> {
    let Range { start, end } = addresses;
    let is_room = |range: &Managed| range.end.load(Ordering::Relaxed) == 0;
    let at = RANGES.iter().position(is_room);
    let at = at.ok_or(io::ErrorKind::OutOfMemory)?;
    RANGES[at].start.store(start, Ordering::Relaxed);
    RANGES[at].offset.store(offset, Ordering::Relaxed);
    RANGES[at].file.store(file, Ordering::Relaxed);
    RANGES[at].end.store(end, Ordering::Release);
    USED.fetch_max(at + 1, Ordering::Release);
    Ok(())
}

/// There are no ranges any longer. This thread has the program's lock.
pub fn clear() {
    for range in &RANGES[..USED.swap(0, Ordering::Relaxed)] {
        range.end.store(0, Ordering::Relaxed);
    }
}

/// The pages of a mapping.
pub fn pages(start: usize, length: usize) -> Range<usize> {
    start..start.saturating_add(length.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX))
}

/// Whether managed memory is among these bytes.
pub fn is_among(start: usize, length: usize) -> bool {
    find(&pages(start, length)).is_some()
}
