//! Launches that can be suspended and resumed.
//!
//! A job is a kernel with its blocks' state. To suspend it, the host stores the launch's number
//! into a word of host memory that the GPU reads; all blocks save themselves and leave. To resume
//! it, the same kernel is launched with the same memory again. In between the GPU is free, also for
//! calls of this process that would wait for a running kernel (freeing memory, loading code).

use std::{
    io,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use remoting_turns::session::Session;

pub use crate::state::State;
use crate::{
    cuda::{self, Args, Buffer, Gpu, GrantPage, Kernel, Module, Registered, Stream},
    layout::{Block, Board, Ctl, ExitCode, Rings},
    memory::Memory,
    serve::{Answered, Area, Reach, Service},
    slots::Limits,
    turns::{self, Resumable},
};

/// How long to wait for an answer before checking again.
const LONG: Duration = Duration::from_secs(1);

/// Why a job cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The GPU or its driver has failed.
    #[error(transparent)]
    Cuda(#[from] cuda::Error),
    /// The service for files and sockets is not available.
    #[error("cannot serve files and sockets to the GPU (io_uring is needed)")]
    Service(#[source] io::Error),
    /// A block has broken the library's rules.
    #[error("a block of the kernel {0}")]
    Fault(&'static str),
    /// The kernel ended without reporting an exit code.
    #[error(
        "the kernel ended without saying how (exit code {code} of launch {said}, launch {launch} \
         was running): does it end with gloop::run?"
    )]
    Exit {
        /// The last exit code.
        code: u32,
        /// The launch that reported it.
        said: u32,
        /// The launch that was running.
        launch: u32,
    },
    /// The job is already done.
    #[error("the job is done: launch it anew")]
    Done,
    /// Sharing the GPU has failed.
    #[error(transparent)]
    Turns(#[from] turns::Error),
}

/// How kernels poll for orders.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of the GPU.
    pub gpu: u32,
    /// Which files may be opened, and where servers listen.
    pub reach: Reach,
    /// The interval at which a block reads the device's copy of the orders. A read costs 0.2 us.
    pub gate: Duration,
    /// The interval at which any block reads the orders over the bus.
    pub poll: Duration,
    /// The minimum interval between such reads of the same block. A read costs the block 1.1 us.
    pub own_poll: Duration,
    /// How long a block waits before it counts as idle.
    pub idle: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gpu: 0,
            reach: Reach::default(),
            gate: Duration::from_micros(3),
            poll: Duration::from_micros(2),
            own_poll: Duration::from_micros(50),
            idle: Duration::from_micros(100),
        }
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// The number of logical blocks along x, y and z.
    pub logical: [u32; 3],
    /// The number of threads per block.
    pub threads: u32,
    /// The number of physical blocks. None means as many as run concurrently.
    pub blocks: Option<u32>,
    /// The size of dynamic shared memory in bytes.
    pub shared: u32,
    /// The maximum size of shared memory that a block keeps, in bytes.
    pub kept: u32,
    /// The number of data pages per block, at most 32.
    pub pages: u32,
    /// The size of a page in bytes.
    pub page_bytes: u32,
    /// The maximum number of logical blocks that a physical block takes at a time.
    pub batch: u32,
}

impl Grid {
    /// This many logical blocks of one thread each.
    pub fn logical(blocks: u32) -> Self {
        Self {
            logical: [blocks, 1, 1],
            threads: 1,
            blocks: None,
            shared: 0,
            kept: 0,
            pages: 0,
            page_bytes: 0,
            batch: 4,
        }
    }

    /// Sets the number of threads per block.
    #[must_use]
    pub fn threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }

    /// Sets the number of physical blocks.
    #[must_use]
    pub fn blocks(self, blocks: u32) -> Self {
        let blocks = Some(blocks);
        Self { blocks, ..self }
    }

    /// Sets the size of kept shared memory in bytes.
    #[must_use]
    pub fn kept(self, kept: u32) -> Self {
        Self { kept, ..self }
    }

    /// Sets the number and the size in bytes of the pages for each block's files and sockets.
    #[must_use]
    pub fn pages(self, pages: u32, page_bytes: u32) -> Self {
        Self {
            pages: pages.min(32),
            page_bytes: page_bytes.next_multiple_of(4096),
            ..self
        }
    }
}

