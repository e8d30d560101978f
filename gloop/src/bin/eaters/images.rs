//! Approximate image matching: finds similar images in databases that the kernel reads by itself.

use std::{
    fs,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gloop::{
    cuda::{Address, Args, Buffer},
    job::{Grid, Job},
};

use crate::{
    bed::{Bed, Stops},
    files::packed,
};

/// The parameters of img.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Match {
    paths: Address,
    queries: Address,
    output: Address,
    buffers: Address,
    databases: u32,
    blocks: u32,
    limit: u32,
    wanted: Address,
    images: Address,
    first: Address,
    found: Address,
    cache: Cache,
}

/// Where blocks keep the pages that they have read, for other blocks.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Cache {
    pages: Address,
    ready: Address,
    files: Address,
    next: Address,
    ended: Address,
    first: Address,
}

const PATH: usize = 256;
const IMAGE: usize = 1024;
/// The number of images to read at a time.
const PAGE: usize = 64;
/// The size of a block's result in bytes.
const ROOM: usize = 16;
/// A pixel of a similar image differs by at most 3.
const LIMIT: u32 = IMAGE as u32 * 9;

type Image = [u8; IMAGE];

/// An image: the number of its database, and its number in there.
type Found = [u32; 2];
const NONE: Found = [u32::MAX; 2];

/// The images, and the versions that search them.
pub struct Images {
    folder: PathBuf,
    databases: Vec<PathBuf>,
    queries: PathBuf,
    output: PathBuf,
    wanted: usize,
    /// The expected results.
    known: Vec<Found>,
}

impl Images {
    /// Creates this many images to search for, and databases of this many images each.
    pub fn new(wanted: usize, databases: usize, images: usize) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("gloop-img-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let mut random = fastrand::Rng::with_seed(19);
        let image = |random: &mut fastrand::Rng| -> Image {
            let mut image = [0; IMAGE];
            random.fill(&mut image);
            image
        };
        let mut all: Vec<Vec<Image>> = Vec::new();
        for _ in 0..databases {
            all.push((0..images).map(|_| image(&mut random)).collect());
        }
        let mut queries = Vec::with_capacity(wanted * IMAGE);
        let mut known = Vec::with_capacity(wanted);
        for number in 0..wanted {
            // Every eighth image is in no database. Random images are never similar.
            if number % 8 == 7 {
                queries.extend(image(&mut random));
                known.push(NONE);
                continue;
            }
            let place = [random.usize(..databases), random.usize(..images)];
            let original = all[place[0]][place[1]];
            queries.extend(original.map(|pixel| pixel.saturating_add(random.u8(0..4))));
            known.push(place.map(|index| index as u32));
        }
        let mut named = Vec::new();
        for (number, images) in all.iter().enumerate() {
            let path = folder.join(format!("database-{number}"));
            fs::write(&path, images.concat())?;
            named.push(path);
        }
        let of_queries = folder.join("queries");
        fs::write(&of_queries, queries)?;
        Ok(Self {
            databases: named,
            queries: of_queries,
            output: folder.join("found"),
            folder,
            wanted,
            known,
        })
    }

    /// Reads everything, runs kernels that search, and writes their results. Returns the time.
    fn natively(
        &self,
        bed: &Bed,
        look: impl FnOnce(Match, &[u32]) -> Result<()>,
    ) -> Result<Duration> {
        let gpu = bed.runtime.gpu();
        let start = Instant::now();
        let (mut images, mut first) = (Vec::new(), vec![0u32]);
        for path in &self.databases {
            images.extend(fs::read(path)?);
            first.push((images.len() / IMAGE) as u32);
        }
        let (wanted, images) = (gpu.upload(&fs::read(&self.queries)?)?, gpu.upload(&images)?);
        let (firsts, found) = (gpu.upload(&first)?, gpu.upload(&vec![NONE; self.wanted])?);
        let program = Match {
            paths: 0,
            queries: 0,
            output: 0,
            buffers: 0,
            databases: self.databases.len() as u32,
            blocks: 0,
            limit: LIMIT,
            wanted: wanted.at(),
            images: images.at(),
            first: firsts.at(),
            found: found.at(),
            cache: Cache::default(),
        };
        look(program, &first)?;
        bed.stream.wait()?;
        fs::write(&self.output, found.download::<u8>()?)?;
        Ok(start.elapsed())
    }

