//! A device that several clients share, as plain processes of this machine: an arbiter, one pool of
//! workers per client, and applications.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_build::programs;
use gantry_tests::rig::packages;
use gpu_mediator::status::{self, Client};

/// Programs and files that the scenarios need, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
];

/// The directory with the built programs.
pub struct Built(PathBuf);

impl Built {
    /// Uses the installed drivers.
    pub fn programs(&self) -> Programs<'_> {
        Programs {
            built: &self.0,
            vendors: Path::new("/etc/OpenCL/vendors"),
        }
    }
}

/// Installs and builds what is needed.
pub fn build() -> Result<Built> {
    packages::install(PROGRAMS)?;
    Ok(Built(programs::folder()?))
}

/// A process that is killed when the value is dropped.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The programs to run, and the driver to use.
#[derive(Clone, Copy)]
pub struct Programs<'a> {
    /// Directory of the built programs.
    pub built: &'a Path,
    /// Directory with the `.icd` file of the host's driver.
    pub vendors: &'a Path,
}

impl Programs<'_> {
    /// Starts an application that uses the device natively.
    pub fn native(self, load: &Load, seconds: u64, iteration: Option<f64>) -> Result<Application> {
        let mut command = load.command(self.built, seconds);
        command.args(iteration.map(|nanos| nanos.to_string()));
        command.env("OCL_ICD_VENDORS", self.vendors.join(""));
        Application::ready(&mut command)
    }
}

/// The load of an application.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Approximate lengths of its kernels in microseconds; several lengths are mixed. Zero means
    /// endless.
    pub micros: Vec<u32>,
    /// Number of enqueued kernels.
    pub in_flight: u32,
    /// Makes it a closed loop: it waits for all kernels, sleeps for this many microseconds, and
    /// starts again. Otherwise, the end of each kernel makes it enqueue another one.
    pub think: Option<u32>,
    /// Uses pyopencl, which is third-party code: a closed loop with kernels of one length.
    pub foreign: bool,
}

impl Load {
    /// Always has 64 kernels of these lengths enqueued.
    pub fn busy(micros: &[u32]) -> Self {
        Self {
            micros: micros.to_vec(),
            in_flight: 64,
            think: None,
            foreign: false,
        }
    }

    /// Returns the command, which runs for `seconds`, or until it is told to end if that is zero.
    fn command(&self, built: &Path, seconds: u64) -> Command {
        let micros: Vec<_> = self.micros.iter().map(u32::to_string).collect();
        let mut command = if self.foreign {
            let packed = built.join("turns.py");
            let mut python = Command::new("python3");
            python.arg(match packed.exists() {
                true => packed,
                false => gantry_build::root().join("guest/opencl/tests/turns.py"),
            });
            python
        } else {
            Command::new(built.join("examples/opencl_turns"))
        };
        command
            .arg(micros.join(","))
            .args([self.in_flight.to_string(), seconds.to_string()])
            .env_remove("OCL_ICD_FILENAMES");
        if let Some(think) = self.think {
            command.env("OPENCL_TURNS_THINK", think.to_string());
        }
        command
    }
}

/// Everything that shares one device.
pub struct Machine {
    built: PathBuf,
    /// Nanoseconds per iteration of a kernel; if not given, applications measure it themselves.
    pub iteration: Option<f64>,
    /// Sockets, logs and caches.
    pub folder: PathBuf,
    /// The arbiter of all pools.
    pub arbiter: Process,
    /// A pool per client.
    pub pools: Vec<Process>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.pools.clear();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A computing application.
pub struct Application {
    /// Its process.
    pub process: Process,
    /// Nanoseconds per iteration of its kernels.
    pub iteration: f64,
    output: BufReader<ChildStdout>,
}

impl Application {
    fn start(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let output = child.stdout.take().context("no output")?;
        Ok(Self {
            process: Process(child),
            iteration: 0.0,
            output: BufReader::new(output),
        })
    }

    /// Starts an application and waits until it is ready to begin.
    fn ready(command: &mut Command) -> Result<Self> {
        let mut application = Self::start(command)?;
        let line = application.line()?;
        let iteration = line
            .strip_prefix("running ")
            .and_then(|nanos| nanos.parse().ok());
        application.iteration =
            iteration.with_context(|| format!("the application said {line:?}"))?;
        Ok(application)
    }

    /// Reads its next line; empty at the end of its output.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Makes it begin.
    pub fn go(&mut self) -> Result<()> {
        let input = self.process.0.stdin.as_mut().context("no input")?;
        Ok(input.write_all(b"\n")?)
    }

