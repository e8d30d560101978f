//! Hybridsort: distributes floats to buckets, and sorts each bucket by merging.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use gloop::{
    cuda::{Address, Args, Buffer},
    job::{Grid, Job},
};

use crate::bed::{Bed, Stops};

/// The parameters of hybridsort.cu.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Sort {
    input: Address,
    a: Address,
    b: Address,
    pivots: Address,
    count: Address,
    start: Address,
    cursor: Address,
    elements: u32,
}

const BUCKETS: usize = 1024;
/// The number of elements that a block distributes to buckets.
const CHUNK: usize = 8192;
/// The number of elements that are sorted at a time.
const TILE: u32 = 2048;
const THREADS: u32 = 256;

/// The elements, and the versions that sort them.
pub struct HybridSort {
    sort: Sort,
    chunks: u32,
    elements: Vec<f32>,
    sorted: Buffer,
    count: Buffer,
    start: Buffer,
    _memory: [Buffer; 4],
}

impl HybridSort {
    pub fn new(bed: &Bed, elements: usize) -> Result<Self> {
        let gpu = bed.runtime.gpu();
        let mut random = fastrand::Rng::with_seed(17);
        // Denser around zero.
        let elements: Vec<f32> = (0..elements)
            .map(|_| random.f32() * random.f32() * 1000.0)
            .collect();
        let mut sample: Vec<f32> = (0..BUCKETS * 64)
            .map(|_| elements[random.usize(..elements.len())])
            .collect();
        sample.sort_by(f32::total_cmp);
        let pivots: Vec<f32> = sample.chunks(64).skip(1).map(|part| part[0]).collect();
        let bytes = elements.len() * 4;
        let (input, pivots) = (gpu.upload(&elements)?, gpu.upload(&pivots)?);
        let (sorted, other) = (gpu.allocate(bytes)?, gpu.allocate(bytes)?);
        let (count, start) = (gpu.allocate(BUCKETS * 4)?, gpu.allocate((BUCKETS + 1) * 4)?);
        let cursor = gpu.allocate(BUCKETS * 4)?;
        let sort = Sort {
            input: input.at(),
            a: sorted.at(),
            b: other.at(),
            pivots: pivots.at(),
            count: count.at(),
            start: start.at(),
            cursor: cursor.at(),
            elements: elements.len() as u32,
        };
        Ok(Self {
            sort,
            chunks: elements.len().div_ceil(CHUNK) as u32,
            elements,
            sorted,
            count,
            start,
            _memory: [input, other, pivots, cursor],
        })
    }

    fn launch(&self, bed: &Bed, kernel: &str, blocks: u32, args: &Args) -> Result<()> {
        let kernel = bed.kernel("hybridsort", kernel)?;
        Ok(bed.stream.launch(&kernel, blocks, THREADS, 0, None, args)?)
    }

    /// Distributes the elements to buckets, without waiting for completion.
    fn fill_buckets(&self, bed: &Bed) -> Result<()> {
        let args = Args::new().with(self.sort);
        self.launch(bed, "vanilla_count", self.chunks, &args)?;
        self.launch(bed, "vanilla_starts", 1, &args)?;
        self.launch(bed, "vanilla_scatter", self.chunks, &args)
    }

    pub fn vanilla(&self, bed: &Bed) -> Result<Duration> {
        self.count.clear()?;
        let start = Instant::now();
        self.fill_buckets(bed)?;
        let args = Args::new().with(self.sort);
        self.launch(bed, "vanilla_merge", BUCKETS as u32, &args)?;
        bed.stream.wait()?;
        Ok(start.elapsed())
    }

    /// One kernel for each phase of sorting the buckets.
    pub fn split(&self, bed: &Bed) -> Result<Duration> {
        self.count.clear()?;
        let begun = Instant::now();
        self.fill_buckets(bed)?;
        bed.stream.wait()?;
        let starts = self.start.download::<u32>()?;
        let largest = starts.windows(2).map(|both| both[1] - both[0]).max();
        let tiles = largest.unwrap_or(0).div_ceil(TILE).next_power_of_two();
        // The tiles, one merge for each doubling, and a copy.
        for phase in 0..tiles.ilog2() + 2 {
            let args = Args::new().with(self.sort).with(phase);
            self.launch(bed, "split_merge", BUCKETS as u32, &args)?;
        }
        bed.stream.wait()?;
        Ok(begun.elapsed())
    }

    /// The loop versions, to be run one after the other.
    pub fn jobs(&self, bed: &Bed) -> Result<Vec<Job>> {
        let kernels = [
            ("looped_count", self.chunks),
            ("looped_starts", 1),
            ("looped_scatter", self.chunks),
            ("looped_merge", BUCKETS as u32),
        ];
        let job = |(name, blocks)| {
            let kernel = bed.kernel("hybridsort", name)?;
            let grid = Grid::logical(blocks).threads(THREADS);
            let args = Args::new().with(self.sort);
            Ok(bed.runtime.prepare(&kernel, grid, args)?)
        };
        kernels.into_iter().map(job).collect()
    }

    /// Runs all of them once. Returns the time.
    pub fn looped(&self, jobs: &mut [Job]) -> Result<Duration> {
        self.count.clear()?;
        let start = Instant::now();
        for job in &mut *jobs {
            job.resume()?;
            job.finish()?;
        }
        let took = start.elapsed();
        for job in jobs {
            job.rewind()?;
        }
        Ok(took)
    }

    /// Reads the result, and clears it.
    fn output(&self) -> Result<Vec<f32>> {
        let output = self.sorted.download()?;
        self.sorted.clear()?;
        Ok(output)
    }
}

pub fn hybridsort(bed: &Bed, stops: &mut Stops) -> Result<()> {
    let program = HybridSort::new(bed, 8_000_000)?;
    let mut expected = program.elements.clone();
    expected.sort_by(f32::total_cmp);
    program.vanilla(bed)?;
    ensure!(
        program.output()? == expected,
        "the vanilla version does not sort"
    );
    program.split(bed)?;
    ensure!(program.output()? == expected, "the split version differs");
    let mut jobs = program.jobs(bed)?;
    loop {
        program.count.clear()?;
        for job in &mut jobs {
            stops.run(job, Duration::from_micros(60))?;
        }
        ensure!(program.output()? == expected, "the loops differ");
        for job in &mut jobs {
            job.rewind()?;
        }
        if !stops.more() {
            return Ok(());
        }
    }
}
