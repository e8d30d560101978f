//! As many channels as a guest's programs can have, each with its own work.

use anyhow::{Result, ensure};

use super::{
    Buffer, COPY, COPY_CLASS, GART, Gpu, MAPPABLE, Mapped, VRAM, bind, halves, method, wait_for,
};

/// Opens this many channels, and the files they belong to: nouveau (in Linux 6.1) allows 16 per file. It does not
/// notice when the GPU has no more channels: it writes past the submission pages, and the guest's kernel crashes.
fn open(count: usize) -> Result<Vec<(Gpu, Vec<i32>)>> {
    const OF_A_FILE: usize = 16;
    let mut files = Vec::new();
    let mut left = count;
    while left > 0 {
        let gpu = Gpu::open()?;
        let channels: Vec<_> = (0..left.min(OF_A_FILE))
            .map(|_| gpu.channel())
            .collect::<Result<_>>()?;
        left -= channels.len();
        files.push((gpu, channels));
    }
    Ok(files)
}

/// A channel with memory that no other channel uses: a page to copy from, and one to copy to.
struct Worker<'a> {
    channel: i32,
    push: Buffer<'a>,
    pushed: Mapped,
    pages: Buffer<'a>,
    seen: Mapped,
    video: Buffer<'a>,
}

impl<'a> Worker<'a> {
    const WORDS: usize = 1024;

    fn new(gpu: &'a Gpu, channel: i32, seed: u32) -> Result<Self> {
        gpu.object(channel, COPY_CLASS)?;
        let push = gpu.buffer(GART | MAPPABLE, 0x1000)?;
        let pages = gpu.buffer(GART | MAPPABLE, 0x2000)?;
        let video = gpu.buffer(VRAM, 0x1000)?;
        let (pushed, seen) = (push.map()?, pages.map()?);
        seen.fill(seed);
        Ok(Self {
            channel,
            push,
            pushed,
            pages,
            seen,
            video,
        })
    }

    fn submit(&self, words: &[u32]) -> Result<()> {
        let all = [&self.push, &self.pages, &self.video];
        let gpu = self.push.gpu;
        gpu.submit(self.channel, &self.pushed, words, &all)
    }

    /// Sets the channel up to copy its first page to VRAM, without starting the copy.
    fn prepare(&self) -> Result<()> {
        let mut words = bind(COPY, COPY_CLASS);
        words.extend(one_page(self.pages.info.offset, self.video.info.offset));
        self.submit(&words)
    }

    /// Starts that copy, and copies the page back to the place of its second page.
    fn copy(&self) -> Result<()> {
        let mut words = method(COPY, 0x300, &[0x110]);
        let back = self.pages.info.offset + 0x1000;
        words.extend(one_page(self.video.info.offset, back));
        words.extend(method(COPY, 0x300, &[0x110]));
        self.submit(&words)
    }

    fn checksums(&self) -> [u64; 2] {
        [0, Self::WORDS].map(|first| self.seen.checksum_of(first..first + Self::WORDS))
    }
}

/// The copy engine's methods for copying one page.
fn one_page(from: u64, to: u64) -> Vec<u32> {
    let ([s1, s0], [d1, d0]) = (halves(from), halves(to));
    method(COPY, 0x30c, &[s1, s0, d1, d0, 4096, 4096, 4096, 1])
}

/// Makes channels copy to VRAM and back, all at the same time, each its own page. Engine state, which is set up before
/// the copy itself, must survive while other channels take their place on the GPU. If `go` is given, the copies wait,
/// once all channels are set up, until a file of that name exists.
pub fn copy(count: usize, go: Option<&str>) -> Result<()> {
    let files = open(count)?;
    let channels = files
        .iter()
        .flat_map(|(gpu, channels)| channels.iter().map(move |channel| (gpu, *channel)));
    let workers = (1..)
        .zip(channels)
        .map(|(seed, (gpu, channel))| Worker::new(gpu, channel, seed))
        .collect::<Result<Vec<_>>>()?;
    for worker in &workers {
        worker.prepare()?;
    }
    for worker in &workers {
        worker.push.wait()?;
        let [source, target] = worker.checksums();
        ensure!(source != target, "the pages differ at first");
    }
    println!("{count} channels are told");
    if let Some(go) = go {
        wait_for(go);
    }
    for worker in &workers {
        worker.copy()?;
    }
    for worker in &workers {
        worker.pages.wait()?;
        let ([sent, came], channel) = (worker.checksums(), worker.channel);
        ensure!(
            sent == came,
            "channel {channel} sent {sent:#x}, and {came:#x} came back"
        );
    }
    let numbers = workers.iter().map(|worker| worker.channel);
    println!("{count} channels have copied, up to {:?}", numbers.max());
    Ok(())
}
