//! Whether this machine caches the window. Programs and devices share memory in it, and rely on the order of stores: a
//! window whose caching type is the one that this guest's kernel asks for (as on AMD, or beside some devices that were
//! passed through) is none of memory, and is a hundred times slower.

use std::{
    fs::File,
    hint::black_box,
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use base::{Access, Mapping};

/// Where the lines of the rings begin, and how many bytes of them to read.
const START: u64 = 8192;
const LENGTH: usize = 256 << 10;
/// How often to read them. The fastest time counts: another program may have had the processor.
const ROUNDS: usize = 16;
/// Bytes per second. Cached memory is read at ten times this rate and more, other memory at a fifth of it.
const LEAST: u64 = 200_000_000;

/// Whether cached memory is read at this speed.
fn is_fast(bytes: usize, time: Duration) -> bool {
    bytes as u128 * 1_000_000_000 >= u128::from(LEAST) * time.as_nanos()
}

/// The shortest time in which the lines of the rings at the beginning of a window were read.
pub fn measure(window: &OwnedFd) -> io::Result<Duration> {
    let window = File::from(window.try_clone()?);
    let lines = Mapping::shared(&window, START, LENGTH, Access::Read)?;
    let read = |_| {
        let since = Instant::now();
        for at in 0..LENGTH / size_of::<u64>() {
            // SAFETY: within the mapping and aligned. Any bytes are a number.
            black_box(unsafe { lines.start().cast::<u64>().add(at).read_volatile() });
        }
        since.elapsed()
    };
    Ok((0..ROUNDS).map(read).min().unwrap_or_default())
}

/// Whether this machine caches the window, by the time that [`measure`] took. `has_told`: whether it was said that it
/// does not.
pub fn check(time: Duration, has_told: &mut bool) -> bool {
    let is_cached = is_fast(LENGTH, time);
    if !is_cached && !*has_told {
        base::note!(
            "gantry-agent: native contexts are refused on this host: the port's window is not write-back ({} KiB were \
             read in {} us)",
            LENGTH >> 10,
            time.as_micros()
        );
    }
    *has_told = !is_cached;
    is_cached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_read_slowly_is_not_cached() {
        // Cached, in a busy machine; uncached, 100 ns for 8 bytes.
        for (bytes, nanoseconds, expected) in [
            (LENGTH, 30_000, true),
            (LENGTH, 1_000_000, true),
            (LENGTH, 3_200_000, false),
            (LENGTH, 0, true),
        ] {
            let time = Duration::from_nanos(nanoseconds);
            assert_eq!(is_fast(bytes, time), expected, "{nanoseconds}");
        }
    }

    #[test]
    fn a_window_of_memory_is_cached() {
        let window = remoting_transport::mapping::create(8 << 20).unwrap();
        assert!(check(measure(&window).unwrap(), &mut false));
    }
}
