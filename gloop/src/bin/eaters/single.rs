//! Programs that only compute: throttle, LavaMD and TPACF.

use std::time::Duration;

use anyhow::{Result, ensure};
use gloop::{
    cuda::{Address, Args, Buffer},
    job::{Grid, Job},
};

use crate::bed::{Bed, Stops};

/// The parameters of throttle.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Steps {
    pub out: Address,
    pub count: u32,
    pub cycles: u32,
}

pub fn throttle(bed: &Bed, stops: &mut Stops) -> Result<()> {
    const BLOCKS: u32 = 528;
    // Half a microsecond each.
    let cycles = bed.runtime.gpu().clock / 2000;
    let out = bed.runtime.gpu().allocate(BLOCKS as usize * 4)?;
    let steps = Steps {
        out: out.at(),
        count: 20_000,
        cycles,
    };
    let args = || Args::new().with(steps);
    bed.native(&bed.kernel("throttle", "vanilla")?, BLOCKS, 256, &args())?;
    let expected = out.download::<u32>()?;
    ensure!(
        expected[0] != 0 && expected[1] != expected[0],
        "nothing was computed"
    );
    let few = Steps {
        count: 100,
        ..steps
    };
    bed.native(
        &bed.kernel("throttle", "vanilla")?,
        BLOCKS,
        256,
        &Args::new().with(few),
    )?;
    let expected_of_few = out.download::<u32>()?;
    bed.native(&bed.kernel("throttle", "begin")?, BLOCKS, 256, &args())?;
    for _ in 0..few.count {
        bed.native(&bed.kernel("throttle", "split")?, BLOCKS, 256, &args())?;
    }
    ensure!(
        out.download::<u32>()? == expected_of_few,
        "the split version differs"
    );
    let grid = Grid::logical(BLOCKS).threads(256);
    let mut jobs = Vec::new();
    for name in ["posted", "checked", "posted_device"] {
        jobs.push((
            name,
            bed.runtime
                .prepare(&bed.kernel("throttle", name)?, grid, args())?,
        ));
    }
    loop {
        for (name, job) in &mut jobs {
            out.clear()?;
            stops.run(job, Duration::from_micros(60))?;
            ensure!(out.download::<u32>()? == expected, "{name} differs");
            job.rewind()?;
        }
        if !stops.more() {
            return Ok(());
        }
    }
}

/// The parameters of lavamd.cu.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Boxes {
    position: Address,
    charge: Address,
    force: Address,
    side: u32,
    first: u32,
    alpha: f32,
}

/// LavaMD's boxes, and its versions.
pub struct LavaMd {
    boxes: Boxes,
    pub count: u32,
    force: Buffer,
    _memory: [Buffer; 2],
}

impl LavaMd {
    pub fn new(bed: &Bed, side: u32) -> Result<Self> {
        let gpu = bed.runtime.gpu();
        let mut random = fastrand::Rng::with_seed(7);
        let count = side.pow(3);
        let particles = count as usize * 100;
        let mut position = Vec::with_capacity(particles);
        for _ in 0..particles {
            let [x, y, z] = [random.f32(), random.f32(), random.f32()];
            position.push([x, y, z, x * x + y * y + z * z]);
        }
        let charge: Vec<f32> = (0..particles).map(|_| random.f32()).collect();
        let (position, charge) = (gpu.upload(&position)?, gpu.upload(&charge)?);
        let force = gpu.allocate(particles * 16)?;
        let boxes = Boxes {
            position: position.at(),
            charge: charge.at(),
            force: force.at(),
            side,
            first: 0,
            alpha: 0.5,
        };
        Ok(Self {
            boxes,
            count,
            force,
            _memory: [position, charge],
        })
    }

    pub fn vanilla(&self, bed: &Bed) -> Result<Duration> {
        let kernel = bed.kernel("lavamd", "vanilla")?;
        bed.native(&kernel, self.count, 128, &Args::new().with(self.boxes))
    }

    /// Kernels of this many boxes each.
    pub fn split(&self, bed: &Bed, boxes: u32) -> Result<Duration> {
        let kernel = bed.kernel("lavamd", "split")?;
        let start = std::time::Instant::now();
        for first in (0..self.count).step_by(boxes as usize) {
            let slice = Boxes {
                first,
                ..self.boxes
            };
            let many = boxes.min(self.count - first);
            bed.stream
                .launch(&kernel, many, 128, 0, None, &Args::new().with(slice))?;
        }
        bed.stream.wait()?;
        Ok(start.elapsed())
    }

    pub fn job(&self, bed: &Bed) -> Result<Job> {
        let kernel = bed.kernel("lavamd", "looped")?;
        let grid = Grid::logical(self.count).threads(128);
        Ok(bed
            .runtime
            .prepare(&kernel, grid, Args::new().with(self.boxes))?)
    }

