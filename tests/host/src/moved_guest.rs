//! Migrates a whole VM with an application from one gantry to another, on this machine's own KVM.
//!
//! The guest has no operating system. It has written to much of its memory, and computes round after round in its
//! accelerator's memory, from ring 3: before, during and after the migration, until it is told to check whether
//! everything is right.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_tests::{
    report::{Outcome, Skipped},
    rig::packages,
    ring::{
        View,
        desk::{Orders, Rounds, State, filled},
    },
};

use crate::{
    network::Network,
    opencl::pool::{Pool, Way},
    ring, selected,
    shared_device::Process,
};

/// How long the application is observed before it is moved.
const ALONE: Duration = Duration::from_secs(3);
/// Maximum duration of any step.
const PATIENCE: Duration = Duration::from_secs(240);
/// Name of the program that runs the VM.
pub const GANTRY: &str = "gantry";
/// Name of the guest.
pub const GUEST: &str = "gantry-ring-guest";

/// A running gantry.
struct Host {
    process: Process,
    program: PathBuf,
    folder: PathBuf,
}

impl Host {
    fn start(
        mut command: Command,
        program: &Path,
        folder: PathBuf,
        arguments: &[&str],
    ) -> Result<Self> {
        std::fs::create_dir(&folder)?;
        let child = command
            .arg("--api-socket")
            .arg(folder.join("api"))
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(File::create(folder.join("log"))?)
            .spawn()
            .context("cannot start gantry")?;
        let host = Self {
            process: Process(child),
            program: program.to_owned(),
            folder,
        };
        let until = Instant::now() + PATIENCE;
        while packages::output(host.ctl().arg("ping")).is_err() {
            ensure!(Instant::now() < until, "{} does not answer", host.said());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(host)
    }

    fn ctl(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(["ctl", "--socket"])
            .arg(self.folder.join("api"));
        command
    }

    fn said(&self) -> String {
        let log = std::fs::read_to_string(self.folder.join("log"));
        format!("gantry ({})", log.unwrap_or_default().trim())
    }

    fn view(&self) -> Result<View> {
        View::of_process(self.process.0.id()).with_context(|| self.said())
    }
}

fn until(view: &View, what: &str, mut is: impl FnMut(&View) -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !is(view) {
        view.check()?;
        ensure!(Instant::now() < end, "the guest does not {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Makes the guest restart its count of rounds.
fn anew(view: &View) -> Result<()> {
    view.desk().go();
    let since = view.desk().gone();
    until(view, "go on", |view| view.desk().rounds().since == since)
}

/// The cost of a move.
pub struct Moved {
    /// The reply of `vm.migration`.
    info: serde_json::Value,
    /// The application's rounds before the move.
    pub alone: Rounds,
    /// The rounds until the VM stopped.
    pub amid: Rounds,
    /// The same plus the stop and what followed.
    pub all: Rounds,
}

impl Moved {
    /// Returns a number of `vm.migration`.
    pub fn number(&self, name: &str) -> f64 {
        self.info[name].as_u64().unwrap_or(0) as f64
    }

    /// Number of bytes sent over the link, including the application's state.
    pub fn bytes(&self) -> f64 {
        self.number("sent_bytes")
    }
}

/// Source and destination of a migration.
pub struct Route<'a> {
    /// The pools that serve the guest, before and after.
    pub pools: [&'a Pool; 2],
    /// The TCP network between two hosts; `None` uses a Unix socket of this host.
    pub network: Option<&'a Network>,
    /// Amount of memory in MiB that the guest has written to.
    pub filled: u32,
    /// Path of gantry.
    pub gantry: &'a Path,
    /// Path of the guest.
    pub guest: &'a Path,
}

impl Route<'_> {
    /// Runs a program on one of the two hosts.
    fn command(&self, host: usize) -> Command {
        match self.network {
            Some(network) => network.command(host, self.gantry),
            None => Command::new(self.gantry),
        }
    }
}

/// Migrates a guest whose application has `size` MiB of state, with these options of `gantry ctl send-migration`.
pub fn go(route: &Route<'_>, size: u32, how: &[&str]) -> Result<Moved> {
    let work = tempfile::tempdir()?;
    let (program, guest, [from, to]) = (route.gantry, route.guest, route.pools);
    let (kernel, memory) = (guest.display().to_string(), filled(route.filled).end >> 20);
    let memory = format!("size={memory}M,shared=on");
    let accel = format!("socket={},slices=1,window=64M", from.address);
    let machine = ["--kernel", &kernel, "--cpus", "boot=1", "--memory", &memory];
    let devices = ["--serial", "off", "--console", "off", "--accel", &accel];
    let arguments = [&machine[..], &devices].concat();
    let folder = |name| work.path().join(name);
    let source = Host::start(route.command(0), program, folder("source"), &arguments)?;
    let view = source.view()?;
    until(&view, "begin", |view| view.desk().state() == State::Waiting)?;
    view.desk().order_rounds(size, route.filled);
    until(&view, "compute", |view| view.desk().state() == State::Ready)?;
    anew(&view)?;
    thread::sleep(ALONE);
    let alone = view.desk().rounds();

    let destination = Host::start(route.command(1), program, folder("destination"), &[])?;
    let url = match route.network {
        Some(network) => format!("tcp:{}:4444", network.address(1)),
        None => format!("unix:{}", folder("moves").display()),
    };
    let rename = format!("{}={}", from.address, to.address);
    let mut receiving = destination.ctl();
    receiving.args(["receive-migration", &url, "--rename", &rename]);
    if route.network.is_some() {
        receiving.args(["--insecure", "--paths", "/"]);
    }
    let receiving = thread::spawn(move || packages::output(&mut receiving));
    let status = || packages::output(destination.ctl().arg("migration"));
    let end = Instant::now() + PATIENCE;
    while status().is_err() {
        ensure!(Instant::now() < end, "nobody waits for the VM");
        thread::sleep(Duration::from_millis(20));
    }
    anew(&view)?;
    let mut sending = source.ctl();
    sending
        .args(["send-migration", &url, "--preserve-source", "--watch"])
        .args(["--accel", "move"])
        .args(how);
    let sent = packages::output(&mut sending);
    let received = receiving.join();
    let both = || format!("{}, {}", source.said(), destination.said());
    sent.with_context(both)?;
    let received = received.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
    received.with_context(both)?;
    let info = packages::output(source.ctl().arg("migration"))?;

    // The source's guest is stopped.
    let amid = view.desk().rounds();
    let view = destination.view()?;
    until(&view, "go on at the destination", |view| {
        view.desk().rounds().count > amid.count
    })?;
    let all = view.desk().rounds();
    view.desk().order(Orders::Check);
    until(&view, "end", |view| view.desk().state() == State::Done)?;
    Ok(Moved {
        info: serde_json::from_str(&info)?,
        alone,
        amid,
        all,
    })
}

/// Size of the application's state in the scenarios, in MiB.
const STATE: u32 = 32;
/// Amount of memory in MiB that the guest has written to.
const FILLED: u32 = 64;

type Scenario = fn(&Pair) -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "ring-3: a VM moves with its application, which is copied as it stops",
        |pair| {
            let moved = pair.go(&[])?;
            ensure!(moved.number("accel_bytes") == 0.0, "{:?}", moved.info);
            let rest = moved.number("accel_stop_bytes");
            ensure!(rest >= f64::from(STATE << 20), "{:?}", moved.info);
            Ok(())
        },
    ),
    (
        "ring-3: a VM moves with its application, which is copied while it computes",
        |pair| {
            let moved = pair.go(&["--accel-copies"])?;
            let (before, rest) = (
                moved.number("accel_bytes"),
                moved.number("accel_stop_bytes"),
            );
            ensure!(before >= f64::from(STATE << 20), "{:?}", moved.info);
            // A round writes 1 MiB.
            ensure!(rest < f64::from(STATE << 19), "{:?}", moved.info);
            Ok(())
        },
    ),
    (
        "ring-3: a VM moves with its application, whose memory follows while it computes",
        |pair| {
            let moved = pair.go(&["--accel-postcopy"])?;
            let rest = moved.number("accel_stop_bytes");
            ensure!(rest < f64::from(STATE << 19), "{:?}", moved.info);
            let all = f64::from((FILLED + STATE) << 20);
            ensure!(moved.bytes() >= all, "{:?}", moved.info);
            Ok(())
        },
    ),
];

/// Runs the scenarios that the words select.
pub fn run(words: &[String], report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    selected::run(
        SCENARIOS,
        words,
        Pair::start,
        |scenario, pair| scenario(pair),
        report,
    )
}

/// Two pools of this machine that use its OpenCL driver.
struct Pair {
    pools: Option<[Pool; 2]>,
    gantry: PathBuf,
    guest: PathBuf,
}

impl Pair {
    fn start() -> Result<Self> {
        let folder = ring::build()?;
        let start = |name| Pool::start(Way::Rings, name, folder.clone(), &[]);
        let can = File::options().read(true).write(true).open("/dev/kvm");
        let pools = match can {
            Ok(_) => Some([start("from")?, start("to")?]),
            Err(_) => None,
        };
        Ok(Self {
            pools,
            gantry: folder.join(GANTRY),
            guest: folder.join(GUEST),
        })
    }

    fn go(&self, how: &[&str]) -> Result<Moved> {
        let Some([from, to]) = &self.pools else {
            return Err(Skipped("/dev/kvm cannot be used".to_owned()).into());
        };
        let route = Route {
            pools: [from, to],
            network: None,
            filled: FILLED,
            gantry: &self.gantry,
            guest: &self.guest,
        };
        go(&route, STATE, how)
    }
}
