//! Cost of a call over the rings, with and without a virtual machine in between.
//!
//! The same client ([`gantry_ring_client`]) runs as a process next to the worker, and in ring 3 of a Gantry guest
//! without an operating system, on this machine's own KVM. Both use the worker as shipped and the host's driver.
//!
//! - `native`: the same CUDA calls by the driver itself.
//! - `here`: the process.
//! - `guest`: the virtual machine.
//! - `count`: exits and system calls of both sides, counted during a separate series of calls.
//! - `view`: what the guest has on its desk.

mod count;
mod guest;
mod here;
mod native;
mod view;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_ring_client::{COUNTED, cuda, desk::Orders, opencl};
use remoting_proto::wire::api::ApiId;

use crate::programs::Programs;

pub use count::Counts;
pub use gantry_ring_client::desk;
pub use view::View;

/// What to measure, and with which driver.
#[derive(Clone, Debug)]
pub struct Options {
    /// The API.
    pub api: ApiId,
    /// The driver's library, if it is not the API's usual one.
    pub library: Option<PathBuf>,
    /// Size in MiB of the address space that a worker may use, if it is not the default.
    pub heap: Option<u64>,
    /// How often everything is measured, taking turns.
    pub rounds: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            api: ApiId::OpenCl,
            library: None,
            heap: None,
            rounds: 1,
        }
    }
}

/// The kinds of calls for which exits and system calls are counted.
fn kinds(api: ApiId) -> &'static [&'static str] {
    match api {
        ApiId::OpenCl => &opencl::KINDS,
        ApiId::Cuda => &cuda::KINDS,
        ApiId::Nvidia => &[],
    }
}

/// A measured figure, in counts of the time-stamp counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Duration of one operation: the median and the 99th percentile.
    Time {
        /// The operation.
        what: String,
        /// The median.
        median: u64,
        /// The 99th percentile.
        most: u64,
    },
    /// A copy between window and device.
    Copy {
        /// Its direction.
        what: String,
        /// Size in bytes.
        bytes: u64,
        /// The median.
        median: u64,
    },
}

impl Figure {
    fn name(&self) -> String {
        match self {
            Self::Time { what, .. } => format!("{what}, us (99 %)"),
            Self::Copy { what, bytes, .. } => {
                format!("{what} of {} KiB in the window, GB/s", bytes >> 10)
            }
        }
    }

    /// Combines the same figure of several rounds by taking the median.
    fn of(mut rounds: Vec<&Self>) -> Option<Self> {
        rounds.sort_by_key(|figure| figure.median());
        let middle = (*rounds.get(rounds.len() / 2)?).clone();
        Some(middle)
    }

    fn median(&self) -> u64 {
        match self {
            Self::Time { median, .. } | Self::Copy { median, .. } => *median,
        }
    }

    fn value(&self, clock: f64) -> String {
        let us = |counts: u64| counts as f64 / clock;
        match self {
            Self::Time { median, most, .. } => {
                format!("{:.3} ({:.3})", us(*median), us(*most))
            }
            Self::Copy { bytes, median, .. } => {
                format!("{:.2}", *bytes as f64 / us(*median) / 1e3)
            }
        }
    }
}

/// Results of one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The device, and what was computed.
    pub notes: Vec<(String, String)>,
    /// Figures in order.
    pub figures: Vec<Figure>,
    /// For a virtual machine: the counts for each kind of call.
    pub counts: Vec<Counts>,
}

/// Finds the programs to measure.
///
/// # Errors
/// One is missing.
pub fn programs(folder: PathBuf) -> Result<Programs> {
    Programs::find(
        folder,
        &["gantry", "gantry-accel", "gantry-ring-guest"],
        "cargo xtask bench ring",
    )
}

/// A pool of workers. It and its workers are killed when the value is dropped.
struct Pool {
    process: Child,
    socket: PathBuf,
    api: ApiId,
}

