//! GLoop: the checks that need no GPU. In [`turns`], jobs take turns of a real arbiter.

pub mod turns;

use std::{path::PathBuf, process::Command};

use anyhow::{Result, ensure};
use gantry_build::{programs, progress::Step, root};
use gantry_tests::{
    report::{Outcome, Skipped},
    rig::{Cache, nvrtc, packages},
};

use crate::selected;

/// Programs and files that the scenarios need, and the Debian packages that contain them.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
    (
        "/usr/lib/python3/dist-packages/pyopencl",
        "python3-pyopencl",
    ),
];

/// GPU architectures that the device library compiles for: Ampere, Hopper and Blackwell.
pub const ARCHITECTURES: &str = "sm_80,sm_90,sm_100";

/// Number of times that each OpenCL program is stopped.
const STOPS: &str = "60";

type Scenario = fn() -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "gloop: its programs compile for three generations of GPUs, with NVRTC",
        compiled,
    ),
    (
        "gloop: kernels for OpenCL that are stopped at random moments compute the same",
        stopped,
    ),
    (
        "gloop: jobs share a device by weight, and one that is killed leaves the others computing",
        turns::shared,
    ),
    (
        "gloop: a kernel that does not stop is ended at the arbiter's limit, and the others go on",
        turns::stubborn,
    ),
];

/// Runs the scenarios that the words select; without words, all.
pub fn run(words: &[String], report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    selected::run(
        SCENARIOS,
        words,
        || packages::install(PROGRAMS),
        |scenario, ()| scenario(),
        report,
    )
}

/// The folder of the compiler's library.
pub fn compiler() -> Result<PathBuf> {
    let step = Step::new("fetching NVRTC, where it is not here yet");
    let folder = nvrtc::folder(&Cache::open()?).map_err(|error| Skipped(format!("{error:#}")))?;
    step.finish();
    Ok(folder.join(nvrtc::LIBRARY))
}

fn compiled() -> Result<()> {
    let mut compile = Command::new(programs::folder()?.join("gloop-eaters"));
    compile.args(["compile", "--arch", ARCHITECTURES, "--nvrtc"]);
    let said = packages::output(compile.arg(compiler()?))?;
    for architecture in ARCHITECTURES.split(',') {
        let programs = said.lines().filter(|line| line.contains(architecture));
        ensure!(programs.count() >= 10, "programs are missing:\n{said}");
    }
    Ok(())
}

fn stopped() -> Result<()> {
    let mut python = Command::new("/usr/bin/python3");
    python
        .arg(root().join("gloop/opencl/stops.py"))
        .arg(root().join("gloop/include/gloop.cl.h"))
        .arg(STOPS)
        .env("OCL_ICD_VENDORS", "/etc/OpenCL/vendors/pocl.icd");
    let said = packages::output(&mut python)?;
    let equal = said
        .lines()
        .filter(|line| line.contains("outputs are equal"));
    ensure!(equal.count() == 2, "{said}");
    Ok(())
}
