//! The GPU, the programs compiled for it, and random stops.

use std::{
    collections::HashMap,
    fmt, fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use gloop::{
    cuda::{Args, Kernel, Module, Stream},
    job::{Job, Options, Runtime, State},
};

/// What programs run on.
pub struct Bed {
    pub runtime: Runtime,
    cubins: PathBuf,
    modules: Mutex<HashMap<String, Module>>,
    pub stream: Stream,
}

impl Bed {
    pub fn open(cubins: PathBuf) -> Result<Self> {
        let runtime = Runtime::new(Options::default())?;
        Ok(Self {
            stream: runtime.gpu().stream()?,
            runtime,
            cubins,
            modules: Mutex::default(),
        })
    }

    pub fn machine(&self) -> String {
        let gpu = self.runtime.gpu();
        format!(
            "GPU: {} ({} multiprocessors, {} MHz)",
            gpu.name,
            gpu.processors,
            gpu.clock / 1000
        )
    }

    /// A kernel of a program.
    pub fn kernel(&self, program: &str, name: &str) -> Result<Kernel> {
        let mut modules = self
            .modules
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let module = match modules.get(program) {
            Some(module) => module.clone(),
            None => {
                let name = format!("{program}.{}.cubin", self.runtime.gpu().architecture);
                let path = self.cubins.join(name);
                let image = fs::read(&path).with_context(|| {
                    format!(
                        "cannot read {}: `gloop-eaters compile` makes it",
                        path.display()
                    )
                })?;
                let module = self.runtime.load(&image)?;
                modules.insert(program.to_owned(), module.clone());
                module
            }
        };
        Ok(module.kernel(name)?)
    }

    /// Runs a kernel to its end. Returns the time it took.
    pub fn native(
        &self,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
        args: &Args,
    ) -> Result<Duration> {
        let start = Instant::now();
        self.stream.launch(kernel, blocks, threads, 0, None, args)?;
        self.stream.wait()?;
        Ok(start.elapsed())
    }
}

/// Stops jobs at random moments.
pub struct Stops {
    wanted: u64,
    done: u64,
    runs: u64,
    random: fastrand::Rng,
    until: Instant,
}

impl Stops {
    pub fn new(wanted: u64, seconds: u64, seed: u64) -> Self {
        Self {
            wanted,
            done: 0,
            runs: 0,
            random: fastrand::Rng::with_seed(seed),
            until: Instant::now() + Duration::from_secs(seconds),
        }
    }

    /// Whether more stops are to come.
    pub fn more(&self) -> bool {
        self.done < self.wanted && Instant::now() < self.until
    }

    /// Runs a job to its end with random stops, each after at most `longest`.
    pub fn run(&mut self, job: &mut Job, longest: Duration) -> Result<()> {
        self.runs += 1;
        while self.more() {
            if job.state() == State::Done {
                return Ok(());
            }
            job.resume()?;
            let wait = longest.mul_f64(self.random.f64());
            let start = Instant::now();
            while start.elapsed() < wait {
                std::hint::spin_loop();
            }
            // The job may have ended by itself first, which does not count as a stop.
            if job.suspend()? != State::Done {
                self.done += 1;
            }
        }
        if job.state() != State::Done {
            job.resume()?;
            job.finish()?;
        }
        Ok(())
    }
}

impl fmt::Display for Stops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} random stops in {} runs", self.done, self.runs)
    }
}
