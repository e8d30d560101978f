//! The nested rig, seen from the host.
//!
//! - [`packages`]: what comes from Debian, and the cache.
//! - [`images`]: initial file systems of L1 and L2.
//! - [`l1`]: booting L1 and listening to it.

pub mod images;
pub mod l1;
pub mod packages;

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, bail};

pub use images::{Binaries, Images};
pub use l1::{L1, Line};
pub use packages::Cache;

use crate::report::{Outcome, Report};

/// Longest silence of L1: no scenario waits that long for anything.
const SILENCE: Duration = Duration::from_secs(100);

/// Everything that is needed to boot L1.
pub struct Rig {
    /// Kernel and file systems.
    pub images: Images,
    /// Where logs of failed scenarios go.
    pub logs: PathBuf,
}

/// The result of one scenario.
pub struct ScenarioResult {
    /// Its name.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Seconds that it took.
    pub seconds: f64,
    /// Lines of its logs, if it failed.
    pub log: Vec<String>,
}

impl Rig {
    /// Runs the scenarios whose names contain any of `words` (all, without words) and hands each
    /// result to `each` as it comes. If L1 itself dies, the scenario that ran then is tried once
    /// more in a fresh L1, with those that are left.
    pub fn run(&self, words: &[String], mut each: impl FnMut(ScenarioResult)) -> Result<()> {
        let mut names: Vec<String> = crate::scenarios::all()
            .iter()
            .map(|scenario| scenario.name.to_owned())
            .filter(|name| words.is_empty() || words.iter().any(|word| name.contains(word)))
            .collect();
        let mut tried_again = None;
        while !names.is_empty() {
            let Some(died_in) = self.run_once(&mut names, &mut each)? else {
                break;
            };
            let again = tried_again.as_ref() != Some(&died_in.name);
            if again {
                eprintln!(
                    "L1 died in {:?}; it is tried once more in a fresh one",
                    died_in.name
                );
                tried_again = Some(died_in.name);
            } else {
                names.retain(|name| *name != died_in.name);
                each(died_in);
            }
        }
        Ok(())
    }

    /// Has the runner do something other than scenarios (the demonstration, the measurements) and
    /// hands on every line of it.
    pub fn show(&self, what: &str, mut show: impl FnMut(&str)) -> Result<()> {
        let mut l1 = L1::boot(&self.images, &[what.to_owned()])?;
        loop {
            match l1.next(SILENCE)? {
                Line::Report(Report::Note(line)) => show(&line),
                Line::Report(Report::Finished {
                    outcome: Outcome::Failed(chain),
                    ..
                }) => {
                    bail!("{what} failed: {}", chain.join(": "))
                }
                Line::Report(Report::Done) => return Ok(()),
                Line::Report(_) => {}
                Line::Dead(why) => {
                    bail!("L1 died: {why}\n{}", l1.console_tail().join("\n"))
                }
            }
        }
    }

    /// One boot of L1. Takes finished scenarios out of `names`; the scenario in which L1 died, if
    /// it did.
    fn run_once(
        &self,
        names: &mut Vec<String>,
        each: &mut impl FnMut(ScenarioResult),
    ) -> Result<Option<ScenarioResult>> {
        let mut l1 = L1::boot(&self.images, names)?;
        let mut running: Option<String> = None;
        let mut log = Vec::new();
        loop {
            match l1.next(SILENCE)? {
                Line::Report(Report::Started { name }) => {
                    log.clear();
                    running = Some(name);
                }
                Line::Report(Report::Log { file, line }) => log.push(format!("{file}: {line}")),
                Line::Report(Report::Finished {
                    name,
                    outcome,
                    seconds,
                }) => {
                    names.retain(|other| *other != name);
                    running = None;
                    let log = std::mem::take(&mut log);
                    self.keep_log(&name, &log)?;
                    each(ScenarioResult {
                        name,
                        outcome,
                        seconds,
                        log,
                    });
                }
                Line::Report(Report::Note(text)) => eprintln!("{text}"),
                Line::Report(Report::Ready) => {}
                Line::Report(Report::Done) => return Ok(None),
                Line::Dead(why) => {
                    let name = running
                        .or_else(|| names.first().cloned())
                        .unwrap_or_default();
                    let outcome = Outcome::Failed(vec![format!("L1 died: {why}")]);
                    let log = l1.console_tail();
                    self.keep_log(&name, &log)?;
                    return Ok(Some(ScenarioResult {
                        name,
                        outcome,
                        seconds: 0.0,
                        log,
                    }));
                }
            }
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
