//! Do weights hold for applications that wait for their results? Measures closed loops with weights 1 and 3, and
//! others, on a real device.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use gantry_host_tests::shared_device::{Application, Load, Machine, Programs, wait_for};
use gpu_mediator::{policy::Name, simulator::fairness, status::Client};

use super::{Options, hashcat};

/// Seconds for which an application runs alone.
const ALONE: u64 = 2;
/// Maximum number of seconds per row: there are many rows, and they reach a steady state quickly.
const LONGEST: u64 = 10;

/// Number of kernels that are waited for together, and their length in microseconds.
type Batch = (u32, u32);
const FOUR_LONG: Batch = (4, 5_000);
const MANY_SHORT: Batch = (64, 100);
const FEW_SHORT: Batch = (4, 100);
const TWO_LONGEST: Batch = (2, 20_000);
const ONE_SHORT: Batch = (1, 100);

fn sync((in_flight, micros): Batch, think: u32) -> Load {
    Load {
        micros: vec![micros],
        in_flight,
        think: Some(think),
        foreign: false,
    }
}

/// The next batch is enqueued before the previous one is waited for.
fn ahead((in_flight, micros): Batch) -> Load {
    Load {
        micros: vec![micros],
        in_flight: in_flight * 2,
        think: None,
        foreign: false,
    }
}

fn foreign(batch: Batch, think: u32) -> Load {
    Load {
        foreign: true,
        ..sync(batch, think)
    }
}

/// The applications that share the device in each row.
fn rows(foreigners: bool) -> Vec<Vec<(u32, Load)>> {
    let pair = |one, other| vec![(1, one), (3, other)];
    let mut rows = vec![
        pair(ahead(FOUR_LONG), ahead(FOUR_LONG)),
        pair(sync(FOUR_LONG, 0), sync(FOUR_LONG, 0)),
        pair(sync(FOUR_LONG, 0), sync(MANY_SHORT, 0)),
        pair(sync(FOUR_LONG, 0), sync(FEW_SHORT, 0)),
        pair(sync(MANY_SHORT, 0), sync(TWO_LONGEST, 0)),
        pair(ahead(FOUR_LONG), sync(MANY_SHORT, 0)),
        pair(sync(FOUR_LONG, 1_000), sync(FOUR_LONG, 1_000)),
        pair(sync(FOUR_LONG, 1_000), sync(MANY_SHORT, 1_000)),
        pair(sync(FOUR_LONG, 5_000), sync(FOUR_LONG, 5_000)),
        pair(ahead(MANY_SHORT), sync(FOUR_LONG, 5_000)),
        vec![(1, sync(ONE_SHORT, 5_000)), (1, ahead(FOUR_LONG))],
        [1, 2, 3].map(|weight| (weight, sync(FOUR_LONG, 0))).into(),
        [1, 2, 2, 3, 3, 4]
            .into_iter()
            .zip(
                [sync(FOUR_LONG, 0), sync(MANY_SHORT, 0)]
                    .into_iter()
                    .cycle(),
            )
            .collect(),
    ];
    if foreigners {
        rows.push(pair(ahead(FOUR_LONG), foreign(MANY_SHORT, 0)));
        rows.push(pair(foreign(FOUR_LONG, 0), foreign(MANY_SHORT, 0)));
        rows.push(pair(foreign(FOUR_LONG, 1_000), sync(FOUR_LONG, 1_000)));
    }
    rows
}

/// A readable name of an application.
fn name(load: &Load) -> String {
    let Load {
        micros,
        in_flight,
        think,
        foreign,
    } = load;
    let by = if *foreign { " (pyopencl)" } else { "" };
    let kind = match think {
        None => "ahead".to_owned(),
        Some(0) => "sync".to_owned(),
        Some(think) => format!("sync, {think} us between"),
    };
    format!("{in_flight} x {} us {kind}{by}", micros[0])
}

/// Parses an application's final report: the fraction of the time that its kernels take by themselves, and the 99th
/// percentile of its batches in seconds.
fn result(application: &mut Application) -> Result<(f64, Option<f64>)> {
    let line = application.line()?;
    let numbers: Vec<f64> = line
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    match &numbers[..] {
        [_, seconds, own, _, _] => Ok((own / seconds, None)),
        [_, seconds, own, _, _, slowest] => Ok((own / seconds, Some(*slowest))),
        _ => anyhow::bail!("an application said {line:?}"),
    }
}

/// Whether a program that uses pyopencl can run here.
fn has_pyopencl() -> bool {
    let mut python = Command::new("python3");
    python.args(["-c", "import pyopencl"]).stderr(Stdio::null());
    python.status().is_ok_and(|status| status.success())
}

/// Measures the rows and prints a table.
pub fn run(programs: Programs, options: &Options, policies: &[Name]) -> Result<()> {
    let foreigners = has_pyopencl();
    let seconds = options.seconds.min(LONGEST);
    if !foreigners {
        println!("(without pyopencl, which python3 does not have here)");
    }
    let hashcat = hashcat::find(programs.built);
    if hashcat.is_none() {
        println!("(without hashcat, which is not installed here: Debian's package of that name)");
    }
    let mut known = Known::default();
    for policy in policies {
        println!("\nApplications that wait for their results, policy {policy}, {seconds} s");
        table(
            programs,
            options,
            &policy.to_string(),
            seconds,
            foreigners,
            &mut known,
        )?;
        if let Some(hashcat) = &hashcat
            && options.mixes.is_none()
        {
            let row = beside_hashcat(programs, &policy.to_string(), seconds, hashcat, &mut known);
            match row {
                Ok(row) => println!("| {row} |"),
                // Not every device supports it; the other rows remain valid.
                Err(error) => println!("\n(without hashcat: {error:#})"),
            }
        }
    }
    Ok(())
}

