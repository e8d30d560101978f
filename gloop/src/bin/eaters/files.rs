//! grep: words in files, which the kernel reads by itself.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use gloop::{
    cuda::{Address, Args, Buffer},
    job::{Grid, Job},
};

use crate::bed::{Bed, Stops};

/// The parameters of grep.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Search {
    paths: Address,
    words: Address,
    output: Address,
    counts: Address,
    buffers: Address,
    word_count: u32,
    chunk: u32,
    text: Address,
    offsets: Address,
}

const PATH: usize = 256;
const WORD: usize = 32;
const RECORD: usize = 24;
const PAGE: u32 = 64 << 10;

/// Packs texts into fields of `each` bytes, padded with zeros.
pub fn packed<'a>(texts: impl Iterator<Item = &'a [u8]>, each: usize) -> Result<Vec<u8>> {
    let mut packed = Vec::new();
    for text in texts {
        ensure!(text.len() < each, "{} bytes are too many", text.len());
        packed.extend(text);
        packed.resize(packed.len().next_multiple_of(each).max(each), 0);
    }
    Ok(packed)
}

/// The files, the words, and the versions.
pub struct Grep {
    folder: PathBuf,
    files: Vec<PathBuf>,
    words: Vec<String>,
    output: PathBuf,
}

impl Grep {
    pub fn new(files: usize, bytes: usize, words: usize) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("gloop-grep-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let mut random = fastrand::Rng::with_seed(13);
        let words: Vec<String> = (0..words)
            .map(|_| {
                (0..random.usize(3..9))
                    .map(|_| random.char('a'..='e'))
                    .collect()
            })
            .collect();
        let mut named = Vec::new();
        for number in 0..files {
            let mut text = Vec::with_capacity(bytes);
            while text.len() < bytes {
                match random.u8(0..8) {
                    0 => text.extend(words[random.usize(..words.len())].as_bytes()),
                    1 => text.push(b' '),
                    _ => text.push(random.u8(b'a'..=b'e')),
                }
            }
            // Not a whole number of pages.
            text.truncate(bytes - number % 100);
            let path = folder.join(format!("text-{number}"));
            fs::write(&path, text)?;
            named.push(path);
        }
        let output = folder.join("counts");
        Ok(Self {
            folder,
            files: named,
            words,
            output,
        })
    }

    fn counts(&self, bed: &Bed) -> Result<Buffer> {
        Ok(bed
            .runtime
            .gpu()
            .allocate(self.files.len() * self.words.len() * 4)?)
    }

    /// Reads all files with this many threads, runs kernels, and writes the output. Returns the
    /// time.
    fn natively(
        &self,
        bed: &Bed,
        readers: usize,
        count: impl FnOnce(Search, &Buffer) -> Result<()>,
    ) -> Result<Duration> {
        let gpu = bed.runtime.gpu();
        let words = packed(self.words.iter().map(String::as_bytes), WORD)?;
        let start = Instant::now();
        let mut text = Vec::new();
        let mut offsets = vec![0u64];
        for file in self.read(readers)? {
            text.extend(file);
            offsets.push(text.len() as u64);
        }
        let (text, offsets, words) = (
            gpu.upload(&text)?,
            gpu.upload(&offsets)?,
            gpu.upload(&words)?,
        );
        let counts = self.counts(bed)?;
        let lines = gpu.allocate(self.files.len() * self.words.len() * RECORD)?;
        let search = Search {
            paths: 0,
            words: words.at(),
            output: 0,
            counts: counts.at(),
            buffers: 0,
            word_count: self.words.len() as u32,
            chunk: 0,
            text: text.at(),
            offsets: offsets.at(),
        };
        count(search, &lines)?;
        bed.stream.wait()?;
        fs::write(&self.output, lines.download::<u8>()?)?;
        Ok(start.elapsed())
    }

