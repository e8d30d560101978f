//! Video memory: a file, of which ranges can be backed by other files.
//!
//! Backing shares memory with others without copies. A mediator backs each partition by a file of
//! its own and passes it to the virtual machine's front. Pages that the CPU sees through BAR 3 are
//! backed by that BAR's file ([`bars`](super::bars)).

use std::{fs::File, io, ops::Range, sync::Arc};

use super::mapping::{Mapping, memory_file};
use crate::format::PAGE;

/// Video memory.
pub struct Vram {
    mapping: Mapping,
    /// The backing files, in ascending order of addresses and without gaps.
    homes: Vec<Home>,
}

#[derive(Clone)]
struct Home {
    range: Range<u64>,
    file: Arc<File>,
    offset: u64,
}

/// Why a range cannot be backed.
#[derive(Debug, thiserror::Error)]
pub enum BackError {
    /// The range does not consist of whole pages of this memory.
    #[error("{0:#x?} is no range of whole pages within {1:#x} bytes of VRAM")]
    Range(Range<u64>, u64),
    /// The file cannot be mapped.
    #[error("the file cannot be mapped over VRAM {0:#x?}")]
    Map(Range<u64>, #[source] io::Error),
}

impl Vram {
    /// Creates zeroed memory of this size in bytes, a multiple of 1 MiB. Untouched pages are not
    /// allocated.
    pub fn new(len: u64) -> io::Result<Self> {
        let file = Arc::new(memory_file(c"gf100-vram", len)?);
        let mapping = Mapping::new(&file, 0, len)?;
        let home = Home {
            range: 0..len,
            file,
            offset: 0,
        };
        Ok(Self {
            mapping,
            homes: vec![home],
        })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Whether it is empty, which cannot happen.
    pub fn is_empty(&self) -> bool {
        self.mapping.is_empty()
    }

    /// Reads bytes. Returns whether all of them exist.
    pub fn read(&self, at: u64, data: &mut [u8]) -> bool {
        self.mapping.read(at, data)
    }

    /// Writes bytes. Returns whether all of them fit.
    pub fn write(&self, at: u64, data: &[u8]) -> bool {
        self.mapping.write(at, data)
    }

    fn check(&self, range: &Range<u64>) -> Result<(), BackError> {
        let whole = range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE);
        if whole && range.start < range.end && range.end <= self.len() {
            return Ok(());
        }
        Err(BackError::Range(range.clone(), self.len()))
    }

    /// Backs a range by the bytes of a file from `offset`. The previous contents stay in the former
    /// file and are no longer visible; the range now contains the bytes of the new file.
    pub fn back(
        &mut self,
        range: Range<u64>,
        file: Arc<File>,
        offset: u64,
    ) -> Result<(), BackError> {
        self.show(&range, &file, offset)?;
        let mut homes = Vec::with_capacity(self.homes.len() + 2);
        for home in &self.homes {
            let before = home.range.start..home.range.end.min(range.start);
            let after = home.range.start.max(range.end)..home.range.end;
            for part in [before, after] {
                if part.start < part.end {
                    homes.push(Home {
                        offset: home.offset + (part.start - home.range.start),
                        range: part,
                        file: Arc::clone(&home.file),
                    });
                }
            }
        }
        homes.push(Home {
            range,
            file,
            offset,
        });
        homes.sort_by_key(|home| home.range.start);
        self.homes = homes;
        Ok(())
    }

    /// Like [`Self::back`], but temporarily: [`Self::restore`] ends it.
    pub(super) fn show(
        &mut self,
        range: &Range<u64>,
        file: &File,
        offset: u64,
    ) -> Result<(), BackError> {
        self.check(range)?;
        self.mapping
            .replace(range.start, file, offset, range.end - range.start)
            .map_err(|source| BackError::Map(range.clone(), source))
    }

    /// Restores the permanent backing of a range.
    pub(super) fn restore(&mut self, range: &Range<u64>) -> Result<(), BackError> {
        self.check(range)?;
        for home in &self.homes {
            let part = home.range.start.max(range.start)..home.range.end.min(range.end);
            if part.start < part.end {
                let offset = home.offset + (part.start - home.range.start);
                self.mapping
                    .replace(part.start, &home.file, offset, part.end - part.start)
                    .map_err(|source| BackError::Map(part.clone(), source))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn byte(vram: &Vram, at: u64) -> u8 {
        let mut byte = [0];
        assert!(vram.read(at, &mut byte));
        byte[0]
    }

    #[test]
    fn a_backed_range_is_the_files_memory() {
        let mut vram = Vram::new(1 << 20).expect("there is room");
        let file = Arc::new(memory_file(c"partition", 3 * PAGE).expect("there is room"));
        let other = Mapping::new(&file, 0, 3 * PAGE).expect("it has that much");
        vram.back(PAGE..3 * PAGE, Arc::clone(&file), PAGE)
            .expect("it is whole pages");
        vram.write(PAGE + 5, &[7]);
        other.write(2 * PAGE, &[8]);
        let mut seen = [0];
        other.read(PAGE + 5, &mut seen);
        assert_eq!(seen, [7]);
        assert_eq!(byte(&vram, 2 * PAGE), 8);
    }

    #[test]
    fn what_is_shown_for_a_while_goes_back_to_its_home() {
        let mut vram = Vram::new(1 << 20).expect("there is room");
        let home = Arc::new(memory_file(c"partition", 4 * PAGE).expect("there is room"));
        vram.back(0..4 * PAGE, Arc::clone(&home), 0)
            .expect("it is whole pages");
        vram.write(2 * PAGE, &[1]);
        let bar = memory_file(c"bar", PAGE).expect("there is room");
        vram.show(&(2 * PAGE..3 * PAGE), &bar, 0)
            .expect("it is a page");
        assert_eq!(byte(&vram, 2 * PAGE), 0);
        vram.restore(&(2 * PAGE..3 * PAGE)).expect("it is a page");
        assert_eq!(byte(&vram, 2 * PAGE), 1);
    }

    #[test]
    fn ranges_outside_are_refused() {
        let mut vram = Vram::new(1 << 20).expect("there is room");
        let file = Arc::new(memory_file(c"partition", PAGE).expect("there is room"));
        for range in [PAGE / 2..PAGE, PAGE..PAGE, 1 << 20..(1 << 20) + PAGE] {
            assert!(matches!(
                vram.back(range, Arc::clone(&file), 0),
                Err(BackError::Range(..))
            ));
        }
        let long = vram.back(0..2 * PAGE, file, 0);
        assert!(matches!(long, Err(BackError::Map(..))));
        assert!(!vram.read((1 << 20) - 1, &mut [0; 2]));
    }
}
