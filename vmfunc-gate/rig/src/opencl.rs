//! OpenCL in the Linux guests of [`seats`](crate::seats), with PoCL from a disk. One guest has a
//! server behind the gate. The other has its own pool, and a program that moves from the pool to
//! that server and back while it computes.
//!
//! `/bin/prepare` mounts the disk, and puts programs of this repository into its `/tmp`.

use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    init::{mount_all, print},
    machine::{PATIENCE, SOON},
};

/// Printed by a guest when its program has computed through rings, behind the gate, and through
/// rings again.
pub const BY_RINGS: &str = "by rings";
pub const BEHIND: &str = "behind the gate";
pub const AGAIN: &str = "by rings again";
/// Printed when the program has then continued, and when all of its results were correct.
pub const ON: &str = "goes on";
pub const RIGHT: &str = "right";

/// The mount point of the disk with PoCL, which is the root folder of programs that need it.
const ROOT: &str = "/opencl";

/// These paths are the same for those programs and this one.
const POOL: &str = "/tmp/pool";
const GATE: &str = "gate";
const CONTROL: &str = "/tmp/control";
const COMPILED: &str = "/tmp/compiled";
/// How long the program may take to drain for a move, in milliseconds: more than the emulator
/// needs.
const DRAIN: &str = "300000";
/// The maximum number of processes that try to move behind the gate.
const PROCESSES: u32 = 8;
const STOP: &str = "/tmp/stop";
const SAID: &str = "/tmp/said";
const LOG: &str = "/tmp/log";

fn prepare() -> Result<()> {
    mount_all()?;
    succeeds(&Command::new("/bin/prepare").output()?)
}