impl Pool {
    fn start(programs: &Programs, work: &Path, options: &Options) -> Result<Self> {
        let (socket, api) = (work.join("pool"), options.api);
        let mut command = Command::new(programs.path("gantry-accel"));
        command
            .args(["serve", "--spare", "1", "--api", api.name(), "--socket"])
            .arg(&socket)
            .arg("--cache")
            .arg(work);
        if let Some(library) = &options.library {
            let folder = std::fs::canonicalize(library)
                .with_context(|| format!("there is no {}", library.display()))?;
            command.arg("--library").arg(library);
            command.args(
                folder
                    .parent()
                    .map(|folder| [Path::new("--readable"), folder])
                    .iter()
                    .flatten(),
            );
        }
        if let Some(heap) = options.heap {
            command.arg("--heap").arg(heap.to_string());
        }
        let process = command
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start gantry-accel")?;
        let mut pool = Self {
            process,
            socket,
            api,
        };
        let start = Instant::now();
        while !pool.socket.exists() {
            if let Some(status) = pool.process.try_wait()? {
                bail!("gantry-accel has ended ({status}): see its message above");
            }
            ensure!(
                start.elapsed() < Duration::from_secs(20),
                "gantry-accel does not listen"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(pool)
    }

    /// Process IDs of its workers.
    fn workers(&self) -> Result<Vec<i32>> {
        let id = self.process.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        Ok(children
            .split_whitespace()
            .filter_map(|id| id.parse().ok())
            .collect())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Reads the time-stamp counter.
fn now() -> u64 {
    // SAFETY: every processor that KVM runs on has this instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Counts of the time-stamp counter per microsecond.
pub fn clock() -> f64 {
    let (time, counts) = (Instant::now(), now());
    std::thread::sleep(Duration::from_millis(200));
    (now() - counts) as f64 / time.elapsed().as_secs_f64() / 1e6
}

/// Maximum count that still shows that a call costs nothing in the steady state: one per ten calls. A CPU that other
/// programs use, too, puts a worker to sleep now and then.
const MOST: u64 = (COUNTED / 10) as u64;

/// How often the counting is attempted. Where other programs keep both CPUs busy, the worker's polling ends before the
/// guest gets a CPU, and each call has to wake the worker. Code that never polls fails every time.
const ATTEMPTS: usize = 5;

/// Checks that a guest's synchronous calls cause practically no exits and no system calls.
///
/// # Errors
/// They did in every attempt, or something cannot be started.
pub fn check(programs: &Programs, options: &Options) -> Result<()> {
    let work = tempfile::tempdir().context("cannot make a folder for the run")?;
    let pool = Pool::start(programs, work.path(), options)?;
    let mut last = String::new();
    for _ in 0..ATTEMPTS {
        let counts = guest::synchronous(programs, &pool, work.path(), Orders::Combining)?;
        if is_steady(&counts) {
            return Ok(());
        }
        last = counts.to_string();
    }
    bail!("{ATTEMPTS} times, the last: {last}")
}

/// Whether calls cause no exits and system calls, except for those that a busy host causes now and then.
fn is_steady(counts: &Counts) -> bool {
    // Interrupts of the host also cause exits, which are not the calls' doing. (A doorbell that KVM handles is an exit
    // without a kind.)
    let of = |name| counts.exits.get(name).copied().unwrap_or(0);
    let exits = of("exits").saturating_sub(of("irq_exits"));
    counts.system_calls() < MOST && exits < MOST
}

/// One of the things measured in turn, and its results of each round.
struct Turn<'a> {
    name: &'static str,
    measure: Box<dyn Fn() -> Result<Report> + 'a>,
    reports: Vec<Report>,
}

impl Turn<'_> {
    /// A figure's medians as text.
    fn cell(&self, index: usize, clock: f64) -> String {
        let rounds = self.reports.iter();
        let rounds = rounds.filter_map(|report| report.figures.get(index));
        Figure::of(rounds.collect()).map_or_else(String::new, |figure| figure.value(clock))
    }
}

/// Runs everything, and prints the table.
///
/// # Errors
/// Something cannot be started, or has failed.
pub fn run(programs: &Programs, options: &Options) -> Result<()> {
    let work = tempfile::tempdir().context("cannot make a folder for the run")?;
    let pool = Pool::start(programs, work.path(), options)?;
    let clock = clock();
    let mut turns = Vec::new();
    let mut turn = |name, measure: Box<dyn Fn() -> Result<Report>>| {
        let reports = Vec::new();
        turns.push(Turn {
            name,
            measure,
            reports,
        });
    };
    let in_guest = |orders| {
        let (programs, pool, work) = (&programs, &pool, work.path());
        move || guest::run(programs, pool, work, orders)
    };
    if options.api == ApiId::Cuda {
        let library = options.library.as_deref();
        let library = library.unwrap_or(Path::new("libcuda.so.1"));
        turn("native", Box::new(move || native::run(library)));
    }
    turn("process", Box::new(|| here::run(options.api, &pool.socket)));
    turn("guest, window cached", Box::new(in_guest(Orders::Cached)));
    turn(
        "guest, window write-combining",
        Box::new(in_guest(Orders::Combining)),
    );
    for _ in 0..options.rounds.max(1) {
        for turn in &mut turns {
            let report = (turn.measure)().with_context(|| turn.name)?;
            turn.reports.push(report);
        }
    }
    print(&turns, clock);
    Ok(())
}

fn print(turns: &[Turn<'_>], clock: f64) {
    for turn in turns {
        // Notes that rounds have in common are printed once.
        let notes = turn.reports.iter().flat_map(|report| &report.notes);
        for (what, is) in notes.collect::<BTreeSet<_>>() {
            println!("{}: {what}: {is}", turn.name);
        }
    }
    let names: Vec<_> = turns.iter().map(|turn| turn.name).collect();
    println!("\n| what | {} |", names.join(" | "));
    println!("|---|{}", "---|".repeat(turns.len()));
    let figures = turns.first().and_then(|turn| turn.reports.first());
    for (index, figure) in figures
        .iter()
        .flat_map(|report| report.figures.iter().enumerate())
    {
        let cells: Vec<_> = turns.iter().map(|turn| turn.cell(index, clock)).collect();
        println!("| {} | {} |", figure.name(), cells.join(" | "));
    }
    for turn in turns {
        // Counts differ little between rounds, so only the last one's are printed.
        for counts in turn.reports.last().iter().flat_map(|report| &report.counts) {
            println!("\n{}: {counts}", turn.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_of_several_rounds_is_their_median() {
        let figure = |median| Figure::Copy {
            what: "read".to_owned(),
            bytes: 4096,
            median,
        };
        let rounds = [figure(30), figure(10), figure(20)];
        assert_eq!(Figure::of(rounds.iter().collect()), Some(figure(20)));
        assert_eq!(Figure::of(Vec::new()), None);
    }
}
