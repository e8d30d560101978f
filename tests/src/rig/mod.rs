//! The nested rig, seen from the host.
//!
//! - [`packages`]: what comes from Debian, and the cache. [`python`]: what comes by pip.
//! - [`images`]: initial file systems of L1 and L2; [`root_fs`]: what they are made of.
//! - [`mod@iommufd`], [`vendors`]: kernel modules for L1.
//! - [`native`]: device files for L1; programs with native contexts for L2.
//! - [`nvrtc`]: NVIDIA's compiler, on a disk for L2.
//! - [`opencl`]: PoCL for L1; driver, agent and programs for L2.
//! - [`systemd`]: Debian's init and this repository's units for L2.
//! - [`l1`]: booting L1 and listening to it.

pub mod images;
pub mod iommufd;
pub mod l1;
pub mod native;
pub mod nvrtc;
pub mod opencl;
pub mod packages;
pub mod python;
pub mod root_fs;
pub mod systemd;
pub mod vendors;

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use base::Unpoisoned;

use crate::{
    report::{Outcome, Report},
    scenarios::{self, Scenario},
};

pub use images::{Binaries, Images};
pub use l1::{Board, L1, Line};
pub use packages::Cache;

/// Programs that the rig needs, and the Debian packages that contain them.
pub const NEEDED: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("/usr/share/seabios/bios-256k.bin", "seabios"),
    ("qemu-img", "qemu-utils"),
    ("cpio", "cpio"),
    ("iasl", "acpica-tools"),
    ("lz4", "lz4"),
    ("/usr/sbin/debugfs", "e2fsprogs"),
    (images::DRM_DEVICE, "libdrm-tests"),
];

/// Maximum silence of L1: the runner ends a scenario that takes longer than 480 s.
const SILENCE: Duration = Duration::from_secs(510);

/// Number of L1s side by side, if the host has that many cores.
const L1S: usize = 2;

/// Work that keeps a CPU busy before an L1 does.
pub type Before<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;

