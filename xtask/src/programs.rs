//! Builds the programs that other commands run.

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

/// The folder for builds and logs.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Copies a file. The target may be a running program, which cannot be written to.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let _ = fs::remove_file(to);
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Copies a program or library without its symbols, for a machine to which little can be transferred.
pub fn pack(from: &Path, to: &Path) -> Result<()> {
    copy(from, to)?;
    packages::run(Command::new("strip").arg("--strip-unneeded").arg(to))
        .with_context(|| format!("cannot take the symbols out of {}", to.display()))
}

/// A command of the same cargo that runs this program.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Packages whose programs, libraries and examples are run, in addition to gantry's.
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

/// Environment variable that overrides link-time optimization for the whole build.
const LTO: &str = "CARGO_PROFILE_RELEASE_LTO";

static ONLY_TESTED: AtomicBool = AtomicBool::new(false);

/// Makes this run build only gantry with link-time optimization, as it is shipped and as its size is promised. For the
/// other thirty programs, the compiler would repeat all its work on mostly the same crates.
pub fn only_test() {
    ONLY_TESTED.store(true, Ordering::Relaxed);
}

/// Whether gantry is built separately from the rest.
fn apart() -> bool {
    ONLY_TESTED.load(Ordering::Relaxed) && std::env::var_os(LTO).is_none()
}

/// Builds without link-time optimization, with more codegen units.
fn quickly(build: &mut Command) {
    build
        .env(LTO, "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
}

/// Builds all release programs that need an operating system, except the guest's agent, and except gantry where that is
/// built separately ([`gantry`]). Returns their folder. Every caller builds the same set of packages: with another set,
/// features of dependencies would differ, and most crates would be compiled and linked again.
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

/// Builds the programs that the nested rig contains.
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

/// Builds the guest's agent, which needs no shared objects and embeds the driver. A build for a named target applies
/// its flags only to the program, not to code that runs during the build.
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
