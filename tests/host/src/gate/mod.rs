//! Tests the exitless gate (`vmfunc-gate`) in Bochs, which emulates VMX with EPT and VMFUNC.
//!
//! - [`bare`]: a program without an operating system, in VMX root operation.
//! - [`module`]: the kernel module, built for the supported kernels.
//! - [`kvm`]: the module under Debian's kernel and KVM, with small guests, and with Linux guests of
//!   two Gantry processes; [`opencl`]: files for guests that use OpenCL.
//! - [`bochs`]: the emulator.

mod bare;
mod bochs;
mod kvm;
mod module;
mod opencl;

use anyhow::Result;
use gantry_tests::{report::Outcome, rig::Cache};

pub use bare::{MANIFEST as BARE, lint};
use bochs::Emulator;
pub use bochs::PROGRAMS;
use kvm::{Guests, Host};

/// Name and outcome of a check.
pub type Check = (String, Outcome);

/// Prefix of words that select parts: `gate:` selects everything, `gate:bare` the program without
/// an operating system, `gate:6.1`, for example, the module for that kernel with small guests,
/// `gate:linux` two Gantry processes with Linux guests, and `gate:seats` two with OpenCL.
const PREFIX: &str = "gate:";

/// Whether a word selects these checks.
pub fn has(word: &str) -> bool {
    word.starts_with(PREFIX)
}

/// Emulated hosts that are ready to run.
#[derive(Default)]
pub struct Hosts(Vec<Host>);

/// Runs the checks that the words select (all without words), except those that need KVM; for
/// those, builds the hosts and returns them.
///
/// # Errors
/// Something cannot be built or started.
pub fn prepare(words: &[String], mut report: impl FnMut(&str, &Outcome)) -> Result<Hosts> {
    let wanted = |part: &str| {
        let mut parts = words.iter().filter_map(|word| word.strip_prefix(PREFIX));
        words.is_empty() || parts.any(|word| word.is_empty() || word == part)
    };
    let mut hosts = Vec::new();
    if !words.is_empty() && !words.iter().any(|word| has(word)) {
        return Ok(Hosts(hosts));
    }
    let cache = Cache::open()?;
    let mut all = |checks: Vec<Check>| {
        for (name, outcome) in checks {
            report(&name, &outcome);
        }
    };
    if wanted("bare") {
        all(bare::checks()?);
    }
    // A failed build is not repeated for each host.
    let mut emulator = None;
    for version in module::VERSIONS {
        let is_first = version == module::VERSIONS[0];
        // The longest one starts first.
        let parts = [("seats", Guests::Seats), ("linux", Guests::Linux)];
        let linux = parts
            .into_iter()
            .filter(|(part, _)| is_first && wanted(part));
        let small = wanted(version).then_some(Guests::Small);
        let guests: Vec<_> = linux.map(|(_, guests)| guests).chain(small).collect();
        if guests.is_empty() {
            continue;
        }
        let (checks, module) = module::build(&cache, version)?;
        all(checks);
        let Some(module) = module else { continue };
        let emulator = emulator.get_or_insert_with(|| Emulator::fastest(&cache));
        for guests in guests {
            hosts.push(Host::build(&cache, &module, guests, emulator)?);
        }
    }
    Ok(Hosts(hosts))
}

impl Hosts {
    /// Runs the hosts, `side_by_side` at a time.
    ///
    /// # Errors
    /// A host cannot be started.
    pub fn run(self, side_by_side: usize, mut report: impl FnMut(&str, &Outcome)) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        kvm::run(self.0, side_by_side, |checks| {
            for (name, outcome) in checks {
                report(&name, &outcome);
            }
        })
    }
}

/// Parses a line of a program in the emulator that reports a check.
fn check(line: &str) -> Option<Check> {
    let (name, result) = line
        .trim_end()
        .strip_prefix("check ")?
        .rsplit_once(" ... ")?;
    let outcome = match result {
        "ok" => Outcome::Passed,
        found => Outcome::Failed(vec![found.to_owned()]),
    };
    Some((format!("gate: {name}"), outcome))
}
