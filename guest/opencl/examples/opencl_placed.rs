//! Checks where large allocations are: in the window if `libgantry_malloc.so` is preloaded and the
//! driver shares a window on this machine, and otherwise in the C library's memory. Copies from and
//! to them have to be correct in any case.

use std::fs;

use device::Device;

mod device;

/// The size of a large allocation in bytes.
const LARGE: usize = 1 << 20;
const SMALL: usize = 1 << 10;

/// Whether this address is in a mapping of a window.
fn is_in_window(address: *const u8) -> Result<bool, String> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|error| error.to_string())?;
    let place = maps.lines().find(|line| {
        let range = line.split_once(' ').map_or("", |(range, _)| range);
        let (start, end) = range.split_once('-').unwrap_or_default();
        let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
        (number(start)..number(end)).contains(&(address as usize))
    });
    Ok(place.is_some_and(|line| line.contains("/memfd:gantry-window")))
}

/// The expected value of a byte.
fn byte(at: usize, round: usize) -> u8 {
    (at * 7 + at / LARGE + round) as u8
}

/// Grows an allocation to twice its size: by `malloc`, and then by `realloc`.
fn grown(round: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LARGE);
    bytes.extend((0..LARGE).map(|at| byte(at, round)));
    bytes.reserve_exact(LARGE);
    bytes.extend((LARGE..2 * LARGE).map(|at| byte(at, round)));
    bytes
}

fn main() -> Result<(), String> {
    let early = vec![1u8; LARGE];
    let device = Device::open(None)?;
    let mut inside = 0;
    for round in 0..8 {
        let from = grown(round);
        // By `calloc`, which must not expose previous contents.
        let mut to = vec![0u8; 2 * LARGE];
        if to.iter().any(|byte| *byte != 0) {
            return Err(format!("round {round}: fresh memory is not zero"));
        }
        for place in [from.as_ptr(), to.as_ptr()] {
            inside += usize::from(is_in_window(place)?);
        }
        device.there_and_back(from.as_ptr(), to.as_mut_ptr(), to.len())?;
        if to
            .iter()
            .enumerate()
            .any(|(at, there)| *there != byte(at, round))
        {
            return Err(format!("round {round}: what came back is something else"));
        }
    }
    let small = vec![1u8; SMALL];
    for (what, place) in [("early", early.as_ptr()), ("small", small.as_ptr())] {
        if is_in_window(place)? {
            return Err(format!("an {what} allocation is in the window"));
        }
    }
    println!("{inside} of 16 large allocations are in the window, and the data is right");
    Ok(())
}