/// Runs both pieces of work side by side, and `then` after each of them, with its number.
///
/// # Errors
/// One of them has failed.
pub fn side_by_side(
    before: [Before<'_>; L1S],
    then: impl Fn(usize) -> Result<()> + Sync,
) -> Result<()> {
    thread::scope(|scope| {
        let (mut number, then) = (0..L1S, &then);
        let threads = before.map(|work| {
            let number = number.next();
            scope.spawn(move || work().and_then(|()| number.map_or(Ok(()), then)))
        });
        threads.map(joined).into_iter().collect()
    })
}

/// The result of a thread.
fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Everything needed to boot L1.
pub struct Rig {
    /// Kernel and file systems.
    pub images: Images,
    /// Folder for logs of failed scenarios.
    pub logs: PathBuf,
}

/// The result of one scenario.
pub struct ScenarioResult {
    /// Its name.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Duration in seconds.
    pub seconds: f64,
    /// Lines of its logs, if it failed.
    pub log: Vec<String>,
}

/// The scenarios whose names contain any of `words`; without words, all.
pub fn chosen(words: &[String]) -> Vec<Scenario> {
    let is_chosen = |scenario: &Scenario| {
        words.is_empty() || words.iter().any(|word| scenario.name.contains(word))
    };
    scenarios::all().into_iter().filter(is_chosen).collect()
}

/// The result of a scenario that had not begun at the end of the run's time.
fn too_late(scenario: &Scenario) -> ScenarioResult {
    let name = scenario.name;
    let why =
        format!("the run has taken too long (--minutes): `cargo xtask test {name:?}` runs it");
    ScenarioResult {
        name: name.to_owned(),
        outcome: Outcome::Skipped(why),
        seconds: 0.0,
        log: Vec::new(),
    }
}

impl Rig {
    /// Runs the scenarios whose names contain any of `words` (without words, all) in several L1s
    /// side by side, each after some other work is done, and passes each result to `each` as it
    /// arrives. Scenarios that have not begun at `end` are skipped.
    pub fn run(
        &self,
        words: &[String],
        before: [Before<'_>; L1S],
        end: Option<Instant>,
        mut each: impl FnMut(ScenarioResult),
    ) -> Result<()> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut scenarios = chosen(words);
        // Scenarios of one board follow each other, and the L1s take them from both ends of the
        // queue: all boards but one are booted only once.
        scenarios.sort_by_key(|scenario| scenario.board);
        let queue = &Mutex::new(VecDeque::from(scenarios));
        let before = before.map(|work| -> Before<'_> {
            // Report the failure at once instead of running the remaining scenarios.
            Box::new(|| work().inspect_err(|_| queue.lock_unpoisoned().clear()))
        });
        let (sender, results) = mpsc::channel();
        thread::scope(|scope| {
            let all = scope.spawn(move || {
                side_by_side(before, |number| match number < cores {
                    true => self.work(number, queue, end, &sender),
                    false => Ok(()),
                })
            });
            results.iter().for_each(&mut each);
            joined(all)
        })
    }

    /// Makes the runner do something other than scenarios (the demonstration, the measurements),
    /// and passes on every line of its output.
    pub fn show(&self, what: &str, show: impl FnMut(&str)) -> Result<()> {
        self.show_on(Board::Intel, what, show)
    }

    /// Like [`Rig::show`], on another board.
    pub fn show_on(&self, board: Board, what: &str, mut show: impl FnMut(&str)) -> Result<()> {
        let mut l1 = L1::boot(&self.images, board, 0)?;
        loop {
            match l1.next(SILENCE)? {
                Line::Report(Report::Ready) => l1.order(what)?,
                Line::Report(Report::Note(line)) => show(&line),
                Line::Report(Report::Finished { outcome, .. }) => match outcome {
                    Outcome::Failed(chain) => bail!("{what} failed: {}", chain.join(": ")),
                    Outcome::Passed | Outcome::Skipped(_) => return Ok(()),
                },
                Line::Report(Report::Log { .. }) => {}
                Line::Dead(why) => {
                    bail!("L1 died: {why}\n{}", l1.console_tail().join("\n"))
                }
            }
        }
    }

    /// Takes scenarios from this L1's end of the queue and runs them in an L1. If L1 itself dies,
    /// the scenario that was running is tried once more in a fresh L1.
    fn work(
        &self,
        number: usize,
        queue: &Mutex<VecDeque<Scenario>>,
        end: Option<Instant>,
        results: &mpsc::Sender<ScenarioResult>,
    ) -> Result<()> {
        let next = || {
            let mut queue = queue.lock_unpoisoned();
            match number {
                0 => queue.pop_front(),
                _ => queue.pop_back(),
            }
        };
        let mut l1 = None;
        while let Some(scenario) = next() {
            if end.is_some_and(|end| Instant::now() >= end) {
                // The receiver lives as long as this thread's scope.
                let _ = results.send(too_late(&scenario));
                continue;
            }
            let mut result = self.scenario(number, &mut l1, &scenario)?;
            if l1.is_none() {
                let name = scenario.name;
                let why = match &result.outcome {
                    Outcome::Failed(why) => why.join(", "),
                    Outcome::Passed | Outcome::Skipped(_) => String::new(),
                };
                eprintln!("in {name:?}: {why}; it is tried once more in a fresh one");
                result = self.scenario(number, &mut l1, &scenario)?;
            }
            // The receiver lives as long as this thread's scope.
            let _ = results.send(result);
        }
        Ok(())
    }

    /// Runs a scenario in the current L1 if that has the scenario's board, otherwise in a new one.
    /// `l1` is empty afterwards if it died.
    fn scenario(
        &self,
        number: usize,
        l1: &mut Option<L1>,
        scenario: &Scenario,
    ) -> Result<ScenarioResult> {
        let name = scenario.name;
        let fitting = l1.take().filter(|l1| l1.board == scenario.board);
        let is_new = fitting.is_none();
        let mut running = match fitting {
            Some(l1) => l1,
            None => L1::boot(&self.images, scenario.board, number)?,
        };
        if !is_new {
            running.order(name)?;
        }
        let mut log = Vec::new();
        loop {
            let (outcome, seconds) = match running.next(SILENCE)? {
                Line::Report(Report::Ready) => {
                    running.order(name)?;
                    continue;
                }
                Line::Report(Report::Log { file, line }) => {
                    log.push(format!("{file}: {line}"));
                    continue;
                }
                Line::Report(Report::Note(text)) => {
                    eprintln!("{text}");
                    continue;
                }
                Line::Report(Report::Finished {
                    outcome, seconds, ..
                }) => {
                    *l1 = Some(running);
                    (outcome, seconds)
                }
                Line::Dead(why) => {
                    log.extend(running.console_tail());
                    (Outcome::Failed(vec![format!("L1 died: {why}")]), 0.0)
                }
            };
            self.keep_log(name, &log)?;
            return Ok(ScenarioResult {
                name: name.to_owned(),
                outcome,
                seconds,
                log,
            });
        }
    }

    fn keep_log(&self, name: &str, log: &[String]) -> Result<()> {
        if log.is_empty() {
            return Ok(());
        }
        let file: String = name
            .chars()
            .map(|c| if c.is_alphanumeric() { c } else { '-' })
            .collect();
        std::fs::create_dir_all(&self.logs)?;
        std::fs::write(self.logs.join(file + ".log"), log.join("\n") + "\n")?;
        Ok(())
    }
}
