//! Servers whose kernel accepts, receives and sends by itself: echo and matrix multiplication.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use gloop::{
    cuda::{Address, Args, Buffer},
    job::{Grid, Job},
};

use crate::bed::{Bed, Stops};

pub const PAGE: u32 = 64 << 10;
const MATRIX: usize = 256 * 256 * 4;

/// A listening socket that was created by a kernel.
pub struct Listening<'a> {
    bed: &'a Bed,
    program: &'static str,
    handle: Buffer,
    port: u16,
}

impl<'a> Listening<'a> {
    pub fn new(bed: &'a Bed, program: &'static str) -> Result<Self> {
        let handle = bed.runtime.gpu().allocate(8)?;
        let args = Args::new().with(handle.at()).with(0u32);
        let grid = Grid::logical(1).threads(256);
        let mut job = bed
            .runtime
            .launch(&bed.kernel(program, "listen")?, grid, args)?;
        job.finish()?;
        let server = handle.download::<i64>()?[0];
        let server = u32::try_from(server).map_err(|_| anyhow!("bind: error {server}"))?;
        let port = bed.runtime.port(server)?;
        Ok(Self {
            bed,
            program,
            handle,
            port,
        })
    }

    /// Where the kernel finds the socket.
    pub fn handle(&self) -> Address {
        self.handle.at()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn close(&self) -> Result<()> {
        let args = Args::new().with(self.handle.at());
        let grid = Grid::logical(1).threads(256);
        let kernel = self.bed.kernel(self.program, "unlisten")?;
        self.bed.runtime.launch(&kernel, grid, args)?.finish()?;
        Ok(())
    }
}

/// Runs the job while clients run, each in a thread of its own, and then checks their results.
pub fn serve(
    job: &mut Job,
    clients: u64,
    client: impl Fn(u64) -> Result<()> + Sync,
    run: impl FnOnce(&mut Job) -> Result<()>,
) -> Result<()> {
    thread::scope(|scope| {
        let client = &client;
        let all: Vec<_> = (0..clients)
            .map(|number| scope.spawn(move || client(number)))
            .collect();
        let ran = run(job);
        for one in all {
            one.join().map_err(|_| anyhow!("a client panicked"))??;
        }
        ran
    })
}

pub fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    Ok(stream)
}

pub fn echo(bed: &Bed, stops: &mut Stops) -> Result<()> {
    const CLIENTS: u64 = 32;
    let listening = Listening::new(bed, "echo")?;
    let buffers = bed
        .runtime
        .gpu()
        .allocate(CLIENTS as usize * PAGE as usize)?;
    let args = Args::new().with(listening.handle.at()).with(buffers.at());
    let grid = Grid::logical(CLIENTS as u32).threads(256).pages(2, PAGE);
    let mut job = bed
        .runtime
        .prepare(&bed.kernel("echo", "looped")?, grid, args)?;
    let client = |number| {
        let mut random = fastrand::Rng::with_seed(number);
        let mut stream = connect(listening.port)?;
        for _ in 0..40 {
            let sent: Vec<u8> = (0..random.usize(1..40_000))
                .map(|_| random.u8(..))
                .collect();
            stream.write_all(&sent)?;
            let mut got = vec![0; sent.len()];
            stream
                .read_exact(&mut got)
                .context("the echo did not come")?;
            ensure!(got == sent, "another echo came");
        }
        stream.shutdown(Shutdown::Write)?;
        ensure!(stream.read(&mut [0])? == 0, "more came than was sent");
        Ok(())
    };
    loop {
        serve(&mut job, CLIENTS, client, |job| {
            stops.run(job, Duration::from_micros(100))
        })?;
        job.rewind()?;
        if !stops.more() {
            return listening.close();
        }
    }
}

/// Two matrices in the format in which they are sent.
fn matrices(number: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number);
    (0..2 * MATRIX / 4)
        .flat_map(|_| (random.f32() - 0.5).to_le_bytes())
        .collect()
}

