//! Tests the gate without an operating system.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use gantry_build::{cargo, programs, progress::Step, target};
use gantry_tests::{report::Outcome, rig::packages};

use super::{Check, bochs, check};

/// The programs are a workspace of their own, since they are linked as disk images.
pub const MANIFEST: &str = "vmfunc-gate/bare/Cargo.toml";

/// With an explicit target, the flags do not apply to build scripts and macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FLAGS: &str = "-Crelocation-model=static";

/// Number of checks in the program; fewer mean that it did not reach its end.
const CHECKS: usize = 20;

/// Runs the program and returns its checks.
///
/// # Errors
/// It cannot be built or started.
pub fn checks() -> Result<Vec<Check>> {
    let image = build()?.join("vmfunc-gate-bare");
    let work = target().join("gate-logs");
    fs::create_dir_all(&work)?;
    let disk = work.join("disk.img");
    fs::copy(&image, &disk).with_context(|| format!("cannot copy {}", image.display()))?;
    let file = fs::OpenOptions::new().write(true).open(&disk)?;
    ensure!(
        file.metadata()?.len() <= bochs::CYLINDER,
        "{} does not fit on the emulated disk",
        image.display()
    );
    file.set_len(bochs::CYLINDER)?;
    let machine = bochs::Machine {
        emulator: &bochs::Emulator::Debian,
        cpu: "corei7_icelake_u",
        megabytes: 256,
        disk: None,
        seconds: 60,
    };
    let printed = machine.run(&work)?;
    let mut checks: Vec<_> = printed.lines().filter_map(check).collect();
    let complete = printed.lines().last() == Some("end") && checks.len() == CHECKS;
    let end = if complete {
        Outcome::Passed
    } else {
        Outcome::Failed(vec![format!(
            "{} of {CHECKS} checks; see {}:\n{printed}",
            checks.len(),
            work.join("bochs.log").display()
        )])
    };
    checks.push(("gate: the program runs to its end".to_owned(), end));
    Ok(checks)
}

/// Builds the programs without an operating system and returns their directory. Each is the start
/// of a disk.
///
/// # Errors
/// They do not build.
pub fn build() -> Result<PathBuf> {
    let step = Step::new("building the gate's programs for bare metal");
    let folder = target().join("gate");
    packages::run(
        cargo()
            .args(["build", "--release", "--quiet", "--target", TARGET])
            .args(["--manifest-path", MANIFEST])
            .env("CARGO_TARGET_DIR", &folder)
            .env("RUSTFLAGS", FLAGS),
    )?;
    step.finish();
    Ok(folder.join(TARGET).join("release"))
}

/// Returns the command that checks their formatting and runs clippy on them.
pub fn lint() -> Command {
    programs::lint(MANIFEST, "gate", TARGET, FLAGS)
}
