//! Calls over an accelerator's rings from ring 3 of a guest without an operating system, on this
//! machine's own KVM.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::Result;
use gantry_build::{cargo, programs, progress::Step, target};
use gantry_tests::{report::Outcome, rig::packages};

/// The guest is a separate workspace, because it is linked as a kernel.
pub const MANIFEST: &str = "tests/ring/guest/Cargo.toml";

/// Naming the target keeps the flags away from build scripts and macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FLAGS: &str = "-Crelocation-model=static";

/// A host's OpenCL driver, and the Debian packages that contain it.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
];

/// The API that is called from ring 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Api {
    /// OpenCL, by the host's driver.
    Opencl,
    /// CUDA, by the host's driver, or where there is none, by a stand-in that needs no GPU.
    Cuda,
}

const SCENARIOS: &[(&str, Api)] = &[
    (
        "ring-3: a guest computes there, and a call is no exit and no system call",
        Api::Opencl,
    ),
    (
        "ring-3: a guest computes with CUDA there, and a call is no exit and no system call",
        Api::Cuda,
    ),
];

/// Runs the scenarios that the words select.
pub fn run(words: &[String], mut report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    let is_selected =
        |name: &str| words.is_empty() || words.iter().any(|word| name.contains(&**word));
    for (name, api) in SCENARIOS.iter().filter(|(name, _)| is_selected(name)) {
        if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
            let why = format!("/dev/kvm cannot be used: {error}");
            report(name, &Outcome::Skipped(why), 0.0);
            continue;
        }
        let folder = build()?;
        let start = Instant::now();
        let outcome = match packages::output(program(&folder, *api)?.arg("--check")) {
            Ok(_) => Outcome::Passed,
            Err(error) => Outcome::Failed(error.chain().map(ToString::to_string).collect()),
        };
        report(name, &outcome, start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The measuring program, using the host's driver for the API.
pub fn program(folder: &Path, api: Api) -> Result<Command> {
    let mut command = Command::new("timeout");
    command
        .arg("300")
        .arg(folder.join("gantry-ring-bench"))
        .arg(folder);
    if api == Api::Cuda {
        command.args(["--api", "cuda"]);
        // A device file of NVIDIA's driver.
        if !Path::new("/dev/nvidiactl").exists() {
            let stand_in = programs::folder()?.join("libgantry_cuda_driver.so");
            // It reserves addresses that count as memory.
            command
                .args(["--heap", "262144", "--library"])
                .arg(stand_in);
        }
    }
    Ok(command)
}

/// A folder with everything that the programs need except the C library and an OpenCL driver.
pub fn build() -> Result<PathBuf> {
    packages::install(PROGRAMS)?;
    let release = programs::folder()?;
    let guest = guests()?;
    let folder = target().join("ring");
    fs::create_dir_all(&folder)?;
    for (program, name) in [
        (programs::gantry()?, "gantry"),
        (release.join("gantry-accel"), "gantry-accel"),
        (release.join("gantry-ring-bench"), "gantry-ring-bench"),
        (guest.join("gantry-ring-guest"), "gantry-ring-guest"),
    ] {
        gantry_build::copy(&program, &folder.join(name))?;
    }
    Ok(folder)
}

/// Copies the contents of that folder to this one, without symbols, for another machine.
pub fn pack(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    for entry in fs::read_dir(build()?)? {
        let entry = entry?;
        gantry_build::pack(&entry.path(), &folder.join(entry.file_name()))?;
    }
    Ok(())
}

/// Builds the guests without an operating system, and returns their folder.
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

/// Checks the guest's formatting, and runs clippy on it.
pub fn lint() -> Command {
    programs::lint(MANIFEST, "ring-guest", TARGET, FLAGS)
}