/// A GPU, and the service that handles its kernels' requests.
#[derive(Debug)]
pub struct Runtime {
    service: Arc<Service>,
    gpu: Arc<Gpu>,
    options: Options,
    /// The arbiter's page, once a job has run in turns.
    arbiter: Arc<Mutex<Option<Arc<GrantPage>>>>,
}

impl Runtime {
    /// Opens the GPU and starts the service.
    ///
    /// # Errors
    /// There is no GPU, no driver, or no io_uring.
    pub fn new(options: Options) -> Result<Self, Error> {
        let gpu = Gpu::open(options.gpu)?;
        let service = Service::start(&options.reach).map_err(Error::Service)?;
        Ok(Self {
            service: Arc::new(service),
            gpu,
            options,
            arbiter: Arc::default(),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Loads code.
    ///
    /// # Errors
    /// It is not code for this GPU.
    pub fn load(&self, image: &[u8]) -> Result<Module, Error> {
        Ok(self.gpu.load(image)?)
    }

    /// The port that a server listens on, given the value that `net::bind` returned.
    ///
    /// # Errors
    /// There is no such server.
    pub fn port(&self, server: u32) -> Result<u16, Error> {
        self.service.port(server).map_err(Error::Service)
    }

    /// Launches a kernel whose first parameter is a `gloop::Ctl`. `args` are the others.
    ///
    /// # Errors
    /// There is not enough memory, or the driver refuses.
    pub fn launch(&self, kernel: &Kernel, grid: Grid, args: Args) -> Result<Job, Error> {
        let mut job = self.prepare(kernel, grid, args)?;
        job.resume()?;
        Ok(job)
    }

    /// The same, without launching it.
    ///
    /// # Errors
    /// There is not enough memory, or the driver refuses.
    pub fn prepare(&self, kernel: &Kernel, grid: Grid, args: Args) -> Result<Job, Error> {
        let gpu = &self.gpu;
        let resident = kernel.resident(grid.threads, grid.shared)?;
        let logical: u64 = grid.logical.iter().copied().map(u64::from).product();
        let wanted = u64::from(grid.blocks.unwrap_or(resident))
            .min(logical)
            .max(1);
        // Fits into 32 bits.
        let blocks = wanted as u32;
        let memory = |bytes: usize| {
            Memory::new(bytes).map_err(|source| cuda::Error::Memory { bytes, source })
        };
        let limits = Limits {
            page_bytes: grid.page_bytes,
            page_count: grid.pages,
        };
        let pages = blocks as usize * grid.pages as usize * grid.page_bytes as usize;
        let area = Arc::new(Area {
            rings: memory(blocks as usize * size_of::<Rings>())?,
            pages: memory(pages)?,
            blocks: blocks as usize,
            limits,
            answered: Answered::default(),
        });
        let rings = gpu.register(RingsOf(Arc::clone(&area)))?;
        let pages = gpu.register(PagesOf(Arc::clone(&area)))?;
        let said = gpu.register(memory(4096)?)?;
        let told = gpu.register(memory(4096)?)?;
        let board = gpu.allocate(size_of::<Board>())?;
        let state = gpu.allocate(blocks as usize * size_of::<Block>())?;
        let kept_bytes = grid.kept.next_multiple_of(16);
        let kept = gpu.allocate(blocks as usize * kept_bytes as usize)?;
        let ns = |time: Duration| u32::try_from(time.as_nanos()).unwrap_or(u32::MAX);
        let cycles = self.options.gate.as_nanos() * u128::from(gpu.clock) / 1_000_000;
        let ctl = Ctl {
            orders: told.device(),
            exit: said.device(),
            board: board.at(),
            blocks: state.at(),
            kept: kept.at(),
            rings: rings.device(),
            pages: pages.device(),
            logical,
            x: grid.logical[0],
            y: grid.logical[1],
            z: grid.logical[2],
            page_bytes: grid.page_bytes,
            page_count: grid.pages,
            kept_bytes,
            launch: 0,
            gate_cycles: u32::try_from(cycles).unwrap_or(u32::MAX),
            poll_ns: ns(self.options.poll),
            own_poll_ns: ns(self.options.own_poll),
            idle_ns: ns(self.options.idle),
            batch: grid.batch.max(1),
            turns: 0,
            turn: 0,
            reserved: [0; 5],
        };
        let number = self
            .service
            .add(Arc::clone(&area))
            .map_err(Error::Service)?;
        Ok(Job {
            stream: gpu.stream()?,
            service: Arc::clone(&self.service),
            number,
            area,
            state: State::Ready,
            launches: 0,
            stops: 0,
            answered_before: 0,
            taken: 0,
            ctl,
            grid,
            blocks,
            kernel: kernel.clone(),
            args,
            gpu: Arc::clone(gpu),
            arbiter: Arc::clone(&self.arbiter),
            told,
            said,
            memory: JobMemory {
                _rings: rings,
                _pages: pages,
                _kept: kept,
                board,
                state,
            },
        })
    }
}

struct RingsOf(Arc<Area>);

impl AsRef<Memory> for RingsOf {
    fn as_ref(&self) -> &Memory {
        &self.0.rings
    }
}

struct PagesOf(Arc<Area>);

impl AsRef<Memory> for PagesOf {
    fn as_ref(&self) -> &Memory {
        &self.0.pages
    }
}

struct JobMemory {
    _rings: Registered<RingsOf>,
    _pages: Registered<PagesOf>,
    _kept: Buffer,
    board: Buffer,
    state: Buffer,
}

/// A kernel with its blocks' state. Dropping it stops it.
pub struct Job {
    stream: Stream,
    service: Arc<Service>,
    number: usize,
    area: Arc<Area>,
    state: State,
    launches: u32,
    stops: u64,
    /// The number of answers before its blocks began, and of those that they have taken since,
    /// modulo 2^32.
    answered_before: u64,
    taken: u32,
    ctl: Ctl,
    grid: Grid,
    blocks: u32,
    kernel: Kernel,
    args: Args,
    gpu: Arc<Gpu>,
    arbiter: Arc<Mutex<Option<Arc<GrantPage>>>>,
    /// The orders, which the GPU reads.
    told: Registered<Memory>,
    /// The exit report, which the GPU writes.
    said: Registered<Memory>,
    memory: JobMemory,
}

impl Job {
    /// The job's state.
    pub fn state(&self) -> State {
        self.state
    }

    /// The number of times that it was launched.
    pub fn launches(&self) -> u32 {
        self.launches
    }

    /// The number of times that it was stopped before it was done.
    pub fn stops(&self) -> u64 {
        self.stops
    }

    /// The number of physical blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Launches it, or continues where it was stopped.
    ///
    /// # Errors
    /// It is done, or the driver refuses.
    pub fn resume(&mut self) -> Result<(), Error> {
        match self.state {
            State::Running => return Ok(()),
            State::Done => return Err(Error::Done),
            State::Ready | State::Waiting => {}
        }
        // Zero means no launch.
        self.launches = self.launches.wrapping_add(1).max(1);
        self.ctl.launch = self.launches;
        let (threads, shared) = (self.grid.threads, self.grid.shared);
        self.stream.launch(
            &self.kernel,
            self.blocks,
            threads,
            shared,
            Some(&self.ctl),
            &self.args,
        )?;
        self.gpu.kernel_begins();
        self.service.stay_awake(true);
        self.state = State::Running;
        Ok(())
    }

    /// Tells it to stop, without waiting. This is a single store, which anyone else with access to
    /// this word can make as well.
    pub fn stop(&self) {
        self.told
            .memory()
            .word(0)
            .store(self.launches, Ordering::Release);
    }

    /// Tells it that others want the GPU: it ends once all of its blocks wait for events.
    pub fn contend(&self) {
        self.told
            .memory()
            .word(1)
            .store(self.launches, Ordering::Release);
    }

    /// Stops it, and waits until the GPU is free.
    ///
    /// # Errors
    /// The kernel has failed.
    pub fn suspend(&mut self) -> Result<State, Error> {
        if self.state == State::Running {
            self.stop();
            while !self.stream.idle()? {
                std::hint::spin_loop();
            }
        }
        self.ended()
    }

    /// Waits until it has left the GPU, for whatever reason.
    ///
    /// # Errors
    /// The kernel has failed.
    pub fn wait(&mut self) -> Result<State, Error> {
        if self.state == State::Running {
            self.stream.wait()?;
        }
        self.ended()
    }

    /// Whether it is on the GPU.
    ///
    /// # Errors
    /// The kernel has failed.
    pub fn is_running(&mut self) -> Result<bool, Error> {
        if self.state == State::Running && self.stream.idle()? {
            self.ended()?;
        }
        Ok(self.state == State::Running)
    }

    /// Runs it to its end. Resumes it whenever it has stopped, or when an event that it waits for
    /// has arrived.
    ///
    /// # Errors
    /// The kernel has failed.
    pub fn finish(&mut self) -> Result<(), Error> {
        loop {
            match self.wait()? {
                State::Done => return Ok(()),
                State::Waiting => {
                    self.wait_for_more();
                    self.resume()?;
                }
                State::Ready | State::Running => self.resume()?,
            }
        }
    }

    /// Waits until there is an answer that its blocks had not taken when they left the GPU.
    fn wait_for_more(&self) {
        let answered = &self.area.answered;
        loop {
            let count = answered.count();
            // Modulo 2^32, as the device counts.
            if count.wrapping_sub(self.answered_before) as u32 != self.taken {
                return;
            }
            answered.wait(count, LONG);
        }
    }

    /// Resets it to the state before the first launch. It does not run afterwards.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn rewind(&mut self) -> Result<(), Error> {
        self.suspend()?;
        self.memory.board.clear()?;
        self.memory.state.clear()?;
        self.service.remove(self.number).map_err(Error::Service)?;
        for word in 0..self.area.rings.bytes() / 4 {
            self.area.rings.word(word).store(0, Ordering::Relaxed);
        }
        self.number = self
            .service
            .add(Arc::clone(&self.area))
            .map_err(Error::Service)?;
        self.answered_before = self.area.answered.count();
        self.taken = 0;
        self.state = State::Ready;
        Ok(())
    }

    /// Evaluates how the launch has ended.
    fn ended(&mut self) -> Result<State, Error> {
        if self.state != State::Running {
            return Ok(self.state);
        }
        self.gpu.kernel_ends();
        self.service.stay_awake(false);
        self.state = State::Ready;
        // What the device has written, which is read once.
        let word = |number| self.said.memory().word(number).load(Ordering::Acquire);
        let (code, fault, said) = (word(0), word(1), word(2));
        self.taken = word(3);
        let launch = self.launches;
        self.state = match code {
            _ if said != launch => return Err(Error::Exit { code, said, launch }),
            code if code == ExitCode::Done as u32 => State::Done,
            code if code == ExitCode::Stopped as u32 => State::Ready,
            code if code == ExitCode::Waiting as u32 => State::Waiting,
            code if code == ExitCode::Fault as u32 => {
                self.state = State::Done;
                return Err(Error::Fault(match fault {
                    1 => "waits for more than 32 events at a time",
                    2 => "has more I/O under way than it has pages: give the grid more",
                    3 => "keeps more shared memory than the grid says",
                    _ => "has failed",
                }));
            }
            code => return Err(Error::Exit { code, said, launch }),
        };
        self.stops += u64::from(self.state != State::Done);
        Ok(self.state)
    }
}

/// Runs in an arbiter's turns.
impl Resumable for Job {
    type Error = Error;

    fn meet(&mut self, session: &Arc<Session>) {
        let mut known = self.arbiter.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = |page: &Arc<GrantPage>| page.is_of(session);
        if !known.as_ref().is_some_and(is_known) {
            // Anything that was registered for another arbiter is unregistered first.
            *known = None;
            // If this fails, this process is told that its turn is over, and stops the job itself.
            *known = GrantPage::register(&self.gpu, session).ok().map(Arc::new);
        }
        self.ctl.turns = known.as_ref().map_or(0, |page| page.stop());
    }

    fn resume_in(&mut self, turn: u32) -> Result<(), Error> {
        self.ctl.turn = turn;
        self.resume()
    }

    fn look(&mut self) -> Result<State, Error> {
        self.is_running()?;
        Ok(self.state)
    }

    fn stop(&self) {
        Self::stop(self);
    }

    fn contend(&self) {
        Self::contend(self);
    }

    fn wait_for_more(&self) {
        Self::wait_for_more(self);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // If a kernel does not stop, the driver waits for it, as it does natively.
        if self.suspend().is_err() && self.state == State::Running {
            self.gpu.kernel_ends();
        }
        let _ = self.service.remove(self.number);
    }
}
