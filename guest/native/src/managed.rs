//! Managed memory: mappings of the file of unified memory. Natively the driver learns from the kernel when such a mapping
//! is replaced or unmapped; here the worker is told.

use std::{
    io,
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use nvidia_abi::wire::{Operation, Request};

use crate::{files::Program, memory, pinned};

const PAGE: usize = 4096;
/// The command that frees a range of addresses.
const FREE: u32 = 0x22;
/// The most ranges.
const MOST: usize = 4096;

/// A range of managed memory.
#[derive(Clone, Copy)]
struct Managed {
    start: usize,
    /// Whole pages.
    length: usize,
    /// Where it is in the slice.
    offset: u64,
    /// The number of the file of unified memory.
    file: u32,
}

/// All ranges, in no order. Nothing is allocated while they are locked, as an allocator may unmap memory.
pub struct Ranges {
    all: [Option<Managed>; MOST],
}

static RANGES: Mutex<Ranges> = Mutex::new(Ranges { all: [None; MOST] });
/// How many there are, for programs that have none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Waits for the ranges: no other thread has them while a process forks.
pub fn lock() -> MutexGuard<'static, Ranges> {
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ranges {
    /// This is another process, which inherits none.
    pub fn clear(&mut self) {
        if COUNT.swap(0, Ordering::Relaxed) > 0 {
            self.all.fill(None);
        }
    }

    fn find(&self, replaced: &Range<usize>) -> Option<usize> {
        let is_within = |known: &Option<Managed>| {
            known.is_some_and(|known| {
                known.start < replaced.end && known.start + known.length > replaced.start
            })
        };
        self.all.iter().position(is_within)
    }
}

/// The pages of a mapping.
fn pages(start: usize, length: usize) -> Range<usize> {
    start..start.saturating_add(length.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX))
}

/// Whether managed memory is among these bytes.
pub fn is_among(start: usize, length: usize) -> bool {
    COUNT.load(Ordering::Relaxed) > 0 && lock().find(&pages(start, length)).is_some()
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
        let length = end - start;
        // SAFETY: the caller's new mapping.
        let result = unsafe { libc::madvise(start as *mut _, length, libc::MADV_DONTFORK) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut ranges = lock();
        let slot = ranges.all.iter_mut().find(|slot| slot.is_none());
        let slot = slot.ok_or(io::ErrorKind::OutOfMemory)?;
        *slot = Some(Managed {
            start,
            length,
            offset,
            file,
        });
        COUNT.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// These bytes were unmapped, or something else was mapped there. Ranges of which nothing is left are freed.
    pub fn replaced(&mut self, start: usize, length: usize) {
        let mut replaced = pages(start, length);
        while !replaced.is_empty() {
            let ranges = lock();
            let Some(at) = ranges.find(&replaced) else {
                return;
            };
            let known = ranges.all[at];
            drop(ranges);
            // It was found there, and this thread has the program's lock, under which it is taken out.
            let Some(known) = known else { return };
            let end = known.start + known.length;
            let is_whole = replaced.start <= known.start && end <= replaced.end;
            if is_whole || !pinned::is_mapped(known.start, known.length, known.offset) {
                lock().all[at] = None;
                COUNT.fetch_sub(1, Ordering::Relaxed);
                self.free_range(known.file, known.start, known.length);
            } else {
                // A part of it is left. What was replaced before and behind it is looked at by itself.
                if replaced.start < known.start {
                    self.replaced(replaced.start, known.start - replaced.start);
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

/// Unmaps as the kernel does, and tells the worker what that frees.
///
/// # Safety
/// As for `munmap`.
pub unsafe fn unmap(start: usize, length: usize) -> io::Result<()> {
    // SAFETY: the caller's.
    unsafe { memory::unmap(start as *mut _, length)? };
    if is_among(start, length) {
        crate::files::program().replaced(start, length);
    }
    Ok(())
}
