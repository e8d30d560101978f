//! Measures how fairly a real device is shared by weight, and the cost of that: with applications
//! on the device of this machine's OpenCL driver, or with virtual machines on a device of the
//! nested rig.
//!
//! - [`closed`]: applications that wait for their results; [`hashcat`]: a real program of this kind; [`vms`]: virtual
//!   machines.

mod closed;
pub mod hashcat;
mod vms;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_host_tests::shared_device::{Application, Load, Machine, Programs, build, wait_for};
use gpu_mediator::{
    policy::Name,
    simulator::{Outcome, WINDOW, fairness, picture},
    status::Client,
};

use crate::elsewhere::{Elsewhere, takes_results};

/// The default weights of the clients.
const WEIGHTS: [u32; 6] = [1, 2, 2, 3, 3, 4];
/// Kernel lengths in microseconds, longest first.
const LENGTHS: [u32; 6] = [100_000, 10_000, 2_000, 400, 100, 20];
/// Maximum number of seconds for which each application runs alone.
const LONGEST_ALONE: u64 = 6;

/// Options of `cargo xtask bench sharing`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// sharing: the arbiter's policy; with --closed, several, which are measured one after another.
    #[arg(long, default_value = "fair", value_name = "NAME,...")]
    pub policy: String,
    /// sharing: duration of each experiment in seconds.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub seconds: u64,
    /// sharing: weights of the clients, at most six; with applications, the first client has the
    /// longest kernels.
    #[arg(long, value_delimiter = ',', default_values_t = WEIGHTS, value_name = "WEIGHT,...")]
    pub weights: Vec<u32>,
    /// sharing: directory for the pictures.
    #[arg(long, default_value = "measurements", value_name = "FOLDER")]
    pub pictures: PathBuf,
    /// sharing: measure virtual machines of the nested rig on its device, instead of applications
    /// on this machine's device.
    #[arg(long)]
    vms: bool,
    /// sharing: measure applications with weights 1 and 3 that wait for their results, next to
    /// others, instead of applications that always have kernels ready.
    #[arg(long, conflicts_with = "vms")]
    closed: bool,
    /// sharing: with --closed, measure only this many mixes.
    #[arg(long, value_name = "COUNT", requires = "closed")]
    pub mixes: Option<usize>,
}

impl Options {
    /// The policies by name.
    pub fn policies(&self) -> Result<Vec<Name>> {
        let names = self.policy.split(',');
        let policies = names.map(|name| name.parse().context("--policy"));
        let policies: Vec<Name> = policies.collect::<Result<_>>()?;
        ensure!(
            self.closed || policies.len() == 1,
            "--policy {}: one at a time, several with --closed only",
            self.policy
        );
        Ok(policies)
    }
}

/// The kernels of a client, by its index and the number of clients.
type Kernels = fn(usize, usize) -> Vec<u32>;

const EXPERIMENTS: &[(&str, Kernels)] = &[
    ("one length each", |client, of| {
        vec![LENGTHS[client * LENGTHS.len() / of]]
    }),
    ("six lengths each", |_, _| LENGTHS.to_vec()),
];

