//! Sharing the host's OpenCL device by weight: an arbiter, pools, workers and applications as
//! plain processes of this machine.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_tests::{report::Outcome, rig::packages};
use gpu_mediator::arbiter::status::{self, Client};

use crate::{
    programs::{cargo, target},
    progress::Step,
};

/// Programs and files that the scenarios need, and the Debian packages that have them.
const PROGRAMS: &[(&str, &str)] = &[
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
];

type Scenario = fn(&Path) -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "sharing: two applications get the device by weight",
        |release| by_weight(release, &[1, 2]),
    ),
    (
        "sharing: six applications get the device by weight",
        |release| by_weight(release, &[1, 2, 2, 3, 3, 4]),
    ),
    (
        "sharing: a killed worker costs its application an error, and others go on",
        killed_worker,
    ),
    (
        "sharing: a killed arbiter costs nobody anything once there is another one",
        killed_arbiter,
    ),
    (
        "sharing: a kernel without end costs its worker, and others go on",
        endless,
    ),
];

/// Whether a word selects a scenario.
pub fn has(word: &str) -> bool {
    SCENARIOS.iter().any(|(name, _)| name.contains(word))
}

/// Runs the scenarios that the words select, all if there are none.
pub fn run(words: &[String], mut report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word));
    if !SCENARIOS.iter().any(|(name, _)| wanted(name)) {
        return Ok(());
    }
    packages::install(PROGRAMS)?;
    let step = Step::new("building the arbiter, the OpenCL driver and its worker (release)");
    let mut build = cargo();
    build.args(["build", "--release", "--quiet"]);
    build.args([
        "-p",
        "gantry-remoting",
        "-p",
        "gantry-opencl",
        "-p",
        "gpu-mediator",
    ]);
    build.args(["--lib", "--bins", "--examples"]);
    packages::run(&mut build)?;
    step.finish();
    let release = fs::canonicalize(target().join("release"))?;
    for (name, scenario) in SCENARIOS.iter().filter(|(name, _)| wanted(name)) {
        let start = Instant::now();
        let outcome = match scenario(&release) {
            Ok(()) => Outcome::Passed,
            Err(error) => Outcome::Failed(error.chain().map(ToString::to_string).collect()),
        };
        report(name, &outcome, start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// A process that ends with the scenario.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Everything on one device.
struct Machine {
    release: PathBuf,
    folder: PathBuf,
    arbiter: Process,
    options: Vec<&'static str>,
    pools: Vec<Process>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.pools.clear();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// An application that computes until it is told to end.
struct Application {
    process: Process,
    output: BufReader<ChildStdout>,
}

impl Application {
    /// Its next line; empty at its end.
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Has it begin.
    fn go(&mut self) -> Result<()> {
        let input = self.process.0.stdin.as_mut().context("no input")?;
        Ok(input.write_all(b"\n")?)
    }
}

impl Machine {
    /// An arbiter with these options, and a pool for each weight, named by its place.
    fn start(release: &Path, options: &[&'static str], weights: &[u32]) -> Result<Self> {
        // A socket's path has at most 107 bytes: not below the target folder.
        let folder = std::env::temp_dir().join(format!("gantry-sharing-{}", std::process::id()));
        fs::create_dir_all(folder.join("vendors"))?;
        let driver = release.join("libgantry_opencl.so");
        fs::write(
            folder.join("vendors/gantry.icd"),
            format!("{}\n", driver.display()),
        )?;
        let mut machine = Self {
            arbiter: arbiter(release, &folder, options)?,
            release: release.to_owned(),
            folder,
            options: options.to_vec(),
            pools: Vec::new(),
        };
        for (index, weight) in weights.iter().enumerate() {
            let socket = machine.folder.join(format!("pool{index}"));
            let process = Command::new(machine.release.join("gantry-accel"))
                .args(["serve", "--spare", "1", "--socket"])
                .arg(&socket)
                .arg("--arbiter")
                .arg(machine.folder.join("arbiter"))
                .args(["--name", &index.to_string()])
                .args(["--weight", &weight.to_string()])
                .env("OCL_ICD_VENDORS", "/etc/OpenCL/vendors")
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

    /// Starts an application of a client whose kernels take about so long; zero: without end.
    fn application(&self, client: usize, micros: u32) -> Result<Application> {
        let mut child = Command::new(self.release.join("examples/opencl_turns"))
            .args([&micros.to_string(), "64", "0"])
            .env("OCL_ICD_VENDORS", self.folder.join("vendors"))
            .env("GANTRY_OPENCL", self.folder.join(format!("pool{client}")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start opencl_turns")?;
        let output = child.stdout.take().context("no output")?;
        let mut application = Application {
            process: Process(child),
            output: BufReader::new(output),
        };
        let line = application.line()?;
        ensure!(line == "running", "the application said {line:?}");
        Ok(application)
    }

    /// What each client has had.
    fn clients(&self) -> Result<BTreeMap<usize, Client>> {
        let status = status::read(&self.folder.join("arbiter"))
            .context("the arbiter does not show its figures")?;
        let numbered = |client: Client| Ok((client.name.parse()?, client));
        status.clients.into_iter().map(numbered).collect()
    }

    fn calls(&self, client: usize) -> Result<u64> {
        Ok(self
            .clients()?
            .get(&client)
            .map_or(0, |client| client.calls))
    }

    /// Waits until a client has submitted more.
    fn goes_on(&self, client: usize) -> Result<()> {
        let before = self.calls(client)?;
        wait_for("another application to go on", || {
            Ok(self.calls(client)? > before + 20)
        })
    }

    /// The workers of a pool that serve an application.
    fn kill_workers(&self, pool: usize) -> Result<()> {
        let id = self.pools[pool].0.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        // A pool has threads, whose children these are as well.
        ensure!(!children.trim().is_empty(), "the pool has no workers");
        for child in children.split_whitespace() {
            // SAFETY: a plain call.
            unsafe { libc::kill(child.parse()?, libc::SIGKILL) };
        }
        Ok(())
    }
}

fn arbiter(release: &Path, folder: &Path, options: &[&str]) -> Result<Process> {
    let socket = folder.join("arbiter");
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"))?;
    let process = Command::new(release.join("gantry-arbiter"))
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

/// Waits until it is so.
fn wait_for(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(40);
    while !is()? {
        ensure!(Instant::now() < until, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn by_weight(release: &Path, weights: &[u32]) -> Result<()> {
    // On a busy machine without a GPU, an application with short kernels may be too slow to have
    // some ready always. These are not; their lengths differ by a factor of four.
    const LENGTHS: [u32; 6] = [20_000, 8_000, 12_000, 5_000, 8_000, 5_000];
    let machine = Machine::start(release, &[], weights)?;
    let mut applications = Vec::new();
    for (client, micros) in LENGTHS.iter().enumerate().take(weights.len()) {
        applications.push(machine.application(client, *micros)?);
    }
    for application in &mut applications {
        application.go()?;
    }
    // The lightest client has two rounds of everybody's kernels behind it before counting begins.
    wait_for("all applications to compute", || {
        let clients = machine.clients()?;
        Ok((0..weights.len()).all(|client| clients.get(&client).is_some_and(|c| c.turns > 5)))
    })?;
    let before = machine.clients()?;
    thread::sleep(Duration::from_secs(12));
    let after = machine.clients()?;
    let normal: Vec<f64> = weights
        .iter()
        .enumerate()
        .map(|(client, weight)| {
            let time = |clients: &BTreeMap<usize, Client>| clients[&client].device_time;
            (time(&after) - time(&before)) as f64 / 1e9 / f64::from(*weight)
        })
        .collect();
    let least = normal.iter().copied().fold(f64::INFINITY, f64::min);
    let most = normal.iter().copied().fold(0.0, f64::max);
    ensure!(
        least > 0.8 * most,
        "seconds of the device by weight: {normal:.2?}"
    );
    Ok(())
}

fn killed_worker(release: &Path) -> Result<()> {
    let machine = Machine::start(release, &[], &[1, 1])?;
    let mut victim = machine.application(0, 3_000)?;
    let mut other = machine.application(1, 3_000)?;
    victim.go()?;
    other.go()?;
    machine.goes_on(0)?;
    machine.goes_on(1)?;
    machine.kill_workers(0)?;
    let line = victim.line()?;
    ensure!(line.starts_with("error -"), "the application said {line:?}");
    machine.goes_on(1)
}

fn killed_arbiter(release: &Path) -> Result<()> {
    let mut machine = Machine::start(release, &[], &[1, 1])?;
    let mut applications = [
        machine.application(0, 3_000)?,
        machine.application(1, 3_000)?,
    ];
    for application in &mut applications {
        application.go()?;
    }
    machine.goes_on(0)?;
    machine.arbiter.0.kill()?;
    machine.arbiter.0.wait()?;
    thread::sleep(Duration::from_millis(500));
    for application in &mut applications {
        ensure!(
            application.process.0.try_wait()?.is_none(),
            "an application ended with the arbiter"
        );
    }
    machine.arbiter = arbiter(&machine.release, &machine.folder, &machine.options)?;
    wait_for("the workers to find the new arbiter", || {
        Ok(machine.clients()?.len() == 2)
    })?;
    machine.goes_on(0)?;
    machine.goes_on(1)
}

fn endless(release: &Path) -> Result<()> {
    let machine = Machine::start(release, &["--limit", "1000"], &[1, 1])?;
    let mut offender = machine.application(0, 0)?;
    let mut other = machine.application(1, 3_000)?;
    other.go()?;
    machine.goes_on(1)?;
    offender.go()?;
    let line = offender.line()?;
    ensure!(line.starts_with("error -"), "the application said {line:?}");
    machine.goes_on(1)?;
    let killed = machine.clients()?.get(&0).map_or(0, |client| client.killed);
    if killed != 1 {
        bail!("the arbiter has ended {killed} workers for it, and not one");
    }
    ensure!(
        other.process.0.try_wait()?.is_none(),
        "the other application has ended, too"
    );
    Ok(())
}
