//! The programs of this repository that tests and benchmarks run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context, Result};
use gantry_tests::rig::{
    Binaries, native,
    opencl::{Cuda, Programs},
    packages,
};

use crate::{cargo, progress::Step, release, root, target};

/// Packages whose programs, libraries and examples are run, in addition to gantry's.
const PACKAGES: &[&str] = &[
    "ch-client",
    "gantry-checkpoint",
    "gantry-cuda",
    "gantry-cuda-driver",
    "gantry-gloop",
    "gantry-malloc",
    "gantry-native",
    "gantry-nvidia",
    "gantry-opencl",
    "remoting-pool",
    "gantry-tests",
    "gantry-tunnel",
    "gf100",
    "gpu-mediator",
    "vmfunc-gate-rig",
];

/// Gantry's package.
const GANTRY: &str = "vmm";

/// How a run of xtask builds programs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Build {
    /// As they are shipped, with link-time optimization: for measurements.
    #[default]
    Shipped,
    /// Quickly: for tests and the demonstration.
    Scenario,
    /// Quickly, except gantry, which is as it is shipped: for all tests.
    ScenarioOfShipped,
}

impl Build {
    /// Cargo's profile.
    pub fn profile(self) -> &'static str {
        match self {
            Self::Shipped => "release",
            Self::Scenario | Self::ScenarioOfShipped => "scenario",
        }
    }
}

static BUILD: OnceLock<Build> = OnceLock::new();

/// Chooses how this run builds programs, before it builds any.
pub fn choose(build: Build) {
    // A run has one command, which chooses once.
    let _ = BUILD.set(build);
}

/// How this run builds programs.
pub fn chosen() -> Build {
    *BUILD.get_or_init(Build::default)
}

/// Builds all programs that need an operating system, except the guest's agent, and except gantry where it is built
/// separately ([`gantry`]). Returns their folder. Every caller builds the same set of packages: with another set,
/// features of dependencies would differ, and most crates would be compiled and linked again.
pub fn folder() -> Result<PathBuf> {
    let (chosen, mut build) = (chosen(), cargo());
    let profile = chosen.profile();
    build
        .args(["build", "--profile", profile, "--quiet"])
        .args(["--lib", "--bins", "--examples"])
        .args(PACKAGES.iter().flat_map(|name| ["--package", name]));
    let step = if chosen == Build::ScenarioOfShipped {
        Step::new(format!(
            "building drivers and the programs of the tests ({profile})"
        ))
    } else {
        build.args(["--package", GANTRY]);
        Step::new(format!(
            "building gantry, its drivers and the programs of its tests ({profile})"
        ))
    };
    packages::run(&mut build)?;
    step.finish();
    let folder = target().join(profile);
    fs::canonicalize(&folder).with_context(|| format!("cannot find {}", folder.display()))
}

/// Builds some packages alone, for a run that needs no others. Returns their folder.
pub fn only(names: &[&str]) -> Result<PathBuf> {
    let profile = chosen().profile();
    let step = Step::new(format!("building {} ({profile})", names.join(", ")));
    let mut build = cargo();
    build.args(["build", "--profile", profile, "--quiet"]);
    packages::run(build.args(names.iter().flat_map(|name| ["--package", name])))?;
    step.finish();
    Ok(target().join(profile))
}

/// Builds gantry.
pub fn gantry() -> Result<PathBuf> {
    if chosen() != Build::ScenarioOfShipped {
        return Ok(folder()?.join("gantry"));
    }
    let folder = target().join("shipped");
    let gantry = release::build(&[(GANTRY, &["gantry"])], &folder)?;
    let gantry = gantry.first().context("it is one program")?;
    fs::canonicalize(gantry).with_context(|| format!("cannot find {}", gantry.display()))
}

/// Builds the programs that the nested rig contains.
pub fn build() -> Result<Binaries> {
    let built = folder()?;
    let agent = agent(&built.join("libgantry_opencl.so"))?;
    Ok(Binaries {
        gantry: gantry()?,
        gf100: built.join("gantry-gf100"),
        gpu: built.join("gantry-gpu"),
        runner: built.join("runner"),
        client: built.join("ch-client"),
        tunnel: built.join("gantry-tunnel"),
        opencl: Programs {
            pool: built.join("gantry-accel"),
            arbiter: built.join("gantry-arbiter"),
            agent,
            example: built.join("examples/opencl_figures"),
            shared: built.join("examples/opencl_shared"),
            idle: built.join("examples/opencl_idle"),
            moving: built.join("examples/opencl_moving"),
            turns: built.join("examples/opencl_turns"),
            hostile: built.join("examples/opencl_hostile"),
            cuda: Cuda {
                driver: built.join("libgantry_cuda.so"),
                programs: built.join("examples/cuda_programs"),
                stand_in: built.join("libgantry_cuda_driver.so"),
            },
        },
        native: native::Programs {
            worker: built.join("examples/nvidia_stand_in"),
            library: built.join("libgantry_nvidia_preload.so"),
            programs: built.join("examples/native_programs"),
            checkpoint: built.join("gantry-checkpoint"),
        },
    })
}

/// Builds the guest's agent, which needs no shared objects and embeds the driver. Only the program itself is compiled for
/// that: what it is linked from is the same either way, and is there already.
pub fn agent(driver: &Path) -> Result<PathBuf> {
    let profile = chosen().profile();
    let step = Step::new(format!("building the guest's agent ({profile})"));
    let mut build = cargo();
    build
        .args(["rustc", "--profile", profile, "--quiet"])
        .args(["-p", "gantry-agent", "--bin", "gantry-agent"])
        .args(["--features", "carry-driver"])
        .args(["--", "-Ctarget-feature=+crt-static"])
        .env("GANTRY_DRIVER", driver);
    packages::run(&mut build)?;
    step.finish();
    Ok(target().join(profile).join("gantry-agent"))
}

/// Checks formatting and clippy for a separate workspace of programs without an operating system. `manifest` is its
/// path in the repository, `folder` its build folder below the target folder. It is built for target `target_name` with
/// the compiler flags `flags`.
pub fn lint(manifest: &str, folder: &str, target_name: &str, flags: &str) -> Command {
    let mut both = Command::new("sh");
    both.arg("-ec")
        .arg(
            "cargo fmt --manifest-path \"$0\" --check
             cargo clippy --manifest-path \"$0\" --release --quiet --target \"$1\" -- -D warnings",
        )
        .args([manifest, target_name])
        .current_dir(root())
        .env("CARGO_TARGET_DIR", target().join(folder))
        .env("RUSTFLAGS", flags);
    both
}
