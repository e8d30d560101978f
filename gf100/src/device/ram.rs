//! System memory that its owner lends to the GPU: address ranges, each part of a file.

use std::{collections::BTreeMap, fs::File, io};

use super::mapping::Mapping;

/// Maximum number of lent ranges.
pub const MAX_RANGES: usize = 1 << 14;

/// System memory by the address at which the GPU sees it on its bus.
#[derive(Default)]
pub struct Ram {
    ranges: BTreeMap<u64, Mapping>,
}

impl Ram {
    /// Lends the GPU `len` bytes at `address`: the bytes of a file from `offset`. The range must
    /// not overlap a lent one.
    pub fn lend(&mut self, address: u64, file: &File, offset: u64, len: u64) -> io::Result<()> {
        let end = address
            .checked_add(len)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let before = self.ranges.range(..end).next_back();
        let overlaps = before.is_some_and(|(start, range)| start + range.len() > address);
        if overlaps || self.ranges.len() >= MAX_RANGES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.ranges
            .insert(address, Mapping::new(file, offset, len)?);
        Ok(())
    }

    /// Takes back the range that was lent at an address.
    pub fn take_back(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    /// Finds the range that contains `len` bytes from an address, and the offset in it.
    fn find(&self, at: u64, len: usize) -> Option<(&Mapping, u64)> {
        let (start, range) = self.ranges.range(..=at).next_back()?;
        let offset = at - start;
        let fits = offset.checked_add(len as u64)? <= range.len();
        fits.then_some((range, offset))
    }

    /// Reads bytes. Returns whether one lent range contains all of them.
    pub fn read(&self, at: u64, data: &mut [u8]) -> bool {
        self.find(at, data.len())
            .is_some_and(|(range, offset)| range.read(offset, data))
    }

    /// Writes bytes. Returns whether one lent range contains all of them.
    pub fn write(&self, at: u64, data: &[u8]) -> bool {
        self.find(at, data.len())
            .is_some_and(|(range, offset)| range.write(offset, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::mapping::memory_file;

    #[test]
    fn only_what_is_lent_can_be_reached() {
        let file = memory_file(c"ram", 0x3000).expect("there is room");
        let mut ram = Ram::default();
        ram.lend(0x10_0000, &file, 0x1000, 0x2000)
            .expect("the file has it");
        assert!(ram.write(0x10_1ffc, &[1, 2, 3, 4]));
        assert!(!ram.write(0x10_1ffd, &[1, 2, 3, 4]));
        assert!(!ram.read(0x0f_ffff, &mut [0]));
        assert!(ram.lend(0x10_1000, &file, 0, 0x1000).is_err());
        assert!(ram.lend(0x20_0000, &file, 0x1000, 0x3000).is_err());
        ram.take_back(0x10_0000);
        assert!(!ram.read(0x10_0000, &mut [0]));
    }
}
