//! Runs scenarios in L1, and is the agent in L2.
//!
//! - `runner serve PORT` reads orders from a serial port, one per line, and reports there.
//! - `runner scenario NAME PORT` is started by `runner serve` for each scenario, so that a scenario
//!   that hangs or dies affects nothing else.
//! - `runner edu-server SOCKET` serves a device to a VM.
//! - `runner beside PROGRAM ARGUMENTS` runs a program on the other one of two hosts.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    panic,
    path::Path,
    process::{Child, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use gantry_tests::{
    agent, beside, edu_server,
    report::{BENCH, BESIDE, DEMO, Outcome, Report, SHARING},
    scenarios::{self, Context, Scenario},
    shared_vms,
};

/// Maximum length of a log sent to the host, in lines counted from its end.
const LOG_LINES: usize = 400;

/// Timeout of a scenario. The slowest takes a quarter of this on an idle host.
const LIMIT: Duration = Duration::from_secs(480);

/// Folder of the running scenario.
const DIR: &str = "/tmp/scenario";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if args.first().is_some_and(|name| name.ends_with("agent")) {
        return agent::run(&args[1..]);
    }
    let args: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    match args[..] {
        ["serve", port] => serve(port),
        ["edu-server", socket] => edu_server::serve(Path::new(socket)),
        ["scenario", name, port] => scenario(name, &mut Port::open(port)?),
        ["beside", ref program @ ..] => std::process::exit(beside::run(program)?),
        _ => bail!(
            "usage: runner serve PORT, runner scenario NAME PORT, runner edu-server SOCKET, or \
             runner beside PROGRAM ARGUMENTS"
        ),
    }
}

/// Where reports go.
struct Port(fs::File);

impl Port {
    fn open(path: &str) -> Result<Self> {
        let file = fs::File::options().append(true).open(path);
        Ok(Self(file.with_context(|| format!("cannot open {path}"))?))
    }

    fn report(&mut self, report: &Report) {
        // Without a host there is nowhere to report the error.
        let _ = writeln!(self.0, "{}", report.to_line());
    }

    fn finished(&mut self, name: &str, outcome: Outcome, since: Instant) {
        self.report(&Report::Finished {
            name: name.to_owned(),
            outcome,
            seconds: since.elapsed().as_secs_f64(),
        });
    }
}

fn serve(port: &str) -> Result<()> {
    let orders = BufReader::new(fs::File::open(port)?);
    let mut out = Port::open(port)?;
    out.report(&Report::Ready);
    for order in orders.lines() {
        let order = order?;
        let start = Instant::now();
        match order.as_str() {
            // Sent only to cause an interrupt.
            "" => {}
            BESIDE => beside::serve()?,
            DEMO => {
                let outcome = Outcome::of(demo(&mut out));
                out.finished(&order, outcome, start);
            }
            bench if bench.split(' ').next() == Some(BENCH) => {
                let names: Vec<_> = bench.split(' ').skip(1).collect();
                let result = gantry_tests::bench::run(&names, |what, figure| {
                    out.report(&Report::Note(format!("| {what} | {figure} |")));
                });
                let outcome = Outcome::of(result);
                out.finished(&order, outcome, start);
            }
            sharing if sharing.split(' ').next() == Some(SHARING) => {
                let outcome = Outcome::of(share(sharing, &mut out));
                out.finished(&order, outcome, start);
            }
            name => {
                if let Some(why) = supervise(name, port)? {
                    send_logs(&mut out);
                    out.finished(name, Outcome::Failed(vec![why]), start);
                }
            }
        }
    }
    Ok(())
}

/// Runs a scenario in its own process, which reports its outcome itself. Otherwise returns why it
/// did not.
fn supervise(name: &str, port: &str) -> Result<Option<String>> {
    // Left over only if an earlier removal failed.
    let _ = fs::remove_dir_all(DIR);
    fs::create_dir_all(DIR)?;
    let mut child = Command::new("/proc/self/exe")
        .args(["scenario", name, port])
        .process_group(0)
        .spawn()?;
    let ended = wait(&mut child, LIMIT)?;
    let group = format!("-{}", child.id());
    let _ = Command::new("kill").args(["-KILL", "--", &group]).output();
    let why = match ended {
        Some(status) if status.success() => None,
        Some(status) => Some(format!("the scenario died: {status}")),
        None => {
            child.wait()?;
            Some(format!("the scenario hung for {} s", LIMIT.as_secs()))
        }
    };
    Ok(why)
}

/// Waits for a process until a timeout.
fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(None)
}

fn scenario(name: &str, out: &mut Port) -> Result<()> {
    let start = Instant::now();
    let Some(Scenario { run, .. }) = scenarios::all().into_iter().find(|s| s.name == name) else {
        bail!("there is no scenario {name:?}");
    };
    let context = Context { dir: DIR.into() };
    let result = panic::catch_unwind(panic::AssertUnwindSafe(|| run(&context)));
    let outcome = result.map_or_else(
        |_| Outcome::Failed(vec!["the scenario panicked".to_owned()]),
        Outcome::of,
    );
    if matches!(outcome, Outcome::Failed(_)) {
        send_logs(out);
    }
    out.finished(name, outcome, start);
    // Unmount what the scenario mounted first.
    let _ = Command::new("/bin/sh")
        .args(["-c", &format!("umount {DIR}/* 2>/dev/null")])
        .status();
    Ok(())
}

fn demo(out: &mut Port) -> Result<()> {
    let disk = Path::new("/tmp/demo.raw");
    fs::File::create(disk)?.set_len(64 << 20)?;
    let dir = Path::new(DIR);
    fs::create_dir_all(dir)?;
    let pool = gantry_tests::opencl::Pool::start(dir)?;
    let parts = gantry_tests::demo::Parts {
        gantry: Path::new(gantry_tests::gantry::GANTRY),
        kernel: Path::new(gantry_tests::gantry::BZIMAGE),
        initramfs: &gantry_tests::opencl::guest_files(dir)?,
        disk,
        pool: Some(&pool.socket),
    };
    let proven =
        gantry_tests::demo::run(&parts, |line| out.report(&Report::Note(line.to_owned())))?;
    out.report(&Report::Note(proven));
    Ok(())
}

/// Lets guests share a device, as the order says.
fn share(order: &str, out: &mut Port) -> Result<()> {
    let words: Vec<_> = order.split(' ').collect();
    let [_, policy, seconds, weights] = words[..] else {
        bail!("what is to be shared how? {order:?}");
    };
    let weights = weights.split(',').map(str::parse);
    let weights = weights.collect::<Result<Vec<u32>, _>>()?;
    let time = Duration::from_secs(seconds.parse()?);
    let dir = Path::new(DIR);
    fs::create_dir_all(dir)?;
    shared_vms::show(dir, policy, &weights, time, |line| {
        out.report(&Report::Note(line));
    })
}

fn send_logs(out: &mut Port) {
    let dir = Path::new(DIR);
    let mut logs = vec![dir.join("gantry.log")];
    logs.extend(
        ["restored", "second", "again", "0", "1", "2"].map(|sub| dir.join(sub).join("gantry.log")),
    );
    for path in logs {
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        let lines: Vec<_> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
            out.report(&Report::Log {
                file: path.display().to_string(),
                line: (*line).to_owned(),
            });
        }
    }
    let dmesg = gantry_tests::net::sh("dmesg | tail -n 15").unwrap_or_default();
    for line in dmesg.lines() {
        out.report(&Report::Log {
            file: "L1 kernel".to_owned(),
            line: line.to_owned(),
        });
    }
}
