//! Tries the exitless gate (`vmfunc-gate`) in Bochs, which emulates VMX with EPT and VMFUNC.
//!
//! - [`bare`]: a program without an operating system, in VMX root operation.
//! - [`module`]: the kernel module, built for the kernels that it is made for.
//! - [`kvm`]: the module under Debian's kernel and KVM, with guests.
//! - [`bochs`]: the emulator.

mod bare;
mod bochs;
mod kvm;
mod module;

use anyhow::Result;
use gantry_tests::{report::Outcome, rig::Cache};

pub use bare::{MANIFEST as BARE, lint};
pub use bochs::PROGRAMS;

/// A check's name and how it ended.
pub type Check = (String, Outcome);

/// Runs all of them.
///
/// # Errors
/// Something cannot be built or started.
pub fn run(mut report: impl FnMut(&str, &Outcome)) -> Result<()> {
    let cache = Cache::open()?;
    let mut all = |checks: Vec<Check>| {
        for (name, outcome) in checks {
            report(&name, &outcome);
        }
    };
    all(bare::checks()?);
    let (checks, modules) = module::build(&cache)?;
    all(checks);
    for module in &modules {
        all(kvm::checks(&cache, module)?);
    }
    Ok(())
}

/// A line of a program in the emulator that tells of a check.
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
