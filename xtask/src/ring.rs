//! Calls over an accelerator's rings from ring 3 of a guest without an operating system, on this
//! machine's own KVM.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Result, ensure};
use gantry_tests::{report::Outcome, rig::packages};

use crate::{
    programs::{self, cargo, target},
    progress::Step,
};

/// The guest is a workspace of its own: it is linked as a kernel.
pub const MANIFEST: &str = "tests/ring/guest/Cargo.toml";

/// Not for build scripts and macros: those are not of a named target.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FLAGS: &str = "-Crelocation-model=static";

/// A host's OpenCL driver, and the Debian packages that have it.
const PROGRAMS: &[(&str, &str)] = &[
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
];

const SCENARIO: &str = "ring-3: a guest computes there, and a call is no exit and no system call";

/// Whether a word selects the scenario.
fn has(word: &str) -> bool {
    SCENARIO.contains(word)
}

/// Measures, and prints a table.
pub fn bench() -> Result<()> {
    let folder = build()?;
    println!(
        "(copy {} to another machine, and run gantry-ring-bench in it)",
        folder.display()
    );
    let status = program(&folder).status()?;
    ensure!(status.success(), "the measurement has failed: {status}");
    Ok(())
}

/// Runs the scenario, if the words select it.
pub fn run(words: &[String], mut report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    if !words.is_empty() && !words.iter().any(|word| has(word)) {
        return Ok(());
    }
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        let why = format!("/dev/kvm cannot be used: {error}");
        report(SCENARIO, &Outcome::Skipped(why), 0.0);
        return Ok(());
    }
    let folder = build()?;
    let start = Instant::now();
    let outcome = match packages::output(program(&folder).arg("--check")) {
        Ok(_) => Outcome::Passed,
        Err(error) => Outcome::Failed(error.chain().map(ToString::to_string).collect()),
    };
    report(SCENARIO, &outcome, start.elapsed().as_secs_f64());
    Ok(())
}

fn program(folder: &Path) -> Command {
    let mut command = Command::new("timeout");
    command
        .arg("300")
        .arg(folder.join("gantry-ring-bench"))
        .arg(folder);
    command
}

/// A folder with all that is needed: the programs need the C library and an OpenCL driver, and the
/// folder no other.
pub fn build() -> Result<PathBuf> {
    packages::install(PROGRAMS)?;
    let release = programs::release()?;
    let guest = guests()?;
    let folder = target().join("ring");
    fs::create_dir_all(&folder)?;
    for (program, name) in [
        (programs::gantry()?, "gantry"),
        (release.join("gantry-accel"), "gantry-accel"),
        (release.join("gantry-ring-bench"), "gantry-ring-bench"),
        (guest.join("gantry-ring-guest"), "gantry-ring-guest"),
    ] {
        programs::copy(&program, &folder.join(name))?;
    }
    Ok(folder)
}

/// Builds the guests without an operating system; their folder.
pub fn guests() -> Result<PathBuf> {
    let step = Step::new("building guests without an operating system (release)");
    let guest = target().join("ring-guest");
    packages::run(
        cargo()
            .args(["build", "--release", "--quiet", "--target", TARGET])
            .args(["--manifest-path", MANIFEST])
            .env("CARGO_TARGET_DIR", &guest)
            .env("RUSTFLAGS", FLAGS),
    )?;
    step.finish();
    Ok(guest.join(TARGET).join("release"))
}

/// Whether the guest is formatted, and what clippy says.
pub fn lint() -> Command {
    programs::lint(MANIFEST, "ring-guest", TARGET, FLAGS)
}
