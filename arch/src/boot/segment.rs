//! Pieces of a kernel's file, and whether the guest has room for them.

use std::io::{Read, Seek, SeekFrom};

use super::BootError;
use crate::layout::{AddressMap, AddressRange, HIGH_RAM_START, MIB};

/// Fills `buf` from offset `at`; errors name it `what`.
pub fn read_at<F: Read + Seek>(
    file: &mut F,
    at: u64,
    buf: &mut [u8],
    size: u64,
    what: &'static str,
) -> Result<(), BootError> {
    let needed = at.saturating_add(buf.len() as u64);
    if needed > size {
        return Err(BootError::Truncated { what, needed, size });
    }
    file.seek(SeekFrom::Start(at))
        .and_then(|_| file.read_exact(buf))
        .map_err(|source| BootError::ReadKernel { what, source })
}

/// Checks that the guest has RAM for all of `range`, and that it is above the boot data.
pub fn check_footprint(map: &AddressMap, range: AddressRange) -> Result<(), BootError> {
    if range.start < HIGH_RAM_START {
        return Err(BootError::BadHeader {
            what: "its load address",
            value: range.start,
        });
    }
    if range.end() > map.low_ram().end() || range.overlaps(&map.hole()) {
        return Err(BootError::KernelDoesNotFit {
            start: range.start,
            end: range.end(),
            ram: map.low_ram().size / MIB,
        });
    }
    Ok(())
}
