//! Managed memory: mappings of the file of unified memory. Natively the driver learns from the kernel when such a mapping
//! is replaced or unmapped; here the worker is told.

use std::{
    io,
    ops::Range,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use nvidia_abi::wire::{Operation, Request};

use crate::{
    files::{self, Program},
    memory, pinned,
};

const PAGE: usize = 4096;
/// The command that frees a range of addresses.
const FREE: u32 = 0x22;
/// The most ranges.
const MOST: usize = 4096;

/// A range of managed memory, or room for one.
struct Managed {
    start: AtomicUsize,
    /// Its end: the start and whole pages. 0: room.
    end: AtomicUsize,
    /// Where it is in the slice.
    offset: AtomicU64,
    /// The number of the file of unified memory.
    file: AtomicU32,
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
    fn addresses(&self) -> Range<usize> {
        let end = self.end.load(Ordering::Acquire);
        self.start.load(Ordering::Relaxed)..end
    }
}

/// A range that has some of these addresses, which are those of a mapping.
fn find(replaced: &Range<usize>) -> Option<&'static Managed> {
    RANGES[..USED.load(Ordering::Acquire)].iter().find(|known| {
        let known = known.addresses();
        known.start < replaced.end && known.end > replaced.start
    })
}

/// There are no ranges any longer. This thread has the program's lock.
pub fn clear() {
    for range in &RANGES[..USED.swap(0, Ordering::Relaxed)] {
        range.end.store(0, Ordering::Relaxed);
    }
}

/// The pages of a mapping.
fn pages(start: usize, length: usize) -> Range<usize> {
    start..start.saturating_add(length.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX))
}

/// Whether managed memory is among these bytes.
pub fn is_among(start: usize, length: usize) -> bool {
    find(&pages(start, length)).is_some()
}

impl Program {
    /// A new mapping of managed memory. Children do not inherit it, as natively.
    pub fn note_managed(
        &mut self,
        start: usize,
        length: usize,
        offset: u64,
        file: u32,
    ) -> io::Result<()> {
        let Range { start, end } = pages(start, length);
        memory::keep_from_children(start as *mut _, end - start)?;
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

    /// These bytes were unmapped, or something else was mapped there. Ranges of which nothing is left are freed.
    pub fn replaced(&mut self, start: usize, length: usize) {
        let mut replaced = pages(start, length);
        while !replaced.is_empty() {
            let Some(known) = find(&replaced) else {
                return;
            };
            let Range { start, end } = known.addresses();
            let length = end - start;
            let is_whole = replaced.start <= start && end <= replaced.end;
            let offset = known.offset.load(Ordering::Relaxed);
            let is_mapped = self
                .slice()
                .is_some_and(|(_, shown)| pinned::is_mapped(shown, start, length, offset));
            if is_whole || !is_mapped {
                known.end.store(0, Ordering::Relaxed);
                self.free_range(known.file.load(Ordering::Relaxed), start, length);
            } else {
                // A part of it is left. What was replaced before and behind it is looked at by itself.
                if replaced.start < start {
                    self.replaced(replaced.start, start - replaced.start);
                }
                replaced.start = end;
            }
        }
    }

    /// Frees a range of addresses of unified memory.
    pub fn free_range(&mut self, file: u32, start: usize, length: usize) {
        let mut block = [0; 24];
        block[..8].copy_from_slice(&(start as u64).to_le_bytes());
        block[8..16].copy_from_slice(&(length as u64).to_le_bytes());
        let request = Request {
            operation: Operation::Call,
            file,
            a: 1,
            b: FREE.into(),
            length: 0,
        };
        // A worker that is gone has freed it, as has one whose file was closed.
        if let Ok(connection) = self.connection() {
            let _ = connection.send(request, &block, None, true);
        }
    }
}

/// Replaces what these bytes are, and tells the worker what that frees. No other thread maps managed memory between
/// the two: a range that it maps at the same address is not the one that was replaced.
pub fn replacing<T>(
    start: usize,
    length: usize,
    replace: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    // A thread that has the program already is about to fork, or frees memory of its own.
    if !is_among(start, length) || files::has_program() {
        return replace();
    }
    let mut program = files::program();
    let replaced = replace()?;
    program.replaced(start, length);
    Ok(replaced)
}
