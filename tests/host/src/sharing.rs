//! Shares the host's OpenCL device by weight: an arbiter, pools, workers and applications as plain
//! processes of this machine.

use std::{collections::BTreeMap, thread, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use gantry_tests::report::Outcome;
use gpu_mediator::{policy::Name, simulator::fairness::min_max_ratio, status::Client};

use crate::{
    selected,
    shared_device::{Application, Machine, Programs, build, wait_for},
};

type Scenario = fn(Programs) -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "sharing: two applications get the device by weight",
        |programs| by_weight(programs, &[1, 2]),
    ),
    (
        "sharing: six applications get the device by weight",
        |programs| by_weight(programs, &[1, 2, 2, 3, 3, 4]),
    ),
    (
        "sharing: with every policy two applications go on, by weight if it knows weights",
        every_policy,
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
    (
        "sharing: clients that break the rules, or die at any step, cost others nothing",
        attacks,
    ),
];

/// Names of the scenarios.
pub fn names() -> impl Iterator<Item = &'static str> {
    SCENARIOS.iter().map(|&(name, _)| name)
}

/// Runs the scenarios that the words select, or all if there are none.
pub fn run(words: &[String], report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    selected::run(
        SCENARIOS,
        words,
        build,
        |scenario, built| scenario(built.programs()),
        report,
    )
}

fn by_weight(programs: Programs, weights: &[u32]) -> Result<()> {
    // On a busy machine without a GPU, an application with short kernels may be too slow to always
    // have some ready. These are long enough; their lengths differ by a factor of four.
    const LENGTHS: [u32; 6] = [20_000, 8_000, 12_000, 5_000, 8_000, 5_000];
    /// Device time in nanoseconds that the lightest client has in a period: 40 of its kernels.
    const STRETCH: u64 = 800_000_000;
    /// Maximum number of observed periods until one is fair: an application that waits for a CPU of
    /// a busy machine is late with its next kernels.
    const STRETCHES: usize = 3;
    /// The ratio of the worst-off client to the best-off one; equal shares give 0.5 or less.
    const FAIR: f64 = 0.8;
    let machine = Machine::start(programs, &[], weights)?;
    let mut applications = Vec::new();
    for (client, micros) in LENGTHS.iter().enumerate().take(weights.len()) {
        applications.push(machine.application(client, &[*micros], 0)?);
    }
    for application in &mut applications {
        application.go()?;
    }
    // Counting begins when the lightest client has completed two rounds of everybody's kernels.
    wait_for("all applications to compute", || {
        let clients = machine.clients()?;
        Ok((0..weights.len()).all(|client| clients.get(&client).is_some_and(|c| c.turns > 5)))
    })?;
    let time = |clients: &BTreeMap<usize, Client>, client| clients[&client].device_time;
    let ideal: Vec<_> = weights.iter().copied().map(f64::from).collect();
    let mut stretches = Vec::new();
    for _ in 0..STRETCHES {
        let before = machine.clients()?;
        let mut after = before.clone();
        wait_for("the lightest client to have the device", || {
            after = machine.clients()?;
            Ok(time(&after, 0) - time(&before, 0) >= STRETCH)
        })?;
        let had = |client| (time(&after, client) - time(&before, client)) as f64 / 1e9;
        let times: Vec<_> = (0..weights.len()).map(had).collect();
        if min_max_ratio(&times, &ideal) > FAIR {
            return Ok(());
        }
        stretches.push(times);
    }
    bail!(
        "applications of weights {weights:?} had these seconds of the device, stretch by stretch: \
         {stretches:.2?}"
    );
}

fn every_policy(programs: Programs) -> Result<()> {
    const WEIGHTS: [u32; 2] = [1, 4];
    /// The ratio of the worse-off by weight to the better-off: turns without weights (fifo) give
    /// 0.25, and credit, which forgives most of the debt, 0.54; the others give more than 0.9.
    const SHARED: f64 = 0.4;
    /// Device time in nanoseconds that the light client has: about a dozen turns of 30 ms.
    const ENOUGH: u64 = 400_000_000;
    let mut iteration = None;
    for policy in Name::ALL {
        let text = policy.to_string();
        let mut machine = Machine::start(programs, &["--policy", &text], &WEIGHTS)?;
        machine.iteration = iteration;
        let mut applications = [
            machine.application(0, &[3_000], 0)?,
            machine.application(1, &[3_000], 0)?,
        ];
        iteration = Some(applications[0].iteration);
        for application in &mut applications {
            application.go()?;
        }
        machine.goes_on(0)?;
        machine.goes_on(1)?;
        let before = machine.clients()?;
        let had = |clients: &BTreeMap<usize, Client>| {
            [0, 1].map(|client| clients[&client].device_time - before[&client].device_time)
        };
        let mut times = [0; 2];
        wait_for("both applications to have the device", || {
            times = had(&machine.clients()?);
            Ok(times.iter().all(|time| *time > ENOUGH))
        })?;
        let [light, heavy] = [0, 1].map(|client| times[client] as f64 / f64::from(WEIGHTS[client]));
        let ratio = light.min(heavy) / light.max(heavy);
        println!("    {policy}: {ratio:.2}");
        ensure!(
            policy == Name::Fifo || ratio > SHARED,
            "{policy}: nanoseconds of the device for weights {WEIGHTS:?}: {times:?}"
        );
        for application in &mut applications {
            let line = application.end()?;
            ensure!(!line.starts_with("error"), "{policy}: {line}");
        }
    }
    Ok(())
}

