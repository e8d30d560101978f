//! Measures in virtual time how fairly the policies share an accelerator, and the cost of that.

use std::{fmt::Write, fs, time::Duration};

use anyhow::{Context, Result};
use gantry_build::{progress::Step, root};
use gpu_mediator::{
    policy::Name,
    simulator::{Costs, Experiment, Outcome, WINDOW, picture},
};

const MINUTE: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(600);
const SEED: u64 = 1;

/// Runs the published experiments with all policies; writes the table and the pictures.
pub fn run() -> Result<()> {
    let costs = Costs::default();
    let mut table = introduction(costs);
    let folder = root().join("measurements");
    let mut pictures = String::new();
    for experiment in Experiment::published() {
        let step = Step::new(format!("simulating {}", experiment.name));
        let outcomes: Vec<(Name, Outcome)> = std::thread::scope(|scope| {
            let runs: Vec<_> = Name::ALL
                .map(|name| {
                    let experiment = &experiment;
                    scope.spawn(move || (name, experiment.run(name, costs, LONG, SEED)))
                })
                .into_iter()
                .collect();
            let join = |run: std::thread::ScopedJoinHandle<_>| run.join().ok();
            runs.into_iter().filter_map(join).collect()
        });
        step.finish();
        for (name, outcome) in &outcomes {
            // Writing to a string cannot fail.
            let _ = writeln!(
                table,
                "| {} | {name}{} | {:.3} | {:.3} | {:.3} |",
                experiment.name,
                // See the introduction.
                if *name == Name::FairPreemptive {
                    "*"
                } else {
                    ""
                },
                outcome.min_max_ratio(MINUTE),
                outcome.min_max_ratio(LONG),
                outcome.overhead(LONG),
            );
        }
        let file = format!("fairness-{}.svg", slug(experiment.name));
        let path = folder.join(&file);
        fs::write(&path, draw(&experiment, outcomes))
            .with_context(|| format!("cannot write {}", path.display()))?;
        let _ = writeln!(pictures, "\n![{}]({file})", experiment.name);
    }
    print!("{table}");
    let path = folder.join("fairness.md");
    fs::write(&path, table + &pictures).with_context(|| format!("cannot write {}", path.display()))
}

/// Converts a name to a part of a file name.
fn slug(name: &str) -> String {
    let word = |c: char| if c.is_alphanumeric() { c } else { '-' };
    let text: String = name.to_lowercase().chars().map(word).collect();
    text.replace("--", "-")
}

/// Draws the first minute of each policy.
fn draw(experiment: &Experiment, outcomes: Vec<(Name, Outcome)>) -> String {
    let windows = (MINUTE.as_nanos() / WINDOW.as_nanos()) as usize;
    let panels: Vec<(String, Outcome)> = outcomes
        .into_iter()
        .map(|(name, mut outcome)| {
            for shares in &mut outcome.shares {
                shares.truncate(windows);
            }
            (name.to_string(), outcome)
        })
        .collect();
    let panels: Vec<_> = panels
        .iter()
        .map(|(name, outcome)| (name.clone(), outcome))
        .collect();
    let clients: Vec<String> = experiment
        .vms
        .iter()
        .enumerate()
        .map(|(index, vm)| format!("VM {}, weight {}", index + 1, vm.weight))
        .collect();
    let title = format!(
        "{}: each VM's part of the device, per {} ms",
        experiment.name,
        WINDOW.as_millis()
    );
    picture::draw(&title, &clients, &panels)
}

fn introduction(costs: Costs) -> String {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    format!(
        "# Sharing an accelerator by weight: policies compared in virtual time\n\
         \n\
         This page compares the scheduling policies of `gantry-arbiter` in a simulation.\n\
         \n\
         Command: `cargo xtask bench fairness`. The schedulers and the workers' metering are the \
         production code. The device\n(which cannot be interrupted), the clients and the clock \
         are simulated, so each run gives the same figures on any\nmachine. VMs have the weights \
         1:2:3 or 1:2:2:3:3:4, and always have kernels to run, of 20 us to 100 ms. In the first\n\
         experiment, each VM has kernels of one length, and the VM with the lowest weight has the \
         longest. In the second,\neach VM has six kernels in random order. In the third, lengths \
         are random and cannot be predicted.\n\
         \n\
         Rows with * are for a device that stops at the end of a turn in the middle of a kernel, \
         and continues it in the\nnext turn. Only the simulation has such a device. With \
         `gantry-arbiter --policy fair-preemptive`, turns take 30 ms, and\nthe next turn begins \
         when the client has given its turn back, which a long kernel delays as with `fair`.\n\
         \n\
         The Min-Max Ratio (MMR) divides the fraction of its fair share that the worst-served VM \
         got by that of the\nbest-served VM. The aggregated overhead divides the time that all \
         VMs should have got by the time that they got. The\ngoal is an MMR of 0.99 at an \
         overhead of 1.01. Assumed costs: submission {} us, start of a kernel {} us, noticing its\n\
         end {} us, passing the turn on {} us, the device's switch to another process {} us.\n\
         \n\
         | experiment | policy | MMR, first minute | MMR, ten minutes | overhead |\n\
         |---|---|---|---|---|\n",
        us(costs.submit),
        us(costs.start),
        us(costs.notice),
        us(costs.grant),
        us(costs.switch),
    )
}
