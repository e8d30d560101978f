//! Prints the results as tables.

use anyhow::{Context as _, Result};

use super::{
    super::EXIT_COUNTERS,
    super::record::{FEW_FLUSHES, FEW_SUBMISSIONS, MANY_FLUSHES, MANY_SUBMISSIONS, MORE, START},
    Cost,
    steps::{Class, EXITS},
};

/// Native times in microseconds for which the overhead is projected.
const NATIVE_SUBMISSIONS: [f64; 5] = [10.0, 100.0, 1e3, 1e4, 1e5];
const NATIVE_STARTS: [f64; 4] = [1e5, 3e5, 1e6, 3e6];
/// The target.
const WANTED: f64 = 1.1;

/// The cost of something; in microseconds, except for the exits.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    exits: f64,
    /// Cost of one exit to the VMM that does nothing.
    exit: f64,
    /// vCPU time in addition to the bare exits: the front's work on the vCPU, and the time of accesses that do not
    /// exit.
    vcpu: f64,
    /// The front's threads.
    front: f64,
    mediator: f64,
    model: f64,
}

impl Row {
    fn of(cost: &Cost, exit: f64, clock: f64) -> Self {
        let exits = exits(cost) as f64;
        Self {
            exits,
            exit,
            vcpu: (cost.ticks() as f64 / clock - exits * exit).max(0.0),
            front: cost.used.front as f64 / 1e3,
            mediator: cost.used.mediator as f64 / 1e3,
            model: cost.used.model as f64 / 1e3,
        }
    }

    /// The cost of one of `count` operations, which are all that `more` has in addition.
    fn each(self, more: Self, count: u64) -> Self {
        let each = |few: f64, many: f64| (many - few) / count as f64;
        Self {
            exits: each(self.exits, more.exits),
            exit: self.exit,
            vcpu: each(self.vcpu, more.vcpu),
            front: each(self.front, more.front),
            mediator: each(self.mediator, more.mediator),
            model: each(self.model, more.model),
        }
    }

    fn processors(&self) -> f64 {
        self.vcpu + self.front + self.mediator
    }

    /// The total added by virtualization.
    fn added(&self) -> f64 {
        self.exits * self.exit + self.processors()
    }

    fn cells(&self) -> String {
        format!(
            "{:.2} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1}",
            self.exits,
            self.exits * self.exit,
            self.vcpu,
            self.front,
            self.mediator,
            self.added(),
            self.model
        )
    }
}

/// Number of exits that the recorded guest has caused.
fn exits(cost: &Cost) -> u64 {
    let counters = &cost.used.counters;
    let all: u64 = EXIT_COUNTERS
        .iter()
        .filter_map(|kind| counters.get(*kind))
        .sum();
    all.saturating_sub(cost.polls)
}

fn of<'a>(costs: &'a [Cost], part: &str) -> Result<&'a Cost> {
    costs
        .iter()
        .find(|cost| cost.part == part)
        .with_context(|| format!("the recording has no part {part:?}"))
}

/// Median cost of a bare exit.
fn exit(costs: &[Cost], clock: f64) -> Result<f64> {
    let mut times = of(costs, EXITS)?.times[Class::Nothing as usize].clone();
    times.sort_unstable();
    let median = times.get(times.len() / 2).context("no exits were timed")?;
    Ok(*median as f64 / clock)
}

/// Returns the cost of a part.
fn row(costs: &[Cost], part: &str, clock: f64) -> Result<Row> {
    Ok(Row::of(of(costs, part)?, exit(costs, clock)?, clock))
}

/// Returns the cost of each operation that one part has in addition to another.
fn each(costs: &[Cost], few: &str, many: &str, clock: f64) -> Result<Row> {
    let (few, many) = (row(costs, few, clock)?, row(costs, many, clock)?);
    Ok(few.each(many, MORE))
}

/// Prints costs with all mechanisms, and relative to native times.
pub fn costs(costs: &[Cost], clock: f64) -> Result<()> {
    let exit = exit(costs, clock)?;
    let start = row(costs, START, clock)?;
    let flush = each(costs, FEW_FLUSHES, MANY_FLUSHES, clock)?;
    let submission = each(costs, FEW_SUBMISSIONS, MANY_SUBMISSIONS, clock)?;
    println!("An exit to the VMM that does nothing: {exit:.1} us (median).\n");
    println!(
        "| with all mechanisms, us | exits | these | more on the guest's processor | front's threads \
         | mediator | all that is added | model |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    println!("| nouveau's start and the copy test | {} |", start.cells());
    println!("| a flush of page tables | {} |", flush.cells());
    println!("| a submission of nouveau's | {} |", submission.cells());
    println!(
        "\nProjected overhead = 1 + (exits x cost of an exit + processor time) / native time, where \
         processor time is all but the exits and the model:\n"
    );
    for (what, row, natives) in [
        ("start and copy test", start, &NATIVE_STARTS[..]),
        ("submission", submission, &NATIVE_SUBMISSIONS[..]),
    ] {
        for native in natives {
            println!(
                "{what}, native {:.2} ms: 1 + ({:.2} x {:.1} us + {:.1} us) / {native:.0} us = {:.3}",
                native / 1e3,
                row.exits,
                row.exit,
                row.processors(),
                1.0 + row.added() / native
            );
        }
        println!(
            "{what}: {WANTED} or less if it natively takes {:.2} ms or more",
            row.added() / (WANTED - 1.0) / 1e3
        );
    }
    Ok(())
}

/// Prints the heading for the rows of [`mode`].
pub fn heading() {
    println!(
        "\n| mechanisms | exits of the start and the copy test | registers read, written | BARs read, written \
         | entries compared | messages | added, ms | exits of a flush | of a submission | added by a \
         submission, us |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
}

/// Prints a row for some of the mechanisms.
pub fn mode(name: &str, costs: &[Cost], clock: f64) -> Result<()> {
    let start = row(costs, START, clock)?;
    let flush = each(costs, FEW_FLUSHES, MANY_FLUSHES, clock)?;
    let submission = each(costs, FEW_SUBMISSIONS, MANY_SUBMISSIONS, clock).ok();
    let submission = submission.map_or_else(
        || "not measured | not measured".to_owned(),
        |row| format!("{:.2} | {:.1}", row.exits, row.added()),
    );
    let cost = of(costs, START)?;
    let count = |name: &str| cost.used.counters.get(name).copied().unwrap_or(0);
    println!(
        "| {name} | {:.0} | {}, {} | {}, {} | {} | {} | {:.1} | {:.2} | {submission} |",
        start.exits,
        count("register_reads"),
        count("register_writes"),
        count("bar_reads").saturating_sub(cost.polls),
        count("bar_writes"),
        count("entries_compared"),
        count("messages"),
        start.added() / 1e3,
        flush.exits
    );
    Ok(())
}
