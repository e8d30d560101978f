//! Programs that nobody here wrote, natively and through the OpenCL driver: which of their tests
//! pass, and every difference, as a table in the documentation.

mod results;
mod suites;
mod times;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context, Result};
use gantry_tests::rig::packages;

use self::{
    results::Results,
    suites::{Case, PROGRAMS, suites},
};
use crate::{
    elsewhere::{Elsewhere, takes_results},
    opencl::pool::Pool,
    programs::root,
    progress::Step,
};

/// Why results differ, by a part of the tests' names; for those that pass through Gantry alone, and
/// for others.
const WHY: &[(&str, bool, &str)] = &[
    (
        "cl-api-create-command-queue",
        true,
        "PoCL 3.1 ends the process when a queue on the device is asked for; the driver refuses it",
    ),
    (
        "cl-api-",
        true,
        "the host's driver answers a wrong call otherwise than OpenCL says, or ends the process; \
         Gantry's driver looks before it passes a call on",
    ),
    (
        "cl-api-link-program",
        false,
        "what is linked ends the process that does it: the application's natively, the worker's \
         through Gantry",
    ),
    (
        "fine_grain_svm",
        false,
        "shared virtual memory is offered where it is mapped: application and device have \
         different memories",
    ),
];

/// Options of `cargo xtask bench programs`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// programs: of suites with hundreds of tests only each so many is run; 1 takes hours.
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    every: usize,
    /// programs: so many at a time, each natively and through Gantry.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    jobs: usize,
    /// programs: only suites whose names contain this word (may be given again).
    #[arg(long, value_name = "WORD")]
    only: Vec<String>,
    /// programs: print how long each takes on either side instead, the median of so many runs.
    #[arg(long, value_name = "RUNS")]
    times: Option<usize>,
    /// programs: where the table goes [default: docs/opencl-programs.md]
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

/// Runs everything, and writes the table.
pub fn run(options: &Options, elsewhere: &Elsewhere) -> Result<()> {
    let path = options.table.clone();
    let path = path.unwrap_or_else(|| root().join("docs/opencl-programs.md"));
    if options.times.is_none() {
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        takes_results(folder.unwrap_or(Path::new(".")), "--table")?;
    }
    let pool = match elsewhere.programs() {
        Some(programs) => Pool::start_built(programs)?,
        None => {
            packages::install(PROGRAMS)?;
            Pool::start_installed()?
        }
    };
    let scratch = pool.folder("programs")?;
    let mut tables = Tables::default();
    if options.times.is_some() {
        println!("{}", times::HEAD);
    }
    for suite in suites(&pool, options.every, &scratch)? {
        let chosen = |word: &String| suite.name.contains(word.as_str());
        if !options.only.is_empty() && !options.only.iter().any(chosen) {
            continue;
        }
        if let Some(runs) = options.times {
            times::rows(&pool, &suite.cases, runs)?;
            continue;
        }
        let step = Step::new(format!("{}: {} programs", suite.name, suite.cases.len()));
        let (native, remoted) = both(&pool, &suite.cases, options.jobs)?;
        step.finish();
        tables.add(&suite.name, &native, &remoted);
        // After each suite: some take long.
        let text = tables.text(options.every, &pool.device()?);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if options.times.is_none() {
        print!("{}", tables.text(options.every, &pool.device()?));
    }
    Ok(())
}

/// Results natively and through Gantry; so many programs run at a time, on both sides at once.
fn both(pool: &Pool, cases: &[Case], jobs: usize) -> Result<(Results, Results)> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new((Results::new(), Results::new()));
    let work = || -> Result<()> {
        while let Some((index, case)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            cases.get(index).map(|case| (index, case))
        } {
            let native = pool.native_for(case.seconds, &case.program);
            let remoted = pool.remoted_for(case.seconds, &case.program);
            let folders = [
                pool.folder(&format!("native-{index}"))?,
                pool.folder(&format!("remoted-{index}"))?,
            ];
            let (one, other) = thread::scope(|scope| {
                let one = scope.spawn(|| case.run(native, &folders[0]));
                let other = case.run(remoted, &folders[1]);
                (one.join(), other)
            });
            for folder in folders {
                fs::remove_dir_all(folder)?;
            }
            let one = one.map_err(|_| anyhow::anyhow!("{} was not run", case.name()))?;
            let (one, other) = (one?, other?);
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.0.extend(one);
            found.1.extend(other);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            let ended = thread.join();
            ended.map_err(|_| anyhow::anyhow!("a thread that runs programs panicked"))?
        })
    })?;
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Rows of what was found.
#[derive(Default)]
struct Tables {
    suites: String,
    differences: String,
}

impl Tables {
    /// Adds what a suite gave.
    fn add(&mut self, name: &str, native: &Results, remoted: &Results) {
        let none = "skipped".to_owned();
        let tests: BTreeSet<_> = native.keys().chain(remoted.keys()).collect();
        let passed = |results: &Results| {
            let good = results.values().filter(|result| result.starts_with("pass"));
            good.count()
        };
        let mut same = 0;
        for test in &tests {
            let (one, other) = (
                native.get(*test).unwrap_or(&none),
                remoted.get(*test).unwrap_or(&none),
            );
            if one == other {
                same += 1;
                if !one.starts_with("pass") {
                    eprintln!("{test}: {one}, natively and through Gantry");
                }
            } else {
                let better = other.starts_with("pass") && !one.starts_with("pass");
                let why =
                    (WHY.iter()).find(|(part, passes, _)| *passes == better && test.contains(part));
                let why = why.map_or("not explained", |(_, _, why)| why);
                // Writing to a string does not fail.
                let _ = writeln!(self.differences, "| {test} | {one} | {other} | {why} |");
            }
        }
        let _ = writeln!(
            self.suites,
            "| {name} | {} | {} | {} | {same} |",
            tests.len(),
            passed(native),
            passed(remoted)
        );
    }

    /// The document, as far as it goes.
    fn text(&self, every: usize, device: &str) -> String {
        let Self {
            suites,
            differences,
        } = self;
        let differences = if differences.is_empty() {
            "There is no difference.\n".to_owned()
        } else {
            format!(
                "| what differs | natively | through Gantry | why |\n|---|---|---|---|\n{differences}"
            )
        };
        format!(
            "# Programs that nobody here wrote, natively and through the OpenCL driver\n\n\
             Command: `cargo xtask bench programs --every {every}`. The driver of both: {device}.\n\n\
             | programs | tests | pass natively | pass through Gantry | same result |\n\
             |---|---|---|---|---|\n{suites}\n{differences}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let of = |result: &str| Results::from([("a".to_owned(), result.to_owned())]);
        let mut tables = Tables::default();
        tables.add("x", &of("pass"), &of("fail"));
        assert_eq!(tables.suites, "| x | 1 | 1 | 0 | 0 |\n");
        assert_eq!(tables.differences, "| a | pass | fail | not explained |\n");
    }
}
