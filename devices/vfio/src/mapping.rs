//! Maps BARs of a device into this process, from where they are mapped into the guest.

use std::io;

use base::{Access, Mapping};

use super::{
    Error,
    device::{Device, Mappable},
};

const PAGE: u64 = 4096;

/// A mapping of part of a BAR into this process.
pub struct BarMapping {
    /// The memory, in whole pages. The guest's mapping of it is removed before it is dropped.
    memory: Mapping,
    /// Offset in the BAR, in whole pages.
    pub offset: u64,
    /// The memory is read-only.
    pub read_only: bool,
}

impl BarMapping {
    fn new(from: &Mappable, offset: u64, len: u64) -> io::Result<Self> {
        let access = if from.writable {
            Access::ReadWrite
        } else {
            Access::Read
        };
        let at = from.offset.saturating_add(offset);
        Ok(Self {
            memory: Mapping::shared(from.file, at, len as usize, access)?,
            offset,
            read_only: !from.writable,
        })
    }

    /// Host virtual address.
    pub fn address(&self) -> *mut u8 {
        self.memory.start()
    }

    /// Length in bytes, in whole pages.
    pub fn len(&self) -> u64 {
        self.memory.len() as u64
    }
}

/// Maps the mappable parts of a BAR, except pages that overlap `trapped` ranges.
pub fn map_bar(
    device: &dyn Device,
    bar: u8,
    trapped: &[(u64, u64)],
) -> Result<Vec<BarMapping>, Error> {
    let Some(mappable) = device.mappable(bar.into()) else {
        return Ok(Vec::new());
    };
    without(&mappable.areas, trapped)
        .into_iter()
        .map(|(start, end)| {
            BarMapping::new(&mappable, start, end - start)
                .map_err(|source| Error::MapBar { bar, source })
        })
        .collect()
}

/// The whole pages of `areas`, except those that overlap `holes`. All ranges are (start, end).
fn without(areas: &[(u64, u64)], holes: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left: Vec<_> = areas
        .iter()
        .map(|(start, end)| (start.next_multiple_of(PAGE), end / PAGE * PAGE))
        .collect();
    for (from, to) in holes {
        let (from, to) = (from / PAGE * PAGE, to.next_multiple_of(PAGE));
        left = left
            .into_iter()
            .flat_map(|(start, end)| [(start, end.min(from)), (start.max(to), end)])
            .collect();
    }
    left.retain(|(start, end)| start < end);
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trapped_pages_are_cut_out_of_what_is_mapped() {
        assert_eq!(without(&[(0, 0x4000)], &[]), [(0, 0x4000)]);
        assert_eq!(
            without(&[(0, 0x4000)], &[(0x2010, 0x2020)]),
            [(0, 0x2000), (0x3000, 0x4000)]
        );
        assert_eq!(
            without(&[(0, 0x4000)], &[(0, 0x10), (0x3ff0, 0x4000)]),
            [(0x1000, 0x3000)]
        );
        assert_eq!(without(&[(0, 0x100)], &[]), [], "less than a page");
        assert_eq!(without(&[(0, 0x1000)], &[(0x800, 0x810)]), []);
    }
}