/// Measures, prints a table and draws pictures.
pub fn run(options: &Options, elsewhere: &Elsewhere) -> Result<()> {
    takes_results(&options.pictures, "--pictures")?;
    let policies = options.policies()?;
    let weights = &options.weights;
    ensure!(
        (1..=LENGTHS.len()).contains(&weights.len()) && !weights.contains(&0),
        "--weights {weights:?}: one to {} weights, none of which is 0",
        LENGTHS.len()
    );
    if options.vms {
        return vms::run(options);
    }
    let here;
    let programs = match elsewhere.programs() {
        Some(programs) => programs,
        None => {
            here = build()?;
            here.programs()
        }
    };
    if options.closed {
        return closed::run(programs, options, &policies);
    }
    println!(
        "Weights {weights:?}, kernels of {LENGTHS:?} us, policy {}, {} s\n",
        options.policy, options.seconds
    );
    println!(
        "| kernels | MMR of device time | device given away | MMR of work | work by time | kernels' \
         own time by time | client (weight): work, kernels |\n|---|---|---|---|---|---|---|"
    );
    for &(name, kernels) in EXPERIMENTS {
        let measured = measure(programs, options, kernels)?;
        println!("| {name} | {measured} |");
        let clients: Vec<String> = (weights.iter().enumerate())
            .map(|(client, weight)| format!("{}: weight {weight}", client + 1))
            .collect();
        let title = format!("Parts of the device per {} ms, {name}", WINDOW.as_millis());
        let panel = [(options.policy.clone(), &measured.outcome)];
        let file = format!("sharing-{}-{}.svg", options.policy, name.replace(' ', "-"));
        let path = options.pictures.join(file);
        fs::write(&path, picture::draw(&title, &clients, &panel))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The result of an experiment.
struct Measured {
    /// Shares of the device over time, according to the arbiter.
    outcome: Outcome,
    weights: Vec<u32>,
    /// The fraction of the whole time in which each client had the device.
    device: Vec<f64>,
    clients: Vec<Work>,
}

/// Work done by a client's application.
struct Work {
    kernels: u64,
    /// Relative to the work that it does natively in the same time when nothing else runs.
    part: f64,
    /// The time that its kernels take by themselves, without the way to the device, divided by the
    /// elapsed time.
    own: f64,
    /// The same by the device's clock while the device was shared, if requested.
    timed: f64,
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ideal = &self.outcome.ideal;
        let work: Vec<f64> = self.clients.iter().map(|client| client.part).collect();
        let mut clients = String::new();
        for (index, client) in self.clients.iter().enumerate() {
            let comma = if index == 0 { "" } else { "; " };
            let Work { kernels, part, .. } = client;
            let (number, weight) = (index + 1, self.weights[index]);
            write!(clients, "{comma}{number} ({weight}): {part:.3}, {kernels}")?;
            if client.timed > 0.0 {
                let (own, timed) = (client.own, client.timed);
                write!(clients, " ({own:.3} alone, {timed:.3} shared)")?;
            }
        }
        write!(
            f,
            "{:.3} | {:.3} | {:.3} | {:.3} | {:.3} | {clients}",
            fairness::min_max_ratio(&self.device, ideal),
            self.device.iter().sum::<f64>(),
            fairness::min_max_ratio(&work, ideal),
            work.iter().sum::<f64>(),
            self.clients.iter().map(|client| client.own).sum::<f64>(),
        )
    }
}

/// Parses an application's final report: its kernels, and two values divided by the elapsed time:
/// the time that its kernels take by themselves, and the same by the device's clock.
fn result(application: &mut Application) -> Result<(u64, f64, f64)> {
    let line = application.line()?;
    let numbers: Vec<f64> = line
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    let &[kernels, seconds, own, _, timed] = &numbers[..] else {
        anyhow::bail!("an application said {line:?}");
    };
    Ok((kernels as u64, own / seconds, timed / seconds))
}

/// Measures what each application achieves natively when nothing else runs: the time that its
/// kernels take by themselves divided by the elapsed time. Also returns the length of an iteration
/// of a kernel.
fn natively(programs: Programs, options: &Options, kernels: Kernels) -> Result<(Vec<f64>, f64)> {
    let mut known: BTreeMap<Vec<u32>, f64> = BTreeMap::new();
    let mut iteration = None;
    let mut parts = Vec::new();
    for client in 0..options.weights.len() {
        let lengths = kernels(client, options.weights.len());
        let part = match known.get(&lengths) {
            Some(part) => *part,
            None => {
                let seconds = (options.seconds / 8).clamp(2, LONGEST_ALONE);
                let mut application = programs.native(&Load::busy(&lengths), seconds, iteration)?;
                iteration.get_or_insert(application.iteration);
                application.go()?;
                result(&mut application)?.1
            }
        };
        known.insert(lengths, part);
        parts.push(part);
    }
    Ok((parts, iteration.unwrap_or(0.0)))
}

fn measure(programs: Programs, options: &Options, kernels: Kernels) -> Result<Measured> {
    let (natively, iteration) = natively(programs, options, kernels)?;
    let weights = &options.weights;
    let mut machine = Machine::start(programs, &["--policy", &options.policy], weights)?;
    machine.iteration = Some(iteration);
    let mut applications = Vec::new();
    for client in 0..weights.len() {
        let kernels = kernels(client, weights.len());
        applications.push(machine.application(client, &kernels, options.seconds)?);
    }
    let known = |clients: &BTreeMap<usize, Client>| clients.len() == weights.len();
    wait_for("all workers to have joined", || {
        Ok(known(&machine.clients()?))
    })?;
    let start = Instant::now();
    for application in &mut applications {
        application.go()?;
    }
    let before = machine.clients()?;
    let mut last = before.clone();
    let mut shares = vec![Vec::new(); weights.len()];
    let mut then = start;
    let windows = u128::from(options.seconds) * 1000 / WINDOW.as_millis();
    for window in 1..=windows as u32 {
        thread::sleep((WINDOW * window).saturating_sub(start.elapsed()));
        let (now, clients) = (Instant::now(), machine.clients()?);
        ensure!(known(&clients), "a client has gone");
        for (client, shares) in shares.iter_mut().enumerate() {
            shares.push(part(&last, &clients, client, now - then));
        }
        (last, then) = (clients, now);
    }
    let device = (0..weights.len())
        .map(|client| part(&before, &last, client, then - start))
        .collect();
    let mut clients = Vec::new();
    for (application, natively) in applications.iter_mut().zip(natively) {
        let (kernels, own, timed) = result(application)?;
        clients.push(Work {
            kernels,
            part: own / natively,
            own,
            timed,
        });
    }
    let outcome = Outcome {
        ideal: fairness::ideal(weights, &vec![1.0; weights.len()]),
        shares,
        ..Outcome::default()
    };
    Ok(Measured {
        outcome,
        weights: weights.clone(),
        device,
        clients,
    })
}

/// The fraction of the time in which a client had the device.
fn part(
    before: &BTreeMap<usize, Client>,
    after: &BTreeMap<usize, Client>,
    client: usize,
    time: Duration,
) -> f64 {
    let had = |clients: &BTreeMap<usize, Client>| {
        clients.get(&client).map_or(0, |client| client.device_time)
    };
    had(after).saturating_sub(had(before)) as f64 / time.as_nanos().max(1) as f64
}