    /// The same work this many times in one job, which takes long enough to be shared.
    pub fn repeated(&self, bed: &Bed, times: u32) -> Result<Job> {
        let kernel = bed.kernel("lavamd", "repeated")?;
        let grid = Grid {
            logical: [self.count, times, 1],
            ..Grid::logical(1).threads(128)
        };
        Ok(bed
            .runtime
            .prepare(&kernel, grid, Args::new().with(self.boxes))?)
    }

    /// Reads the result, and clears it.
    fn output(&self) -> Result<Vec<u32>> {
        let output = self.force.download()?;
        self.force.clear()?;
        Ok(output)
    }
}

pub fn lavamd(bed: &Bed, stops: &mut Stops) -> Result<()> {
    let program = LavaMd::new(bed, 24)?;
    program.vanilla(bed)?;
    let expected = program.output()?;
    ensure!(
        expected.iter().all(|word| *word != 0),
        "nothing was computed"
    );
    program.split(bed, 1000)?;
    ensure!(program.output()? == expected, "the split version differs");
    let mut job = program.job(bed)?;
    loop {
        stops.run(&mut job, Duration::from_micros(60))?;
        ensure!(program.output()? == expected, "the loop differs");
        job.rewind()?;
        if !stops.more() {
            return Ok(());
        }
    }
}

/// The parameters of tpacf.cu.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Sky {
    points: Address,
    edges: Address,
    histogram: Address,
    tiles: u32,
    first: u32,
    last: u32,
}

/// TPACF's points, and its versions.
pub struct Tpacf {
    sky: Sky,
    histogram: Buffer,
    _memory: [Buffer; 2],
}

impl Tpacf {
    pub fn new(bed: &Bed, tiles: u32) -> Result<Self> {
        let gpu = bed.runtime.gpu();
        let mut random = fastrand::Rng::with_seed(11);
        let mut points = Vec::new();
        while points.len() < tiles as usize * 256 {
            let [x, y, z] = [0; 3].map(|_| random.f32() * 2.0 - 1.0);
            let length = (x * x + y * y + z * z).sqrt();
            if (0.1..1.0).contains(&length) {
                points.push([x / length, y / length, z / length, 0.0]);
            }
        }
        let edges: Vec<f32> = (1u8..64)
            .map(|bin| (f32::from(bin) / 64.0 * std::f32::consts::PI).cos())
            .collect();
        let (points, edges) = (gpu.upload(&points)?, gpu.upload(&edges)?);
        let histogram = gpu.allocate(64 * 8)?;
        let sky = Sky {
            points: points.at(),
            edges: edges.at(),
            histogram: histogram.at(),
            tiles,
            first: 0,
            last: tiles,
        };
        Ok(Self {
            sky,
            histogram,
            _memory: [points, edges],
        })
    }

    pub fn vanilla(&self, bed: &Bed) -> Result<Duration> {
        let kernel = bed.kernel("tpacf", "vanilla")?;
        bed.native(&kernel, self.sky.tiles, 256, &Args::new().with(self.sky))
    }

    /// Kernels of this many tiles each.
    pub fn split(&self, bed: &Bed, tiles: u32) -> Result<Duration> {
        let kernel = bed.kernel("tpacf", "split")?;
        let start = std::time::Instant::now();
        for first in (0..self.sky.tiles).step_by(tiles as usize) {
            let last = self.sky.tiles.min(first + tiles);
            let slice = Sky {
                first,
                last,
                ..self.sky
            };
            bed.stream.launch(
                &kernel,
                self.sky.tiles,
                256,
                0,
                None,
                &Args::new().with(slice),
            )?;
        }
        bed.stream.wait()?;
        Ok(start.elapsed())
    }

    pub fn job(&self, bed: &Bed) -> Result<Job> {
        let kernel = bed.kernel("tpacf", "looped")?;
        let grid = Grid::logical(self.sky.tiles).threads(256).kept(512);
        Ok(bed
            .runtime
            .prepare(&kernel, grid, Args::new().with(self.sky))?)
    }

    fn output(&self) -> Result<Vec<u64>> {
        let output = self.histogram.download()?;
        self.histogram.clear()?;
        Ok(output)
    }
}

pub fn tpacf(bed: &Bed, stops: &mut Stops) -> Result<()> {
    let program = Tpacf::new(bed, 264)?;
    program.vanilla(bed)?;
    let expected = program.output()?;
    let pairs = (264u64 * 256).pow(2);
    ensure!(expected.iter().sum::<u64>() == pairs, "pairs are missing");
    program.split(bed, 10)?;
    ensure!(program.output()? == expected, "the split version differs");
    let mut job = program.job(bed)?;
    loop {
        stops.run(&mut job, Duration::from_micros(60))?;
        ensure!(program.output()? == expected, "the loop differs");
        job.rewind()?;
        if !stops.more() {
            return Ok(());
        }
    }
}