    pub fn vanilla(&self, bed: &Bed) -> Result<Duration> {
        let kernel = bed.kernel("img", "vanilla")?;
        self.natively(bed, |program, _| {
            let args = Args::new().with(program);
            bed.native(&kernel, self.wanted as u32, 256, &args)?;
            Ok(())
        })
    }

    /// One kernel per this many images of a database.
    pub fn split(&self, bed: &Bed, images: u32) -> Result<Duration> {
        let kernel = bed.kernel("img", "split")?;
        self.natively(bed, |program, first| {
            for (number, both) in (0u32..).zip(first.windows(2)) {
                let count = both[1] - both[0];
                for at in (0..count).step_by(images as usize) {
                    let here = images.min(count - at);
                    let args = Args::new().with(program).with(number).with(at).with(here);
                    let blocks = self.wanted as u32;
                    bed.stream.launch(&kernel, blocks, 256, 0, None, &args)?;
                }
            }
            Ok(())
        })
    }

    /// The loop version, with the memory that it works on.
    pub fn job(&self, bed: &Bed) -> Result<(Job, Vec<Buffer>)> {
        let gpu = bed.runtime.gpu();
        let path = |path: &PathBuf| -> Result<Buffer> {
            let packed = packed([path.as_os_str().as_bytes()].into_iter(), PATH)?;
            Ok(gpu.upload(&packed)?)
        };
        let (queries, output) = (path(&self.queries)?, path(&self.output)?);
        let paths = self
            .databases
            .iter()
            .map(|path| path.as_os_str().as_bytes());
        let paths = gpu.upload(&packed(paths, PATH)?)?;
        let buffers = gpu.allocate(self.wanted * (IMAGE + ROOM))?;
        let mut first = vec![0u32];
        let mut count = 0;
        for path in &self.databases {
            let images = fs::metadata(path)?.len() as usize / IMAGE;
            count += images.div_ceil(PAGE);
            first.push(count as u32);
        }
        let (pages, first) = (gpu.allocate(count * PAGE * IMAGE)?, gpu.upload(&first)?);
        // Counters, the pages present, and files: all start at zero.
        let (ready, files) = (
            gpu.allocate((count + 2) * 4)?,
            gpu.allocate(self.databases.len() * 4)?,
        );
        let cache = Cache {
            pages: pages.at(),
            next: ready.at(),
            ended: ready.at() + 4,
            ready: ready.at() + 8,
            files: files.at(),
            first: first.at(),
        };
        let program = Match {
            paths: paths.at(),
            queries: queries.at(),
            output: output.at(),
            buffers: buffers.at(),
            databases: self.databases.len() as u32,
            blocks: self.wanted as u32,
            limit: LIMIT,
            wanted: 0,
            images: 0,
            first: 0,
            found: 0,
            cache,
        };
        let kernel = bed.kernel("img", "looped")?;
        let grid = Grid::logical(self.wanted as u32)
            .threads(256)
            .pages(2, (PAGE * IMAGE) as u32);
        let job = bed
            .runtime
            .prepare(&kernel, grid, Args::new().with(program))?;
        let memory = vec![paths, queries, output, buffers, pages, first, ready, files];
        Ok((job, memory))
    }

    /// Reads the output file, and removes it.
    fn output(&self) -> Result<Vec<Found>> {
        let output = fs::read(&self.output).context("nothing was written")?;
        fs::remove_file(&self.output)?;
        let word = |bytes: &[u8]| {
            bytes
                .iter()
                .rev()
                .fold(0, |sum, byte| sum << 8 | u32::from(*byte))
        };
        Ok(output
            .chunks_exact(8)
            .map(|found| [word(&found[..4]), word(&found[4..])])
            .collect())
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

pub fn img(bed: &Bed, stops: &mut Stops) -> Result<()> {
    let program = Images::new(256, 3, 1000)?;
    program.vanilla(bed)?;
    ensure!(
        program.output()? == program.known,
        "the vanilla version finds other images"
    );
    program.split(bed, 100)?;
    ensure!(
        program.output()? == program.known,
        "the split version differs"
    );
    let (mut job, _memory) = program.job(bed)?;
    loop {
        stops.run(&mut job, Duration::from_micros(100))?;
        ensure!(program.output()? == program.known, "the loop differs");
        job.rewind()?;
        if !stops.more() {
            return Ok(());
        }
    }
}
