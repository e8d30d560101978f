//! How measurements are taken.

use alloc::vec::Vec;

/// What the client needs besides the window.
pub trait Surroundings {
    /// Reads the time-stamp counter, or another clock of about a gigahertz.
    fn now(&mut self) -> u64;
    /// Reports a note: a label and its text.
    fn note(&mut self, what: &str, is: &str);
    /// Reports the duration of one operation in counts: the median and the 99th percentile.
    fn time(&mut self, what: &str, median: u64, most: u64);
    /// Reports the median duration of a copy of `bytes` bytes in counts.
    fn copy(&mut self, what: &str, bytes: u64, median: u64);
    /// A series of [`COUNTED`] calls of one kind begins (`true`) or is over. There are two series
    /// of each kind.
    fn counted(&mut self, begins: bool);
}

/// Number of calls in the series during which exits and system calls are counted.
pub const COUNTED: u32 = 10_000;

/// Number of samples of each figure, unless that takes longer than [`LONGEST`].
const SAMPLES: usize = 400;
/// Minimum number of samples.
const FEWEST: usize = 20;
/// Counts after which the minimum suffices: about a second.
const LONGEST: u64 = 2_500_000_000;

/// Samples of one operation, or of several that are measured together.
pub struct Samples<const N: usize = 1> {
    begin: u64,
    all: [Vec<u64>; N],
}

impl<const N: usize> Samples<N> {
    /// Starts without samples.
    pub fn new(here: &mut impl Surroundings) -> Self {
        Self {
            begin: here.now(),
            all: [const { Vec::new() }; N].map(|_: Vec<u64>| Vec::with_capacity(SAMPLES)),
        }
    }

    /// Whether more samples are needed.
    pub fn goes_on(&self, here: &mut impl Surroundings) -> bool {
        let late = here.now().wrapping_sub(self.begin) > LONGEST;
        let count = self.count();
        count < FEWEST || (count < SAMPLES && !late)
    }

    /// Number of samples.
    pub fn count(&self) -> usize {
        self.all[0].len()
    }

    /// Adds a sample of each operation.
    pub fn add(&mut self, each: [u64; N]) {
        for (all, one) in self.all.iter_mut().zip(each) {
            all.push(one);
        }
    }

    /// The median and the 99th percentile of each operation. Needs at least one sample.
    pub fn summaries(self) -> [(u64, u64); N] {
        self.all.map(|mut samples| {
            samples.sort_unstable();
            let count = samples.len();
            (samples[count / 2], samples[count * 99 / 100])
        })
    }
}

/// Measures the time of one of `batch` operations.
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

/// Makes exits and system calls be counted, separately for each kind, because counting one would
/// disturb the other.
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

/// Measures copies to the device and back, alternating. `work` gets the direction.
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

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the device.
    Write,
    /// From the device.
    Read,
}
