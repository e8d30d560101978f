//! Makes a worker's driver place memory at addresses that no guest uses for anything else, so that
//! an address means the same to the application and to the device.
//!
//! Before the driver is opened, all other free address space is filled with inaccessible mappings.
//! The first 16 GiB stay free: NVIDIA's driver needs some low addresses (0x2_0560_0000 to
//! 0x3_0020_0000 with 580.159) whatever else is free, and fails without them. With the rest filled,
//! it places device memory, pools and reservations of every size in the arena.

use std::{io, ops::Range};

use remoting_proto::apis::cuda::WINDOW as WINDOW_START;

/// The range that stays free besides the low addresses.
pub const ARENA: Range<u64> = 0x2000_0000_0000..0x3000_0000_0000;
/// The window's addresses, in guest and worker: the start of the arena. No window is larger.
pub const WINDOW: Range<u64> = WINDOW_START..WINDOW_START + (1 << 40);
/// Addresses below this stay free.
const LOW: u64 = 16 << 30;
/// The end of a process's address space with four-level page tables.
const END: u64 = 0x7fff_ffff_f000;
/// Nothing can be mapped below this address.
const START: u64 = 1 << 16;

/// The gaps between this process's mappings, as listed by the kernel.
fn gaps() -> io::Result<Vec<Range<u64>>> {
    let maps = base::proc::read("/proc/self/maps")?;
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

/// The parts of a gap to fill: all but low addresses and the arena. Below the stack, room for its
/// growth is left.
fn filled(gap: &Range<u64>) -> [Range<u64>; 2] {
    // The stack's limit is usually 8 MiB, and threads' stacks are mappings of their own.
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
    // SAFETY: maps only unused addresses; MAP_FIXED_NOREPLACE replaces no existing mapping.
    let got = unsafe { libc::mmap(range.start as *mut _, length, libc::PROT_NONE, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Fills the address space outside the arena, and reserves the window's place in it. This takes
/// about ten mappings. Gaps that cannot be filled stay free.
///
/// # Errors
/// The process cannot read its own mappings, or the window's place is taken.
pub fn fill() -> io::Result<()> {
    reserve(&WINDOW)?;
    for range in gaps()?.iter().flat_map(filled) {
        if range.start < range.end {
            // A mapping may have grown into the gap since it was listed. The driver still finds its
            // places.
            let _ = reserve(&range);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_addresses_and_the_arena_stay_free() {
        let whole = START..END;
        let [below, above] = filled(&whole);
        assert_eq!(below, LOW..ARENA.start);
        assert_eq!(above, ARENA.end..END);
        // Nothing is filled within the arena.
        let inside = 0x2100_0000_0000..0x2200_0000_0000;
        assert!(filled(&inside).iter().all(|part| part.start >= part.end));
    }
}