    /// Reads the contents of all files.
    fn read(&self, readers: usize) -> Result<Vec<Vec<u8>>> {
        let each = self.files.len().div_ceil(readers);
        let contents = std::thread::scope(|scope| {
            let read =
                |files: &[PathBuf]| files.iter().map(fs::read).collect::<Result<Vec<_>, _>>();
            let parts: Vec<_> = (self.files.chunks(each))
                .map(|files| scope.spawn(move || read(files)))
                .collect();
            let parts = parts.into_iter().map(std::thread::ScopedJoinHandle::join);
            parts.collect::<Result<Vec<_>, _>>()
        });
        let contents = contents.map_err(|_| anyhow::anyhow!("a reader has panicked"))?;
        let parts: Vec<_> = contents.into_iter().collect::<Result<_, _>>()?;
        Ok(parts.into_iter().flatten().collect())
    }

    pub fn vanilla(&self, bed: &Bed, readers: usize) -> Result<Duration> {
        let kernel = bed.kernel("grep", "vanilla")?;
        self.natively(bed, readers, |search, lines| {
            let args = Args::new().with(search).with(lines.at());
            bed.native(&kernel, self.files.len() as u32, 256, &args)?;
            Ok(())
        })
    }

    /// One kernel per word.
    pub fn split(&self, bed: &Bed) -> Result<Duration> {
        let (count, lines_of) = (
            bed.kernel("grep", "split")?,
            bed.kernel("grep", "split_lines")?,
        );
        let files = self.files.len() as u32;
        self.natively(bed, 1, |search, lines| {
            for word in 0..search.word_count {
                let args = Args::new().with(search).with(word);
                bed.stream.launch(&count, files, 256, 0, None, &args)?;
            }
            let args = Args::new().with(search).with(lines.at());
            Ok(bed.stream.launch(&lines_of, files, 256, 0, None, &args)?)
        })
    }

    /// The loop version, with the memory that it works on.
    pub fn job(&self, bed: &Bed) -> Result<(Job, Vec<Buffer>)> {
        use std::os::unix::ffi::OsStrExt;
        let gpu = bed.runtime.gpu();
        let paths = self.files.iter().map(|path| path.as_os_str().as_bytes());
        let paths = gpu.upload(&packed(paths, PATH)?)?;
        let output = [self.output.as_os_str().as_bytes()].into_iter();
        let output = gpu.upload(&packed(output, PATH)?)?;
        let words = packed(self.words.iter().map(String::as_bytes), WORD)?;
        let words = gpu.upload(&words)?;
        let counts = self.counts(bed)?;
        let buffers = gpu.allocate(self.files.len() * PAGE as usize)?;
        let search = Search {
            paths: paths.at(),
            words: words.at(),
            output: output.at(),
            counts: counts.at(),
            buffers: buffers.at(),
            word_count: self.words.len() as u32,
            chunk: PAGE - WORD as u32,
            text: 0,
            offsets: 0,
        };
        let grid = Grid::logical(self.files.len() as u32)
            .threads(256)
            .pages(2, PAGE);
        let kernel = bed.kernel("grep", "looped")?;
        let job = bed
            .runtime
            .prepare(&kernel, grid, Args::new().with(search))?;
        Ok((job, vec![counts, paths, output, words, buffers]))
    }

    /// Reads the output file, and removes it.
    pub fn output(&self) -> Result<Vec<u8>> {
        let output = fs::read(&self.output)?;
        fs::remove_file(&self.output)?;
        Ok(output)
    }
}

impl Drop for Grep {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

pub fn grep(bed: &Bed, stops: &mut Stops) -> Result<()> {
    let program = Grep::new(64, 1 << 20, 16)?;
    program.vanilla(bed, 1)?;
    let expected = program.output()?;
    // The host counts as well, for one word in one file.
    let word = program.words[0].as_bytes();
    let text = fs::read(&program.files[0])?;
    let count = text
        .windows(word.len())
        .filter(|part| *part == word)
        .count();
    ensure!(
        expected.starts_with(format!("00000000 0000 {count:08x} \n").as_bytes()),
        "the vanilla version counts wrong"
    );
    program.split(bed)?;
    ensure!(program.output()? == expected, "the split version differs");
    let (mut job, memory) = program.job(bed)?;
    loop {
        memory[0].clear()?;
        stops.run(&mut job, Duration::from_micros(100))?;
        ensure!(program.output()? == expected, "the loop differs");
        job.rewind()?;
        if !stops.more() {
            return Ok(());
        }
    }
}