    /// Makes it end, and returns what it then prints.
    pub fn end(&mut self) -> Result<String> {
        drop(self.process.0.stdin.take());
        self.line()
    }
}

impl Machine {
    /// Starts an arbiter with these options, and a pool for each weight, named by its index.
    pub fn start(programs: Programs, options: &[&str], weights: &[u32]) -> Result<Self> {
        // A socket's path is limited to 107 bytes, so it cannot be in the target directory.
        let folder = std::env::temp_dir().join(format!("gantry-sharing-{}", std::process::id()));
        fs::create_dir_all(folder.join("vendors"))?;
        let driver = programs.built.join("libgantry_opencl.so");
        fs::write(
            folder.join("vendors/gantry.icd"),
            format!("{}\n", driver.display()),
        )?;
        let mut machine = Self {
            arbiter: arbiter(programs.built, &folder, options)?,
            built: programs.built.to_owned(),
            iteration: None,
            folder,
            pools: Vec::new(),
        };
        for (index, weight) in weights.iter().enumerate() {
            let socket = machine.folder.join(format!("pool{index}"));
            let process = Command::new(programs.built.join("gantry-accel"))
                .args(["serve", "--spare", "1", "--socket"])
                .arg(&socket)
                .arg("--arbiter")
                .arg(machine.folder.join("arbiter"))
                .args(["--name", &index.to_string(), "--memory", "4096"])
                .args(["--weight", &weight.to_string()])
                .arg("--cache")
                .arg(machine.folder.join(format!("cache{index}")))
                // Some loaders require a trailing slash, which the pool's workers get.
                .env("OCL_ICD_VENDORS", programs.vendors)
                // This variable would add other drivers.
                .env_remove("OCL_ICD_FILENAMES")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(fs::File::create(socket.with_extension("log"))?)
                .spawn()
                .context("cannot start gantry-accel")?;
            machine.pools.push(Process(process));
            wait_for("gantry-accel to listen", || Ok(socket.exists()))?;
        }
        Ok(machine)
    }

    /// Starts an application of a client for `seconds`, or until it is told to end if that is zero.
    /// Its kernels take about `micros` microseconds (several lengths are mixed); zero means
    /// endless.
    pub fn application(&self, client: usize, micros: &[u32], seconds: u64) -> Result<Application> {
        self.run(client, &Load::busy(micros), seconds)
    }

    /// Starts any application of a client for `seconds`, or until it is told to end if that is
    /// zero.
    pub fn run(&self, client: usize, load: &Load, seconds: u64) -> Result<Application> {
        let mut command = load.command(&self.built, seconds);
        command.args(self.iteration.map(|nanos| nanos.to_string()));
        self.environment(client, &mut command);
        Application::ready(&mut command)
    }

    /// Makes a client's program use the device through Gantry.
    pub fn environment(&self, client: usize, command: &mut Command) {
        command
            .env("OCL_ICD_VENDORS", self.folder.join("vendors/"))
            .env("GANTRY_OPENCL", self.folder.join(format!("pool{client}")));
    }

    /// Starts a new arbiter in place of one that has ended.
    pub fn restart_arbiter(&mut self, options: &[&str]) -> Result<()> {
        self.arbiter = arbiter(&self.built, &self.folder, options)?;
        Ok(())
    }

    /// Starts the hostile application as a client.
    pub fn attack(&self, client: usize, what: &str) -> Result<Application> {
        let mut command = Command::new("timeout");
        command
            .arg("60")
            .arg(self.built.join("examples/opencl_hostile"))
            .arg(self.folder.join(format!("pool{client}")))
            .arg(what);
        Application::start(&mut command)
    }

    /// Returns the usage of each client.
    pub fn clients(&self) -> Result<BTreeMap<usize, Client>> {
        let status = status::read(&self.folder.join("arbiter"))
            .context("the arbiter does not show its figures")?;
        let numbered = |client: Client| Ok((client.name.parse()?, client));
        status.clients.into_iter().map(numbered).collect()
    }

    /// How many calls a client has made so far.
    pub fn calls(&self, client: usize) -> Result<u64> {
        Ok(self
            .clients()?
            .get(&client)
            .map_or(0, |client| client.calls))
    }

    /// Waits until a client has submitted more work.
    pub fn goes_on(&self, client: usize) -> Result<()> {
        let before = self.calls(client)?;
        wait_for("another application to go on", || {
            Ok(self.calls(client)? > before + 20)
        })
    }

    /// The workers of a pool, including the one that waits for an application.
    pub fn workers(&self, pool: usize) -> Result<Vec<i32>> {
        let id = self.pools[pool].0.id();
        let children = gantry_tests::processes::children(id)?;
        Ok(children.into_iter().map(u32::cast_signed).collect())
    }

    /// Kills the workers of a pool.
    pub fn kill_workers(&self, pool: usize) -> Result<()> {
        let workers = self.workers(pool)?;
        ensure!(!workers.is_empty(), "the pool has no workers");
        for worker in workers {
            // SAFETY: a plain call.
            unsafe { libc::kill(worker, libc::SIGKILL) };
        }
        Ok(())
    }
}

fn arbiter(built: &Path, folder: &Path, options: &[&str]) -> Result<Process> {
    let socket = folder.join("arbiter");
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"))?;
    let process = Command::new(built.join("gantry-arbiter"))
        .arg("--socket")
        .arg(&socket)
        .args(options)
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .context("cannot start gantry-arbiter")?;
    let process = Process(process);
    wait_for("gantry-arbiter to listen", || {
        Ok(status::read(&socket).is_ok())
    })?;
    Ok(process)
}

/// Maximum wait for what should take moments. Only a hang reaches it, on any machine.
pub const PATIENCE: Duration = Duration::from_secs(100);

/// Waits until the condition holds.
pub fn wait_for(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !is()? {
        ensure!(Instant::now() < until, "timed out waiting for {what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
