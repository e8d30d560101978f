//! Jobs that take turns of a real arbiter, as processes of this machine. Their kernels are threads, so no GPU is
//! needed. Assertions only use counts from the arbiter's account.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_build::{programs, root};
use gantry_tests::rig::packages;
use gpu_mediator::status::{self, Client};

use crate::shared_device::Process;

/// Run time limit in milliseconds: an endless request loses its process after twice this time.
const LIMIT: &str = "300";
/// Maximum wait for expected events.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum number of observed periods until one is fair: a job that waits for a CPU of a busy machine is late with its
/// next steps.
const STRETCHES: usize = 3;
/// Number of steps that takes longer than any scenario.
const ENDLESS: &str = "1000000000";

struct Machine {
    socket: PathBuf,
    arbiter: Process,
    folder: PathBuf,
    /// Where the programs are that the machine runs.
    built: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Machine {
    fn start() -> Result<Self> {
        let built = programs::folder()?;
        let folder = std::env::temp_dir().join(format!("gantry-gloop-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        packages::run(&mut in_c(&built, &folder.join("turns")))?;
        let socket = folder.join("arbiter");
        Ok(Self {
            arbiter: Self::arbiter(&built, &socket)?,
            socket,
            folder,
            built,
        })
    }

    fn arbiter(built: &Path, socket: &Path) -> Result<Process> {
        let mut command = Command::new(built.join("gantry-arbiter"));
        command.arg("--socket").arg(socket);
        command.args(["--policy", "fair-preemptive", "--limit", LIMIT]);
        spawn(&mut command)
    }

    /// Starts a process with an endless job that uses the C interface.
    fn job_in_c(&self, name: &str, weight: u32) -> Result<Process> {
        let mut command = Command::new(self.folder.join("turns"));
        command.arg(&self.socket).arg(name);
        spawn(command.args([&weight.to_string(), ENDLESS]))
    }

    /// Starts a process with an endless job.
    fn job(&self, name: &str, weight: u32, how: &[&str]) -> Result<Process> {
        let mut command = Command::new(self.built.join("examples/host_kernel"));
        command.arg(&self.socket).arg(name);
        spawn(command.args([&weight.to_string(), ENDLESS]).args(how))
    }

    fn clients(&self) -> Vec<Client> {
        let status = status::read(&self.socket);
        status.map(|status| status.clients).unwrap_or_default()
    }

    /// What the arbiter knows about a client; empty if it has not connected.
    fn client(&self, name: &str) -> Client {
        let [client] = self.at_once([name]);
        client
    }

    /// The same for several clients at one point in time.
    fn at_once<const N: usize>(&self, names: [&str; N]) -> [Client; N] {
        let clients = self.clients();
        names.map(|name| {
            let mut clients = clients.iter();
            let found = clients.rfind(|client| client.name == name);
            found.cloned().unwrap_or_default()
        })
    }

    /// Waits until the client has computed for this time beyond what it has now.
    fn computes(&self, name: &str, time: Duration) -> Result<()> {
        let until = self.client(name).device_time + time.as_nanos() as u64;
        wait_for(&format!("{name} does not compute"), || {
            self.client(name).device_time > until
        })
    }
}

fn spawn(command: &mut Command) -> Result<Process> {
    let command = command.stdin(Stdio::null()).stderr(Stdio::null());
    let child: Child = command
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    Ok(Process(child))
}

fn wait_for(failure: &str, mut reached: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !reached() {
        ensure!(start.elapsed() < PATIENCE, "{failure}");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Builds the command that compiles the C program with the library in a folder.
pub fn in_c(libraries: &Path, to: &Path) -> Command {
    let gloop = root().join("gloop");
    let mut cc = Command::new("cc");
    cc.args([
        "-std=c11",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-O2",
        "-pthread",
    ])
    .arg("-I")
    .arg(gloop.join("include"))
    .arg(gloop.join("examples/turns.c"))
    .arg("-L")
    .arg(libraries)
    .arg("-lgloop")
    // The library is next to the program, or where it was built.
    .arg(format!("-Wl,-rpath,$ORIGIN:{}", libraries.display()))
    .arg("-o")
    .arg(to);
    cc
}

/// Tests weights 1 and 3, where the latter is a C program; then kills processes.
pub fn shared() -> Result<()> {
    let mut machine = Machine::start()?;
    let mut small = machine.job("small", 1, &[])?;
    let _large = machine.job_in_c("large", 3)?;
    let turns = |name| machine.client(name).turns;
    wait_for("a job has no turn", || {
        turns("small") > 1 && turns("large") > 1
    })?;
    let times = || {
        let both = machine.at_once(["small", "large"]);
        both.map(|client| client.device_time)
    };
    let mut shares: Vec<f64> = Vec::new();
    while !shares
        .last()
        .is_some_and(|share| (0.70..0.80).contains(share))
    {
        ensure!(
            shares.len() < STRETCHES,
            "the weight of 3 beside 1 has had these parts of the device, stretch by stretch: {shares:.3?}"
        );
        let before = times();
        machine.computes("small", Duration::from_millis(1000))?;
        let [small_time, large_time] = times();
        let used = [small_time - before[0], large_time - before[1]];
        shares.push(used[1] as f64 / (used[0] + used[1]) as f64);
    }
    // Kills a process that computes or waits.
    small.0.kill()?;
    machine.computes("large", Duration::from_millis(500))?;
    wait_for("it still belongs", || machine.client("small").workers == 0)?;
    // Kills the arbiter: the job stops, and continues with the next arbiter.
    machine.arbiter.0.kill()?;
    machine.arbiter.0.wait()?;
    machine.arbiter = Machine::arbiter(&machine.built, &machine.socket)?;
    machine.computes("large", Duration::from_millis(200))?;
    ensure!(machine.client("large").turns == 1, "alone it has one turn");
    Ok(())
}

/// Tests a kernel without yield points next to one that has some.
pub fn stubborn() -> Result<()> {
    let machine = Machine::start()?;
    let mut eater = machine.job("eater", 1, &["stubborn"])?;
    machine.computes("eater", Duration::from_millis(1000))?;
    ensure!(
        machine.client("eater").killed == 0,
        "it was killed although nobody else waited"
    );
    let _other = machine.job("other", 1, &[])?;
    wait_for("it was not killed", || machine.client("eater").killed == 1)?;
    ensure!(!eater.0.wait()?.success(), "it has ended by itself");
    machine.computes("other", Duration::from_millis(200))
}