/// What applications achieve alone, natively.
#[derive(Default)]
struct Known {
    /// The fraction of the time that their kernels take by themselves.
    parts: Vec<(Load, f64)>,
    /// hashcat's passwords per second.
    hashcat: Option<f64>,
    /// Nanoseconds per iteration of a kernel.
    iteration: Option<f64>,
}

impl Known {
    fn part(&mut self, programs: Programs, load: &Load) -> Result<f64> {
        if let Some((_, part)) = self.parts.iter().find(|(known, _)| known == load) {
            return Ok(*part);
        }
        let mut application = programs.native(load, ALONE, self.iteration)?;
        self.iteration.get_or_insert(application.iteration);
        application.go()?;
        let part = result(&mut application)?.0.min(1.0);
        self.parts.push((load.clone(), part));
        Ok(part)
    }
}

/// Prints the table of a policy.
fn table(
    programs: Programs,
    options: &Options,
    policy: &str,
    seconds: u64,
    foreigners: bool,
    known: &mut Known,
) -> Result<()> {
    println!(
        "\n| weight: application | wanted | got | of the device, as the arbiter counts | used by what \
         they use by turns, alone | P99 of a batch, ms |\n|---|---|---|---|---|---|"
    );
    let mixes = options.mixes.unwrap_or(usize::MAX);
    for row in rows(foreigners).into_iter().take(mixes) {
        let parts = row.iter().map(|(_, load)| known.part(programs, load));
        let alone = parts.collect::<Result<Vec<f64>>>()?;
        println!(
            "| {} |",
            measure(programs, policy, seconds, &row, &alone, known.iteration)?
        );
    }
    Ok(())
}

/// Measures hashcat next to an application that always has kernels ready, as a row.
fn beside_hashcat(
    programs: Programs,
    policy: &str,
    seconds: u64,
    hashcat: &Path,
    known: &mut Known,
) -> Result<String> {
    let hog = ahead(FOUR_LONG);
    let alone = [known.part(programs, &hog)?, 1.0];
    let rate = match known.hashcat {
        Some(rate) => rate,
        None => hashcat::alone(programs, hashcat, ALONE)?,
    };
    known.hashcat = Some(rate);
    let program = (hashcat, rate);
    let shared = hashcat::measure(programs, policy, seconds, program, &hog, known.iteration)?;
    let total = f64::from(hashcat::WEIGHTS.iter().sum::<u32>());
    let parts = hashcat::WEIGHTS.map(|weight| f64::from(weight) / total);
    let by_turns: f64 = parts
        .iter()
        .zip(alone)
        .map(|(part, alone)| part * alone)
        .sum();
    Ok(format!(
        "1: {}; 3: hashcat (MD5, {:.1} billion passwords a second alone) | {:.2?} | {:.3?} | {:.3?} | \
         {:.3} | -, -",
        name(&hog),
        rate / 1e9,
        fairness::ideal(&hashcat::WEIGHTS, &alone),
        [shared.hog, shared.hashcat],
        shared.had,
        (shared.hog + shared.hashcat) / by_turns
    ))
}

fn measure(
    programs: Programs,
    policy: &str,
    seconds: u64,
    row: &[(u32, Load)],
    alone: &[f64],
    iteration: Option<f64>,
) -> Result<String> {
    let weights: Vec<u32> = row.iter().map(|client| client.0).collect();
    let mut machine = Machine::start(programs, &["--policy", policy], &weights)?;
    machine.iteration = iteration;
    let mut applications = Vec::new();
    for (client, (_, load)) in row.iter().enumerate() {
        applications.push(machine.run(client, load, seconds)?);
    }
    wait_for("all workers to have joined", || {
        Ok(machine.clients()?.len() == row.len())
    })?;
    let before = machine.clients()?;
    for application in &mut applications {
        application.go()?;
    }
    let mut got = Vec::new();
    let mut slowest = Vec::new();
    for application in &mut applications {
        let (part, late) = result(application)?;
        got.push(part);
        slowest.push(late.map_or("-".to_owned(), |late| format!("{:.2}", late * 1e3)));
    }
    let after = machine.clients()?;
    let had: Result<Vec<f64>> = (0..row.len())
        .map(|client| {
            let time = |client: Option<&Client>| client.map(|client| client.device_time);
            let times = time(after.get(&client)).zip(time(before.get(&client)));
            let (after, before) = times.context("a client has gone")?;
            Ok(after.saturating_sub(before) as f64 / 1e9 / seconds as f64)
        })
        .collect();
    let total = f64::from(weights.iter().sum::<u32>());
    let both = weights.iter().zip(alone);
    let by_turns: f64 = both
        .map(|(&weight, alone)| f64::from(weight) / total * alone)
        .sum();
    let who: Vec<_> = (row.iter())
        .map(|(weight, load)| format!("{weight}: {}", name(load)))
        .collect();
    Ok(format!(
        "{} | {:.2?} | {got:.3?} | {:.3?} | {:.3} | {}",
        who.join("; "),
        fairness::ideal(&weights, alone),
        had?,
        got.iter().sum::<f64>() / by_turns,
        slowest.join(", ")
    ))
}
