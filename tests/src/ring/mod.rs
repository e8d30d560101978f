//! What a call over the rings costs, with and without a virtual machine between.
//!
//! The same client ([`gantry_ring_client`]) runs as a process beside the worker, and in ring 3 of a
//! guest of Gantry that has no operating system, on this machine's own KVM. Both use the worker
//! that is shipped, and the host's OpenCL driver.
//!
//! - `here`: the process.
//! - `guest`: the virtual machine.
//! - `count`: exits and system calls of both sides, counted in a stretch of calls of their own.
//! - `view`: what the guest has on its desk.

mod count;
mod guest;
mod here;
mod view;

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_ring_client::{COUNTED, desk::Orders};

use crate::programs::Programs;

pub use count::Counts;
pub use gantry_ring_client::desk;
pub use view::View;

/// Something that was measured, in counts of the time stamp counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Figure {
    /// How long one took: the median, and what 99 of 100 do not exceed.
    Time {
        /// Of what.
        what: String,
        /// The median.
        median: u64,
        /// The 99th percentile.
        most: u64,
    },
    /// A copy between window and device.
    Copy {
        /// In which direction.
        what: String,
        /// Bytes.
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

/// What one run has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The device, and what was computed.
    pub notes: Vec<(String, String)>,
    /// Figures in their order.
    pub figures: Vec<Figure>,
    /// Of a virtual machine: what was counted.
    pub counts: Option<Counts>,
}

/// Finds the programs that are measured.
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

/// A pool of workers. It ends with the value, and its workers with it.
struct Pool {
    process: Child,
    socket: PathBuf,
}

impl Pool {
    fn start(programs: &Programs, work: &Path) -> Result<Self> {
        let socket = work.join("pool");
        let process = Command::new(programs.path("gantry-accel"))
            .args(["serve", "--spare", "1", "--socket"])
            .arg(&socket)
            .arg("--cache")
            .arg(work)
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start gantry-accel")?;
        let mut pool = Self { process, socket };
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

    /// Processes of its workers.
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

/// The time stamp counter.
fn now() -> u64 {
    // SAFETY: an instruction of every processor that KVM runs on.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Counts of the time stamp counter in a microsecond.
pub fn clock() -> f64 {
    let (time, counts) = (Instant::now(), now());
    std::thread::sleep(Duration::from_millis(200));
    (now() - counts) as f64 / time.elapsed().as_secs_f64() / 1e6
}

/// What one call in ten may cost at most, so that a call in the steady state is known to cost none:
/// a processor that others use, too, sends a worker to sleep now and then.
const MOST: u64 = (COUNTED / 10) as u64;

/// How often the counting is repeated. Where other programs keep both processors busy, the worker's poll
/// ends before the guest gets a processor, and each call has to wake it; code that never polls fails
/// every time.
const ATTEMPTS: usize = 5;

/// Checks that a guest's calls made no exits and no system calls to speak of.
///
/// # Errors
/// They did each time, or something cannot be started.
pub fn check(programs: &Programs) -> Result<()> {
    let work = tempfile::tempdir().context("cannot make a folder for the run")?;
    let pool = Pool::start(programs, work.path())?;
    let mut last = String::new();
    for _ in 0..ATTEMPTS {
        let report = guest::run(programs, &pool, work.path(), Orders::Combining)?;
        let counts = report.counts.context("nothing was counted")?;
        if is_steady(&counts) {
            return Ok(());
        }
        last = counts.to_string();
    }
    bail!("{ATTEMPTS} times, the last: {last}")
}

/// Whether calls are free of exits and system calls, but for those that a busy host causes now and then.
fn is_steady(counts: &Counts) -> bool {
    // Interrupts of the host leave the guest, too, and are nobody's doing here. (A doorbell that
    // KVM takes is an exit without a kind.)
    let of = |name| counts.exits.get(name).copied().unwrap_or(0);
    let exits = of("exits").saturating_sub(of("irq_exits"));
    counts.system_calls() < MOST && exits < MOST
}

/// Runs everything, and prints the table.
///
/// # Errors
/// Something cannot be started, or has failed.
pub fn run(programs: &Programs) -> Result<()> {
    let work = tempfile::tempdir().context("cannot make a folder for the run")?;
    let pool = Pool::start(programs, work.path())?;
    let clock = clock();
    let runs = [
        ("process", here::run(&pool.socket)?),
        (
            "guest, window cached",
            guest::run(programs, &pool, work.path(), Orders::Cached)?,
        ),
        (
            "guest, window write-combining",
            guest::run(programs, &pool, work.path(), Orders::Combining)?,
        ),
    ];
    for (what, is) in &runs[0].1.notes {
        println!("{what}: {is}");
    }
    println!("\n| what | {} | {} | {} |", runs[0].0, runs[1].0, runs[2].0);
    println!("|---|---|---|---|");
    for (index, figure) in runs[0].1.figures.iter().enumerate() {
        let cells = runs.each_ref().map(|(_, report)| {
            let figure = report.figures.get(index);
            figure.map_or_else(String::new, |figure| figure.value(clock))
        });
        println!("| {} | {} |", figure.name(), cells.join(" | "));
    }
    for (name, report) in &runs {
        if let Some(counts) = &report.counts {
            println!("\n{name}: {counts}");
        }
    }
    Ok(())
}