fn succeeds(output: &Output) -> Result<()> {
    ensure!(
        output.status.success(),
        "{}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// A program with the disk as its root.
fn program(name: &str) -> Command {
    let mut command = Command::new("/bin/busybox");
    command
        .args(["chroot", ROOT, &format!("/tmp/{name}")])
        // PoCL runs a program to link what it has compiled.
        .env("PATH", "/usr/bin")
        .envs([("HOME", "/tmp"), ("POCL_CACHE_DIR", "/tmp")])
        .stdin(Stdio::null());
    command
}

/// Starts a program that logs to a file.
fn start(command: &mut Command) -> Result<Child> {
    let log = File::options().create(true).append(true).open(LOG)?;
    Ok(command.stderr(log).spawn()?)
}

fn log() -> String {
    fs::read_to_string(LOG).unwrap_or_default()
}

/// Runs a guest's role. If it fails, powers off the machine, so that nobody waits for it.
pub fn run(role: impl FnOnce() -> Result<()>) -> Result<()> {
    role().inspect_err(|error| {
        print(&format!("{error:#}"));
        // SAFETY: there is nothing on a disk that could be lost.
        unsafe { libc::reboot(libc::RB_POWER_OFF) };
    })
}

/// Serves behind the gate for as long as applications arrive.
pub fn serve() -> Result<()> {
    prepare()?;
    let mut passive = program("gantry-accel");
    passive.args(["passive", "--own-cpu", "--heap", "8"]);
    let ended = start(&mut passive)?.wait()?;
    bail!("the server has ended ({ended}): {}", log())
}

/// Waits until a condition holds.
fn until(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is()? {
        ensure!(start.elapsed() < PATIENCE, "{what}: not for {PATIENCE:?}");
        thread::sleep(SOON);
    }
    Ok(())
}

/// The pool of this guest.
struct Pool(Child);

impl Pool {
    fn start() -> Result<Self> {
        let mut serve = program("gantry-accel");
        serve
            .args(["serve", "--socket", POOL, "--control", CONTROL])
            // The smallest window, for which the gate has room.
            .args(["--window", "8", "--spare", "1", "--cache", "/tmp"]);
        let pool = Self(start(&mut serve)?);
        until("the pool listens", || Ok(Path::new(POOL).exists()))?;
        Ok(pool)
    }

    /// The number of workers, including those that wait for applications.
    fn workers(&self) -> Result<usize> {
        // Those of all of its threads: one of them starts the workers.
        let mut count = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.0.id()))? {
            let children = fs::read_to_string(thread?.path().join("children"))?;
            count += children.split_whitespace().count();
        }
        Ok(count)
    }

    /// Waits until there are this many workers.
    fn has_workers(&self, expected: usize) -> Result<()> {
        until(&format!("the pool has {expected} workers"), || {
            Ok(self.workers()? == expected)
        })
    }

    /// The pool's list of its applications.
    fn list(&self) -> Result<String> {
        let mut list = program("gantry-accel");
        let output = list
            .args(["move", "--control", CONTROL, "--list"])
            .output()?;
        succeeds(&output)?;
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Waits until one of its workers serves this application, and another one waits for the next.
    fn serves(&self, application: u32) -> Result<()> {
        self.has_workers(2)?;
        let list = self.list()?;
        let by_worker = format!("process {application} worker ");
        let is_here = list.lines().count() == 1 && list.starts_with(&by_worker);
        ensure!(is_here, "{list}");
        Ok(())
    }

    /// Waits until none of its workers serves anybody, and it reports that this application is
    /// elsewhere.
    fn has_sent(&self, application: u32, to: &str) -> Result<()> {
        self.has_workers(1)?;
        let list = self.list()?;
        ensure!(list == format!("process {application} at {to}\n"), "{list}");
        Ok(())
    }

    /// Orders the application with this process ID to move to an address. Returns the result.
    fn order(&self, application: u32, to: &str) -> Result<String> {
        let mut order = program("gantry-accel");
        let pid = format!("--pid={application}");
        let output = order
            .args(["move", "--control", CONTROL, &pid, "--to", to])
            .args(["--drain", DRAIN]);
        Ok(String::from_utf8(output.output()?.stdout)?)
    }

    /// The same, and checks that the application has moved.
    fn send(&self, application: u32, to: &str) -> Result<()> {
        let said = self.order(application, to)?;
        ensure!(is_moved(&said, application, to), "{said} {}", log());
        Ok(())
    }
}

fn is_moved(said: &str, application: u32, to: &str) -> bool {
    said == format!("process {application} moved to {to}\n")
}

/// A program that compares each round of its results with its own computation.
struct Computing(Child);

impl Computing {
    fn start() -> Result<Self> {
        let mut command = program("opencl-moving");
        command
            .arg(STOP)
            .env("OPENCL_MOVING_BINARY", COMPILED)
            .env("OCL_ICD_VENDORS", "/tmp/vendors/")
            .env("GANTRY_OPENCL", POOL)
            .stdout(File::create(SAID)?);
        Ok(Self(start(&mut command)?))
    }

    /// Waits until it has printed two more lines: all rounds before the last of them have begun
    /// since.
    fn goes_on(&mut self) -> Result<()> {
        let lines = || Ok::<_, anyhow::Error>(fs::read_to_string(SAID)?.lines().count());
        let before = lines()?;
        until("the program goes on", || {
            if let Some(status) = self.0.try_wait()? {
                bail!("the program has ended ({status}): {}", log());
            }
            Ok(lines()? >= before + 2)
        })
    }

    fn ends(mut self) -> Result<()> {
        File::create(STOP)?;
        let status = self.0.wait()?;
        let said = fs::read_to_string(SAID)?;
        let last = said.lines().last().unwrap_or_default();
        let right = last.starts_with("all ") && last.ends_with(" rounds were right");
        ensure!(status.success() && right, "{status}: {said}{}", log());
        print(last);
        Ok(())
    }
}

/// Starts a program that computes through rings, and moves it behind the gate: the first program
/// that can be moved, because its page table is where the server's kernel has nothing. Others stay
/// where they are.
fn behind_the_gate(pool: &Pool) -> Result<Computing> {
    for _ in 0..PROCESSES {
        let mut computing = Computing::start()?;
        let process = computing.0.id();
        computing.goes_on()?;
        pool.serves(process)?;
        print(BY_RINGS);
        let said = pool.order(process, GATE)?;
        if is_moved(&said, process, GATE) {
            return Ok(computing);
        }
        ensure!(said.contains("try in another process"), "{said} {}", log());
        computing.goes_on()?;
        computing.ends()?;
        fs::remove_file(STOP)?;
        pool.has_workers(1)?;
        // This process occupies that page from now on, so that the next program gets another one.
        Command::new("/bin/busybox").args(["sleep", "1d"]).spawn()?;
    }
    bail!("none of {PROCESSES} processes could go behind the gate")
}

/// Has a program compute through rings with this guest's pool, then behind the gate, and through
/// rings again.
pub fn compute() -> Result<()> {
    prepare()?;
    let start = Instant::now();
    // Nothing must be compiled while the program moves, since that takes long here.
    let mut compile = program("opencl-moving");
    compile
        .arg("/dev/null")
        .env("OPENCL_MOVING_BINARY", COMPILED);
    succeeds(&compile.output()?).context("compiling")?;
    print(&format!("compiled after {:?}", start.elapsed()));
    let pool = Pool::start()?;
    let mut computing = behind_the_gate(&pool)?;
    let process = computing.0.id();
    computing.goes_on()?;
    pool.has_sent(process, GATE)?;
    print(BEHIND);
    pool.send(process, POOL)?;
    computing.goes_on()?;
    pool.serves(process)?;
    print(AGAIN);
    computing.goes_on()?;
    print(ON);
    computing.ends()?;
    pool.has_workers(1)?;
    print(RIGHT);
    Ok(())
}
