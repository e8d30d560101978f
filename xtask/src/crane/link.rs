//! A whole VM with an application goes from one host to another over a link of 1 Gb/s, as Crane's do.
//!
//! The guest has no operating system. It has written to 2 GiB of its memory, and computes round after round on
//! its accelerator's memory, from ring 3: before the move, meanwhile, and after it, until it is told to look whether
//! everything is right. Both hosts are this machine, with a network and a pool of workers each.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_tests::{
    rig::packages,
    ring::{
        View, clock,
        desk::{FILLED, Orders, Rounds, State},
    },
};

use super::{Movable, network::Network, row};
use crate::{ring, shared_device::Process};

/// MiB of the application's state, as with other moves.
const STATES: [u32; 2] = [16, 256];
/// For how long the application is looked at before it is moved.
const ALONE: Duration = Duration::from_secs(3);
/// How long any step may take.
const PATIENCE: Duration = Duration::from_secs(240);
/// What makes the network, and the Debian package that has it.
pub const PACKAGES: &[(&str, &str)] = &[("ip", "iproute2"), ("tc", "iproute2")];
/// The programs.
pub const GANTRY: &str = "gantry";
pub const GUEST: &str = "gantry-ring-guest";

/// A gantry.
struct Host {
    process: Process,
    program: PathBuf,
    folder: PathBuf,
}

impl Host {
    /// On one of the two hosts.
    fn start(
        network: &Network,
        which: usize,
        program: &Path,
        folder: PathBuf,
        arguments: &[&str],
    ) -> Result<Self> {
        std::fs::create_dir(&folder)?;
        let child = network
            .command(which, program)
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

/// Has the guest begin to count its rounds anew.
fn anew(view: &View) -> Result<()> {
    view.desk().go();
    let since = view.desk().gone();
    until(view, "go on", |view| view.desk().rounds().since == since)
}

/// Rounds for each million counts of the time stamp counter.
fn rate(rounds: Rounds) -> f64 {
    rounds.count as f64 * 1e6 / rounds.counts.max(1) as f64
}

/// What a move has taken.
struct Moved {
    /// What `vm.migration` says.
    info: serde_json::Value,
    alone: Rounds,
    /// Until the VM stood still.
    amid: Rounds,
    /// The same, the stop, and what followed.
    all: Rounds,
}

impl Moved {
    fn number(&self, name: &str) -> f64 {
        self.info[name].as_u64().unwrap_or(0) as f64
    }

    /// Everything that went over the link, the application's state included.
    fn bytes(&self) -> f64 {
        self.number("sent_bytes")
    }
}

/// Moves a guest whose application has so many MiB of state.
fn one(
    [from, to]: &[Movable; 2],
    network: &Network,
    guest: &Path,
    size: u32,
    how: &[&str],
) -> Result<Moved> {
    let work = tempfile::tempdir()?;
    let program = from.pool.release.join(GANTRY);
    let (kernel, memory) = (guest.display().to_string(), FILLED.end >> 20);
    let memory = format!("size={memory}M,shared=on");
    let accel = format!("socket={},slices=1,window=64M", from.pool.address);
    let machine = ["--kernel", &kernel, "--cpus", "boot=1", "--memory", &memory];
    let devices = ["--serial", "off", "--console", "off", "--accel", &accel];
    let arguments = [&machine[..], &devices].concat();
    let folder = |name| work.path().join(name);
    let source = Host::start(network, 0, &program, folder("source"), &arguments)?;
    let view = source.view()?;
    until(&view, "begin", |view| view.desk().state() == State::Waiting)?;
    view.desk().order_rounds(size);
    until(&view, "compute", |view| view.desk().state() == State::Ready)?;
    anew(&view)?;
    thread::sleep(ALONE);
    let alone = view.desk().rounds();

    let destination = Host::start(network, 1, &program, folder("destination"), &[])?;
    let url = format!("tcp:{}:4444", network.address(1));
    let rename = format!("{}={}", from.pool.address, to.pool.address);
    let mut receiving = destination.ctl();
    receiving.args(["receive-migration", &url, "--rename", &rename]);
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

    // The source's guest stands still.
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

/// Moves of guests with more and with less state, with and without copies of it before the stop.
pub fn link(pools: &[Movable; 2]) -> Result<()> {
    let what = "whole migration, 2 GiB at 1 Gb/s";
    let needed = ["ip", "tc", "/dev/kvm"];
    if let Some(missing) = needed.into_iter().find(|name| !packages::is_there(name)) {
        row(what, "53 s", &format!("left out: there is no {missing}"));
        return Ok(());
    }
    let release = &pools[0].pool.release;
    let guest = match release.join(GUEST) {
        brought if brought.exists() => brought,
        _ => ring::guests()?.join(GUEST),
    };
    let network = Network::new()?;
    let clock = clock();
    for size in STATES {
        for (way, how) in [("", &[][..]), (", --accel-copies", &["--accel-copies"])] {
            let moved = one(pools, &network, &guest, size, how)?;
            let plain = network.rate()?;
            let seconds = moved.number("elapsed_ms") / 1e3;
            row(
                &format!("{what}, {size} MiB of an application's state{way}"),
                "53 s; stop-and-copy 40 s",
                &format!(
                    "{seconds:.2} s, {:.2} times a plain copy of as many bytes ({:.0} MB at {:.1} MB/s); VM stops for {:.0} ms, \
                     application for {:.0} ms; {:.1} MB of its state before the stop, {:.1} MB in it; its rate until then \
                     {:.1} % of {:.0} rounds/s; its results are right",
                    seconds * plain / moved.bytes(),
                    moved.bytes() / 1e6,
                    plain / 1e6,
                    moved.number("downtime_ms"),
                    moved.all.longest as f64 / clock / 1e3,
                    moved.number("accel_bytes") / 1e6,
                    moved.number("accel_stop_bytes") / 1e6,
                    100.0 * rate(moved.amid) / rate(moved.alone),
                    rate(moved.alone) * clock,
                ),
            );
        }
    }
    Ok(())
}
