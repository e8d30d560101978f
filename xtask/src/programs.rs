//! Building the programs that are run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};
use gantry_tests::rig::{
    Binaries,
    opencl::{Cuda, Programs},
    packages,
};

use crate::{progress::Step, release};

/// The root of the repository.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}

/// Where builds and logs go.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Copies a file, also over a program that is running, which cannot be written to.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let _ = fs::remove_file(to);
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Copies a program or library without its symbols, for a machine to which not much can be brought.
pub fn pack(from: &Path, to: &Path) -> Result<()> {
    copy(from, to)?;
    packages::run(Command::new("strip").arg("--strip-unneeded").arg(to))
        .with_context(|| format!("cannot take the symbols out of {}", to.display()))
}

/// Cargo, as it runs this program.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// The packages whose programs, libraries and examples are run, beside gantry's.
const PACKAGES: &[&str] = &[
    "ch-client",
    "gantry-cuda",
    "gantry-cuda-driver",
    "gantry-malloc",
    "gantry-opencl",
    "gantry-remoting",
    "gantry-tests",
    "gantry-tunnel",
    "gf100",
    "gpu-mediator",
    "vmfunc-gate-rig",
];

/// Gantry's package.
const GANTRY: &str = "vmm";

/// What switches link-time optimization off for all of it.
const LTO: &str = "CARGO_PROFILE_RELEASE_LTO";

static ONLY_TESTED: AtomicBool = AtomicBool::new(false);

/// Has this run build only gantry with link-time optimization, as it is shipped and its size is promised. For each of
/// thirty programs the compiler would do all its work on most of the same crates once more.
pub fn only_test() {
    ONLY_TESTED.store(true, Ordering::Relaxed);
}

/// Whether gantry is built apart from the rest.
fn apart() -> bool {
    ONLY_TESTED.load(Ordering::Relaxed) && std::env::var_os(LTO).is_none()
}

/// Without link-time optimization, and by as many threads as there are.
fn quickly(build: &mut Command) {
    build
        .env(LTO, "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
}

/// Builds all release programs that need an operating system, except the guest's agent, and gantry where that is built
/// apart ([`gantry`]); their folder. Everybody has the same selection: with another one, features of dependencies
/// differ, and most crates are compiled and linked once more.
pub fn release() -> Result<PathBuf> {
    let mut build = cargo();
    build
        .args(["build", "--release", "--quiet"])
        .args(["--lib", "--bins", "--examples"])
        .args(PACKAGES.iter().flat_map(|name| ["--package", name]));
    let step = if apart() {
        quickly(&mut build);
        Step::new("building drivers and the programs of the tests (release)")
    } else {
        build.args(["--package", GANTRY]);
        Step::new("building gantry, its drivers and the programs of its tests (release)")
    };
    packages::run(&mut build)?;
    step.finish();
    let folder = target().join("release");
    fs::canonicalize(&folder).with_context(|| format!("cannot find {}", folder.display()))
}

/// Builds gantry.
pub fn gantry() -> Result<PathBuf> {
    if !apart() {
        return Ok(release()?.join("gantry"));
    }
    let folder = target().join("shipped");
    let gantry = release::build(&[(GANTRY, &["gantry"])], &folder)?;
    let gantry = gantry.first().context("it is one program")?;
    fs::canonicalize(gantry).with_context(|| format!("cannot find {}", gantry.display()))
}

/// Builds what the nested rig has.
pub fn build() -> Result<Binaries> {
    let release = release()?;
    let agent = agent(&release.join("libgantry_opencl.so"))?;
    Ok(Binaries {
        gantry: gantry()?,
        gf100: release.join("gantry-gf100"),
        gpu: release.join("gantry-gpu"),
        runner: release.join("runner"),
        client: release.join("ch-client"),
        tunnel: release.join("gantry-tunnel"),
        opencl: Programs {
            pool: release.join("gantry-accel"),
            arbiter: release.join("gantry-arbiter"),
            agent,
            example: release.join("examples/opencl_figures"),
            shared: release.join("examples/opencl_shared"),
            idle: release.join("examples/opencl_idle"),
            moving: release.join("examples/opencl_moving"),
            turns: release.join("examples/opencl_turns"),
            hostile: release.join("examples/opencl_hostile"),
            cuda: Cuda {
                driver: release.join("libgantry_cuda.so"),
                programs: release.join("examples/cuda_programs"),
                stand_in: release.join("libgantry_cuda_driver.so"),
            },
        },
    })
}

/// Builds the guest's agent, which needs no shared objects and carries the driver. A build for a
/// named target applies its flags to programs only, and not to what is run while building.
fn agent(driver: &Path) -> Result<PathBuf> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let step = Step::new("building the guest's agent (release)");
    let mut build = cargo();
    build
        .args(["build", "--release", "--quiet", "-p", "gantry-agent"])
        .args(["--features", "carry-driver", "--target", TARGET])
        .env("GANTRY_DRIVER", driver)
        .env(
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
            "-Ctarget-feature=+crt-static",
        );
    if apart() {
        quickly(&mut build);
    }
    packages::run(&mut build)?;
    step.finish();
    Ok(target().join(TARGET).join("release/gantry-agent"))
}

/// Whether a workspace of its own for programs without an operating system is formatted, and what
/// clippy says. `manifest` is its path in the repository, `folder` a folder for its build below
/// the target folder; it is built for `target` with the compiler's `flags`.
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
