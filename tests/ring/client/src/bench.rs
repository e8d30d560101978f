//! How something is measured.

use alloc::vec::Vec;

/// What the client needs besides the window.
pub trait Surroundings {
    /// Counts of the time stamp counter, or of another clock of about a gigahertz.
    fn now(&mut self) -> u64;
    /// Hands on what something is called.
    fn note(&mut self, what: &str, is: &str);
    /// Hands on how long one took of something that was measured, in counts: the median, and what
    /// 99 of 100 did not exceed.
    fn time(&mut self, what: &str, median: u64, most: u64);
    /// Hands on how many counts it took to copy so many bytes.
    fn copy(&mut self, what: &str, bytes: u64, median: u64);
    /// A stretch of [`COUNTED`] calls of one kind begins (`true`), or is over; there are two of each kind.
    fn counted(&mut self, begins: bool);
}

/// Calls in the stretch in which exits and system calls are counted.
pub const COUNTED: u32 = 10_000;

/// Samples of each figure, if they can be had in [`LONGEST`].
const SAMPLES: usize = 400;
/// Samples in any case.
const FEWEST: usize = 20;
/// Counts after which there are samples enough: about a second.
const LONGEST: u64 = 2_500_000_000;

/// Samples of one thing, or of several that are measured together.
pub struct Samples<const N: usize = 1> {
    begin: u64,
    all: [Vec<u64>; N],
}

impl<const N: usize> Samples<N> {
    /// None so far.
    pub fn new(here: &mut impl Surroundings) -> Self {
        Self {
            begin: here.now(),
            all: [const { Vec::new() }; N].map(|_: Vec<u64>| Vec::with_capacity(SAMPLES)),
        }
    }

    /// Whether there are not enough.
    pub fn goes_on(&self, here: &mut impl Surroundings) -> bool {
        let late = here.now().wrapping_sub(self.begin) > LONGEST;
        let count = self.count();
        count < FEWEST || (count < SAMPLES && !late)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all[0].len()
    }

    /// One more of each thing.
    pub fn add(&mut self, each: [u64; N]) {
        for (all, one) in self.all.iter_mut().zip(each) {
            all.push(one);
        }
    }

    /// Of each thing the median, and what 99 of 100 do not exceed; of one sample at least.
    pub fn summaries(self) -> [(u64, u64); N] {
        self.all.map(|mut samples| {
            samples.sort_unstable();
            let count = samples.len();
            (samples[count / 2], samples[count * 99 / 100])
        })
    }
}

/// Measures what one of `batch` takes.
pub fn time<E>(
    here: &mut impl Surroundings,
    what: &str,
    batch: u32,
    mut work: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    let mut samples = Samples::new(here);
    while samples.goes_on(here) {
        let start = here.now();
        for _ in 0..batch {
            work()?;
        }
        samples.add([here.now().wrapping_sub(start) / u64::from(batch)]);
    }
    let [(median, most)] = samples.summaries();
    here.time(what, median, most);
    Ok(())
}

/// Has exits and system calls counted: once for each kind of thing, as counting one would disturb the other.
pub fn count<E>(
    here: &mut impl Surroundings,
    mut work: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    for _ in 0..2 {
        here.counted(true);
        for _ in 0..COUNTED {
            work()?;
        }
        here.counted(false);
    }
    Ok(())
}

/// Measures copies to the device and back, by turns. `work` is told the direction.
pub fn copies<E>(
    here: &mut impl Surroundings,
    sizes: &[u64],
    mut work: impl FnMut(Direction, u64) -> Result<(), E>,
) -> Result<(), E> {
    for size in sizes {
        let mut samples = Samples::new(here);
        while samples.goes_on(here) {
            let start = here.now();
            work(Direction::Write, *size)?;
            let half = here.now();
            work(Direction::Read, *size)?;
            let end = here.now();
            samples.add([half.wrapping_sub(start), end.wrapping_sub(half)]);
        }
        for (what, (median, _)) in ["write", "read"].into_iter().zip(samples.summaries()) {
            here.copy(what, *size, median);
        }
    }
    Ok(())
}

/// Where a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the device.
    Write,
    /// From the device.
    Read,
}