/// Ends an application. Returns the longest time in seconds for which it was stalled.
fn pause(application: &mut Application) -> Result<f64> {
    let line = application.end()?;
    // See the output of `opencl_turns`.
    let pause = line.split(' ').nth(3).and_then(|word| word.parse().ok());
    pause.with_context(|| format!("the other application said {line:?}"))
}

fn killed_worker(programs: Programs) -> Result<()> {
    let machine = Machine::start(programs, &[], &[1, 1])?;
    let mut victim = machine.application(0, &[3_000], 0)?;
    let mut other = machine.application(1, &[3_000], 0)?;
    victim.go()?;
    other.go()?;
    machine.goes_on(0)?;
    machine.goes_on(1)?;
    machine.kill_workers(0)?;
    let line = victim.line()?;
    ensure!(line.starts_with("error -"), "the application said {line:?}");
    machine.goes_on(1)
}

fn killed_arbiter(programs: Programs) -> Result<()> {
    let mut machine = Machine::start(programs, &[], &[1, 1])?;
    let mut applications = [
        machine.application(0, &[3_000], 0)?,
        machine.application(1, &[3_000], 0)?,
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
    machine.restart_arbiter(&[])?;
    wait_for("the workers to find the new arbiter", || {
        Ok(machine.clients()?.len() == 2)
    })?;
    machine.goes_on(0)?;
    machine.goes_on(1)
}

fn endless(programs: Programs) -> Result<()> {
    let machine = Machine::start(programs, &["--limit", "1000"], &[1, 1])?;
    let mut offender = machine.application(0, &[0], 0)?;
    let mut other = machine.application(1, &[3_000], 0)?;
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
    // Until the limit, since a kernel cannot be removed from the device without its process.
    let pause = pause(&mut other)?;
    println!("    the other application stood still for {pause:.2} s, with a limit of 1 s");
    Ok(())
}

/// A client breaks every rule in turn, and is killed after each step of an ordinary run, while
/// another one computes. The other one gets no error, and does not wait for the client's end.
fn attacks(programs: Programs) -> Result<()> {
    /// The arbiter's limit in milliseconds, which should never be reached.
    const LIMIT: &str = "60000";
    /// More steps than an ordinary run has.
    const STEPS: u32 = 100;
    let mut machine = Machine::start(programs, &["--limit", LIMIT], &[1, 1])?;
    for (what, outcome) in [
        ("garbage", "ended"),
        ("index", "ended"),
        ("length", "ended"),
        ("outside", "refused"),
        ("quota", "refused"),
        ("silent", "silent"),
    ] {
        let mut other = beside(&mut machine)?;
        let mut offender = machine.attack(0, what)?;
        let said = offender.line()?;
        ensure!(said == outcome, "{what}: {said:?}");
        // This also holds while the offender is still there: a silent one stays until it is told to
        // end.
        machine.goes_on(1)?;
        offender.end()?;
        stood_still(&mut other, what)?;
    }
    let mut other = beside(&mut machine)?;
    let mut step = 0;
    loop {
        let said = machine.attack(0, &step.to_string())?.line()?;
        if said == "whole" {
            break;
        }
        ensure!(said.is_empty(), "killed after {step} steps: {said}");
        step += 1;
        ensure!(step < STEPS, "an ordinary run has no end");
    }
    ensure!(step > 20, "an ordinary run has {step} steps only");
    wait_for("the workers of killed clients to end", || {
        Ok(machine.workers(0)?.len() == 1)
    })?;
    let clients = machine.clients()?;
    let killed: u64 = clients.values().map(|client| client.killed).sum();
    ensure!(killed == 0, "the arbiter had to end {killed} workers");
    stood_still(&mut other, "killed")
}

/// Starts another application that computes next to one that misbehaves.
fn beside(machine: &mut Machine) -> Result<Application> {
    let mut other = machine.application(1, &[3_000], 0)?;
    machine.iteration = Some(other.iteration);
    other.go()?;
    machine.goes_on(1)?;
    Ok(other)
}

/// Ends it, and checks how long it was stalled next to an offender.
fn stood_still(other: &mut Application, what: &str) -> Result<()> {
    /// The longest pause in seconds that is not attributed to the offender, since machines that run
    /// tests are busy (two processors under a load of 12 made it 0.11).
    const PAUSE: f64 = 2.0;
    let pause = pause(other)?;
    println!("    {what}: the other application stood still for {pause:.3} s");
    ensure!(
        pause < PAUSE,
        "{what}: the other application stood still for {pause} s"
    );
    Ok(())
}
