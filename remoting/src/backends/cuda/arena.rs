//! Where a worker's driver puts memory: at addresses that no guest uses for anything else, so that
//! an address means the same to the application and to the device.
//!
//! All other free address space is filled before the driver is opened, with mappings that cannot be
//! accessed. The first 16 GiB stay free: NVIDIA's driver wants some low addresses (0x2_0560_0000 to
//! 0x3_0020_0000 with 580.159) whatever else is free, and fails without. So filled, it puts device
//! memory, pools and reservations into the arena, of every size.

use std::{io, ops::Range};

use crate::apis::cuda::WINDOW as WINDOW_START;

/// What stays free beside low addresses.
pub const ARENA: Range<u64> = 0x2000_0000_0000..0x3000_0000_0000;
/// Where the window goes, in guest and worker: the beginning of the arena. No window is larger.
pub const WINDOW: Range<u64> = WINDOW_START..WINDOW_START + (1 << 40);
/// Low addresses that stay free.
const LOW: u64 = 16 << 30;
/// The end of a process's addresses, with four levels of page tables.
const END: u64 = 0x7fff_ffff_f000;
/// Below this nothing can be mapped.
const START: u64 = 1 << 16;

/// Address space between mappings of this process, as the kernel lists it.
fn gaps() -> io::Result<Vec<Range<u64>>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut gaps = Vec::new();
    let mut end = START;
    for line in maps.lines() {
        let range = line.split(' ').next().unwrap_or_default();
        let Some((from, to)) = range.split_once('-') else {
            continue;
        };
        let number = |text| u64::from_str_radix(text, 16).unwrap_or(END);
        let (from, to) = (number(from), number(to));
        if from >= END {
            break;
        }
        if from > end {
            gaps.push(end..from);
        }
        end = to;
    }
    if end < END {
        gaps.push(end..END);
    }
    Ok(gaps)
}

/// What of a gap is to be filled: all but low addresses and the arena; below the stack, room for
/// it to grow.
fn filled(gap: &Range<u64>) -> [Range<u64>; 2] {
    // The stack's limit is 8 MiB as a rule, and threads' stacks are mappings of their own.
    const STACK: u64 = 64 << 20;
    let end = gap.end.saturating_sub(STACK).max(gap.start);
    let end = if gap.end == END { gap.end } else { end };
    let below = gap.start.max(LOW)..end.min(ARENA.start);
    let above = gap.start.max(ARENA.end)..end;
    [below, above]
}

fn reserve(range: &Range<u64>) -> io::Result<()> {
    let flags =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let length = (range.end - range.start) as usize;
    // SAFETY: new addresses only; nothing that is mapped is replaced.
    let got = unsafe { libc::mmap(range.start as *mut _, length, libc::PROT_NONE, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Fills the address space outside of the arena, and keeps the window's place in it. Ten mappings or
/// so: what cannot be filled stays as it is.
///
/// # Errors
/// The process cannot read its own mappings, or the window's place is taken.
pub fn fill() -> io::Result<()> {
    reserve(&WINDOW)?;
    for range in gaps()?.iter().flat_map(filled) {
        if range.start < range.end {
            // One that has grown since it was listed: the driver finds places all the same.
            let _ = reserve(&range);
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn low_addresses_and_the_arena_stay_free() {
        let whole = START..END;
        let [below, above] = filled(&whole);
        assert_eq!(below, LOW..ARENA.start);
        assert_eq!(above, ARENA.end..END);
        // Within the arena nothing is filled.
        let inside = 0x2100_0000_0000..0x2200_0000_0000;
        assert!(filled(&inside).iter().all(|part| part.start >= part.end));
    }
}
