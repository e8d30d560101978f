//! GLoop: the checks that need no GPU, and measurements on a machine with one.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Result, ensure};
use gantry_tests::{
    report::{Outcome, Skipped},
    rig::{Cache, nvrtc, packages},
};

use crate::{
    gloop_turns,
    programs::{self, copy, root, target},
    progress::Step,
    selected,
};

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
const ARCHITECTURES: &str = "sm_80,sm_90,sm_100";

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
        gloop_turns::shared,
    ),
    (
        "gloop: a kernel that does not stop is ended at the arbiter's limit, and the others go on",
        gloop_turns::stubborn,
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
fn compiler() -> Result<PathBuf> {
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

/// Measures on this machine's GPU, or only builds, for another machine.
pub fn bench(pack: bool) -> Result<()> {
    packages::install(PROGRAMS)?;
    let folder = build()?;
    if pack {
        println!(
            "everything is in {0}: bring it there, and run `{0}/measure.py`",
            folder.display()
        );
        return Ok(());
    }
    packages::run(&mut Command::new(folder.join("measure.py")))
}

/// Builds the programs and the measuring program into a folder.
fn build() -> Result<PathBuf> {
    let folder = target().join("gloop");
    fs::create_dir_all(&folder)?;
    let built = programs::folder()?;
    let step = Step::new("compiling the kernels");
    for name in ["gloop-eaters", "gantry-arbiter", "libgloop.so"] {
        copy(&built.join(name), &folder.join(name))?;
    }
    packages::run(&mut gloop_turns::in_c(&built, &folder.join("turns")))?;
    copy(&root().join("gloop/measure.py"), &folder.join("measure.py"))?;
    let mut compile = Command::new(folder.join("gloop-eaters"));
    compile.args(["compile", "--arch", ARCHITECTURES, "--nvrtc"]);
    packages::output(compile.arg(compiler()?).arg("--into").arg(&folder))?;
    step.finish();
    Ok(folder)
}
