//! Runs third-party programs natively and through the OpenCL driver. Reports which of their tests
//! pass, and every difference, as a table in the documentation.

mod known;
mod suites;
mod table;
mod times;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context, Result, ensure};
use base::Unpoisoned;
use gantry_build::{progress::Step, root};
use gantry_host_tests::opencl::{
    moves::{self, Mover},
    pool::{PIGLIT, Pool},
    programs::{both_ways, case::Case, results::Results},
};
use gantry_tests::rig::packages;

use self::{
    suites::{PROGRAMS, suites},
    table::Tables,
};
use crate::elsewhere::{Elsewhere, takes_results};

/// Options of `cargo xtask bench programs`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// programs: of suites with hundreds of tests, run only every COUNT-th; 1 takes hours.
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    every: usize,
    /// programs: number of programs to run at a time, each natively and through Gantry.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    jobs: usize,
    /// programs: run only suites whose names contain this word (can be repeated).
    #[arg(long, value_name = "WORD")]
    only: Vec<String>,
    /// programs: instead, print how long each program takes on each side, as the median of this
    /// many runs.
    #[arg(long, value_name = "RUNS")]
    times: Option<usize>,
    /// programs: replace the worker of those that run through Gantry, again 50 to 500 ms after each
    /// replacement.
    #[arg(long, conflicts_with = "times")]
    moved: bool,
    /// programs: file for the table [default: measurements/opencl-programs.md, or with --moved
    /// opencl-programs-moved.md]
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

impl Options {
    /// The command line with these options, without the destination of its results.
    fn command(&self, elsewhere: &Elsewhere) -> String {
        let mut command = format!("cargo xtask bench programs --every {}", self.every);
        if self.jobs != 1 {
            command += &format!(" --jobs {}", self.jobs);
        }
        if self.moved {
            command += " --moved";
        }
        for word in &self.only {
            command += &format!(" --only '{word}'");
        }
        if elsewhere.programs().is_some() {
            command += " --built FOLDER --vendors FOLDER";
        }
        command
    }
}

/// A program that is required to run anything, but is missing on a machine where nothing can be
/// installed.
pub fn missing() -> Option<&'static str> {
    let all = PROGRAMS.iter().map(|(program, _)| *program);
    all.chain([PIGLIT]).find(|name| !packages::is_there(name))
}

/// Runs everything, and writes the table.
///
/// # Errors
///
/// If programs cannot be run, or if a test's results differ for an unknown reason; these tests are
/// in the table, too.
pub fn run(options: &Options, elsewhere: &Elsewhere) -> Result<()> {
    let path = options.table.clone();
    let usual = match options.moved {
        false => "measurements/opencl-programs.md",
        true => "measurements/opencl-programs-moved.md",
    };
    let path = path.unwrap_or_else(|| root().join(usual));
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
    let (pool, control) = match options.moved {
        false => (pool, None),
        true => moves::movable(&pool, "moved").map(|(pool, control)| (pool, Some(control)))?,
    };
    let scratch = pool.folder("programs")?;
    let mut tables = Tables::new(pool.device()?, options.command(elsewhere));
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
        let mover = (control.as_ref()).map(|control| Mover::start(&pool, control, &[]));
        let (native, remoted) = both(&pool, &suite.cases, options.jobs)?;
        step.finish();
        let mut name = suite.name;
        if let Some(mover) = mover {
            let lines = mover.end();
            let (moved, stayed): (Vec<_>, Vec<_>) =
                lines.iter().partition(|line| moves::is_moved(line));
            name += &format!(" ({} moves, {} not made)", moved.len(), stayed.len());
            // An application that cannot be moved stays, and the line says why.
            stayed.iter().for_each(|line| println!("{line}"));
        }
        tables.add(&name, &native, &remoted);
        // After each suite, since some take long.
        fs::write(&path, tables.text())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(control) = control {
        // It may be gone already.
        let _ = fs::remove_file(control);
    }
    if options.times.is_none() {
        print!("{}", tables.text());
    }
    let unexplained = &tables.unexplained;
    ensure!(
        unexplained.is_empty(),
        "nobody has found out yet why these differ:\n{}",
        unexplained.join("\n")
    );
    Ok(())
}

/// Results natively and through Gantry; `jobs` programs run at a time, each on both sides at once.
fn both(pool: &Pool, cases: &[Case], jobs: usize) -> Result<(Results, Results)> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new((Results::new(), Results::new()));
    let work = || -> Result<()> {
        while let Some((index, case)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            cases.get(index).map(|case| (index, case))
        } {
            let (one, other) = both_ways(pool, case, index)?;
            let mut found = found.lock_unpoisoned();
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
