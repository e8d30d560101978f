//! Replays what a guest with nouveau has done with its virtual GPU ([`super::record`]): from ring 3 of a guest without
//! an operating system, on this machine's own KVM, with the released Gantry, mediator and model of the GPU. The guest
//! measures the time of each access, and the kernel the CPU time of each process.
//!
//! - `machine`: the processes and their resource usage.
//! - `steps`: a recording as steps for the guest.
//! - `table`: the results.

mod machine;
mod steps;
mod table;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use gantry_gpu_replay::State;

use self::{
    machine::{Machine, Used},
    steps::Plan,
};
use super::{
    MODES,
    record::{Recorded, START},
};
use crate::programs::Programs;

/// Number of replays. The median of each access and each figure counts, since other programs interfere. There is only
/// one replay if a million accesses are exits.
const RUNS: usize = 5;

/// Finds the measured programs.
///
/// # Errors
/// One is missing.
pub fn programs(folder: PathBuf) -> Result<Programs> {
    Programs::find(
        folder,
        &["gantry", "gantry-gpu", "gantry-gf100", "gantry-gpu-guest"],
        "cargo xtask bench gpuvm --part replay",
    )
}

/// The cost of a part of a recording.
#[derive(Clone, Debug)]
struct Cost {
    part: String,
    used: Used,
    /// Times of accesses in counts of the time-stamp counter, by class.
    times: Vec<Vec<u64>>,
    /// Exits caused by polling rings, which the recorded guest did not do.
    polls: u64,
}

impl Cost {
    /// The median of several runs: each has the same accesses in the same order.
    fn median(all: &[&Self]) -> Self {
        let used: Vec<_> = all.iter().map(|cost| &cost.used).collect();
        let classes = 0..all[0].times.len();
        let times = classes.map(|class| {
            let accesses = 0..all[0].times[class].len();
            let of = |nth: usize| {
                all.iter()
                    .filter_map(move |cost| cost.times[class].get(nth))
            };
            accesses
                .map(|nth| machine::median(of(nth).copied().collect()))
                .collect()
        });
        Self {
            part: all[0].part.clone(),
            used: Used::median(&used),
            times: times.collect(),
            polls: all[0].polls,
        }
    }

    fn ticks(&self) -> u64 {
        self.times.iter().flatten().sum()
    }
}

/// Replays several times with some of the mechanisms.
fn replays(programs: &Programs, plan: &Plan, switches: [bool; 3]) -> Result<Vec<Cost>> {
    let [remap, ..] = switches;
    let runs: Vec<_> = (0..if remap { RUNS } else { 1 })
        .map(|_| replay(programs, plan, switches))
        .collect::<Result<_>>()?;
    let parts = (0..plan.parts.len()).map(|nth| {
        let all: Vec<_> = runs.iter().map(|costs| &costs[nth]).collect();
        Cost::median(&all)
    });
    Ok(parts.collect())
}

/// Replays once.
fn replay(programs: &Programs, plan: &Plan, switches: [bool; 3]) -> Result<Vec<Cost>> {
    let [remap, ..] = switches;
    let mut machine = Machine::start(programs, plan.vram, switches)?;
    machine.becomes(State::Ready)?;
    machine.load(plan);
    let mut before = machine.used()?;
    let mut costs = Vec::new();
    for part in &plan.parts {
        machine.go();
        machine
            .becomes(State::Paused)
            .with_context(|| format!("in the part {part:?}"))?;
        let used = machine.used()?;
        costs.push(Cost {
            part: part.clone(),
            used: used.since(&before),
            times: machine.times(),
            // If the page is guest memory, polling it does not exit.
            polls: if remap { 0 } else { machine.desk().polls() },
        });
        before = machine.used()?;
    }
    Ok(costs)
}

/// Replays with all mechanisms and with fewer, and prints tables.
///
/// # Errors
/// Something cannot be started, or has failed.
pub fn run(programs: &Programs, recorded: &Recorded) -> Result<()> {
    let plan = Plan::new(recorded)?;
    let clock = machine::clock();
    let costs = replays(programs, &plan, MODES[0].1)?;
    table::costs(&costs, clock)?;
    table::heading();
    table::mode(MODES[0].0, &costs, clock)?;
    for (name, switches) in &MODES[1..] {
        let [remap, ..] = switches;
        // If each access is an exit, a million of them are enough.
        let costs = match remap {
            true => replays(programs, &plan, *switches),
            false => replays(programs, &plan.up_to(START), *switches),
        };
        let costs = costs.with_context(|| format!("with {name}"))?;
        table::mode(name, &costs, clock)?;
    }
    Ok(())
}
