//! A guest's program that continuously checks whether memory is unchanged, and writes it at a set
//! rate.
//!
//! It prints a line every second: how many pages it has checked and in which time, and how many of
//! them it has written, as far as the rate allows. If a page is wrong, that is the last line.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

/// Number of 64-bit words per page.
const PAGE: usize = 512;

/// Number of pages checked between two reads of the clock.
const AT_ONCE: usize = 64;

/// Checks `mib` MiB forever, and writes `rate` MiB of them per second. Sleeps for `pause` after each [`AT_ONCE`] pages;
/// if it is zero, it only yields, and uses all of its CPU.
pub fn run(mib: usize, rate: usize, pause: Duration) -> Result<()> {
    let pages = mib * 256;
    ensure!(pages > 0, "there is no memory to check");
    let mut memory = vec![0_u64; pages * PAGE];
    let mut written = vec![0_u64; pages];
    let (began, mut said) = (Instant::now(), Instant::now());
    let (mut looked_at, mut writes) = (0_usize, 0_usize);
    loop {
        for _ in 0..AT_ONCE {
            let at = looked_at % pages;
            let page = &mut memory[at * PAGE..][..PAGE];
            for (word, found) in page.iter().enumerate() {
                let expected = pattern(written[at], at, word);
                ensure!(
                    *found == expected,
                    "wrong: page {at}, word {word} is {found:#x} and was written as {expected:#x}"
                );
            }
            if writes < allowed(began.elapsed(), rate) {
                written[at] += 1;
                for (word, value) in page.iter_mut().enumerate() {
                    *value = pattern(written[at], at, word);
                }
                writes += 1;
            }
            looked_at += 1;
        }
        if said.elapsed() >= Duration::from_secs(1) {
            said = Instant::now();
            let ms = began.elapsed().as_millis();
            println!("{looked_at} pages looked at in {ms} ms, {writes} of them written");
        }
        match pause {
            Duration::ZERO => thread::yield_now(),
            pause => thread::sleep(pause),
        }
    }
}

/// Number of pages that may have been written by then.
fn allowed(time: Duration, mib_a_second: usize) -> usize {
    usize::try_from(time.as_micros() * mib_a_second as u128 * 256 / 1_000_000).unwrap_or(usize::MAX)
}

/// The value of a word after this many writes; 0 before the first one.
fn pattern(times: u64, page: usize, word: usize) -> u64 {
    (times << 40 | (page as u64) << 16 | word as u64) * u64::from(times > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_written_as_often_as_the_rate_allows_and_words_differ() {
        assert_eq!(allowed(Duration::from_millis(500), 4), 512);
        assert_eq!(allowed(Duration::ZERO, 4), 0);
        assert_eq!(pattern(0, 3, 5), 0);
        let some = [
            pattern(1, 3, 5),
            pattern(2, 3, 5),
            pattern(1, 4, 5),
            pattern(1, 3, 6),
        ];
        for (at, one) in some.iter().enumerate() {
            assert!(!some[at + 1..].contains(one), "{some:?}");
        }
    }
}
