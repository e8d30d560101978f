//! Managed memory: mappings of the file of unified memory. Natively the driver learns from the kernel when such a mapping
//! is replaced or unmapped; here the worker is told.

use std::{io, ops::Range, sync::atomic::Ordering};

use nvidia_abi::wire::{Operation, Request};

use crate::{
    files::{self, Program},
    managed_ranges::{self, find, is_among, pages},
    mappings, memory,
};

/// The command that frees a range of addresses.
const FREE: u32 = 0x22;
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
        managed_ranges::add(start..end, offset, file)
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
                .is_some_and(|(_, shown)| mappings::is_mapped(shown, start, length, offset));
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