/// The product as computed by the vanilla kernel, and identically by the split one.
fn product(bed: &Bed, matrices: &[u8]) -> Result<Vec<u8>> {
    let gpu = bed.runtime.gpu();
    let (a, b) = (
        gpu.upload(&matrices[..MATRIX])?,
        gpu.upload(&matrices[MATRIX..])?,
    );
    let c = gpu.allocate(MATRIX)?;
    let args = Args::new().with(a.at()).with(b.at()).with(c.at());
    bed.native(&bed.kernel("matmul", "vanilla")?, 256, 256, &args)?;
    let product = c.download()?;
    c.clear()?;
    let split = bed.kernel("matmul", "split")?;
    for row in 0..16u32 {
        let args = Args::new().with(a.at()).with(b.at()).with(c.at()).with(row);
        bed.stream.launch(&split, 16, 256, 0, None, &args)?;
    }
    bed.stream.wait()?;
    ensure!(product == c.download::<u8>()?, "the split version differs");
    Ok(product)
}

/// The matrix server, with the times that its clients measure.
pub struct Matmul<'a> {
    listening: Listening<'a>,
    pub job: Job,
    clients: u64,
    /// How long a client sleeps before a request, on average.
    pub think: Duration,
    expected: Vec<(Vec<u8>, Vec<u8>)>,
    _memory: Buffer,
}

impl<'a> Matmul<'a> {
    pub fn new(bed: &'a Bed, clients: u64) -> Result<Self> {
        let listening = Listening::new(bed, "matmul")?;
        let memory = bed.runtime.gpu().allocate(clients as usize * 3 * MATRIX)?;
        let args = Args::new().with(listening.handle.at()).with(memory.at());
        let grid = Grid::logical(clients as u32).threads(256).pages(2, PAGE);
        let job = bed
            .runtime
            .prepare(&bed.kernel("matmul", "looped")?, grid, args)?;
        let expected = (0..8).map(|number| {
            let sent = matrices(number);
            let product = product(bed, &sent)?;
            Ok((sent, product))
        });
        Ok(Self {
            listening,
            job,
            clients,
            think: Duration::ZERO,
            expected: expected.collect::<Result<_>>()?,
            _memory: memory,
        })
    }

    /// Each client makes this many requests. Returns how long each took.
    pub fn round(
        &mut self,
        requests: u64,
        run: impl FnOnce(&mut Job) -> Result<()>,
    ) -> Result<Vec<Duration>> {
        let times = std::sync::Mutex::new(Vec::new());
        let (port, expected, think) = (self.listening.port, &self.expected, self.think);
        let client = |number: u64| {
            let mut random = fastrand::Rng::with_seed(number);
            let mut stream = connect(port)?;
            for request in 0..requests {
                if !think.is_zero() {
                    thread::sleep(think.mul_f64(random.f64() * 2.0));
                }
                let (sent, product) = &expected[((number + request) % 8) as usize];
                let start = Instant::now();
                stream.write_all(sent)?;
                let mut got = vec![0; MATRIX];
                stream
                    .read_exact(&mut got)
                    .context("the product did not come")?;
                ensure!(
                    got == *product,
                    "another product came than from the vanilla kernel"
                );
                let mut times = times
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                times.push(start.elapsed());
            }
            stream.shutdown(Shutdown::Write)?;
            Ok(())
        };
        serve(&mut self.job, self.clients, client, run)?;
        self.job.rewind()?;
        Ok(times
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    pub fn close(&self) -> Result<()> {
        self.listening.close()
    }
}

pub fn matmul(bed: &Bed, stops: &mut Stops) -> Result<()> {
    let mut program = Matmul::new(bed, 16)?;
    loop {
        program.round(8, |job| stops.run(job, Duration::from_micros(100)))?;
        if !stops.more() {
            return program.close();
        }
    }
}
