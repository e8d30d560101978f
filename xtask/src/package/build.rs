//! Programs and libraries as they are packaged: without paths of this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_build::{cargo, pack, progress::Step, release};
use gantry_tests::rig::packages;

use super::version::Version;

/// Programs that this needs, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[("objdump", "binutils")];

/// Cargo's name of the machine that packages are for.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Programs of the host: the package that they are in, their crate, and the folder in which they are installed (those
/// that only root and services run, and the others).
pub const HOST: &[(&str, &str, &str, &[&str])] = &[
    ("gantry", "vmm", "usr/bin", &["gantry"]),
    ("gantry", "gantry-tunnel", "usr/sbin", &["gantry-tunnel"]),
    (
        "gantry-accel",
        "remoting-pool",
        "usr/sbin",
        &["gantry-accel"],
    ),
    ("gantry-accel", "gf100", "usr/bin", &["gantry-gf100"]),
    (
        "gantry-accel",
        "gpu-mediator",
        "usr/bin",
        &["gantry-gpu", "gantry-top"],
    ),
    (
        "gantry-accel",
        "gpu-mediator",
        "usr/sbin",
        &["gantry-arbiter"],
    ),
    (
        "gantry-accel",
        "gantry-nvidia",
        "usr/bin",
        &["gantry-nvidia"],
    ),
    (
        "gantry-exporter",
        "gantry-exporter",
        "usr/sbin",
        &["gantry-exporter"],
    ),
];

/// Packages of guests, and their programs.
const GUEST: &[(&str, &[&str])] = &[
    ("gantry-agent", &["gantry-agent"]),
    ("gantry-checkpoint", &["gantry-checkpoint"]),
    ("gantry-cuda-run", &["gantry-cuda"]),
    ("gantry-smi", &["gantry-smi"]),
];

/// Packages with a library for guests, the name that Cargo gives it, and that under which programs find it.
const LIBRARIES: &[(&str, &str, &str)] = &[
    (
        "gantry-opencl",
        "libgantry_opencl.so",
        "libgantry_opencl.so",
    ),
    ("gantry-cuda", "libgantry_cuda.so", "libcuda.so.1"),
    ("gantry-nvml", "libgantry_nvml.so", "libnvidia-ml.so.1"),
    (
        "gantry-cuda-run",
        "libgantry_cuda_audit.so",
        "libgantry_cuda_audit.so",
    ),
    (
        "gantry-native",
        "libgantry_nvidia_preload.so",
        "libgantry_nvidia_preload.so",
    ),
];

/// Packages with an archive, the archive, the script that links libraries from it, and these.
const ARCHIVES: &[(&str, &str, &str, &[&str])] = &[
    (
        "gantry-cudart",
        "libgantry_cudart.a",
        "guest/cudart/link.sh",
        &["libcudart.so.13"],
    ),
    (
        "gantry-cublas",
        "libgantry_cublas.a",
        "guest/cublas/link.sh",
        &["libcublas.so.13", "libcublasLt.so.13"],
    ),
];

/// The crates whose programs a package for hosts contains.
pub fn host_crates(package: &str) -> impl Iterator<Item = &'static str> {
    HOST.iter()
        .filter(move |(of, ..)| *of == package)
        .map(|(_, name, ..)| *name)
}

/// All crates that are packaged for guests.
pub fn guest_crates() -> impl Iterator<Item = &'static str> {
    let programs = GUEST.iter().map(|(name, _)| *name);
    let libraries = LIBRARIES.iter().map(|(name, ..)| *name);
    programs
        .chain(libraries)
        .chain(ARCHIVES.iter().map(|(name, ..)| *name))
}

/// Folders with what has been built.
#[derive(Debug)]
pub struct Built {
    /// The host's programs, and the line tables of each as `PROGRAM.debug`.
    pub host: PathBuf,
    /// The guest's programs.
    pub guest: PathBuf,
    /// The guest's libraries under the names by which programs find them.
    pub libraries: PathBuf,
    /// The agent as one file that contains the OpenCL driver and needs no C library.
    pub agent: PathBuf,
}

/// Builds the sources in a folder.
///
/// # Errors
/// A program cannot be built.
pub fn build(sources: &Path, work: &Path, version: &Version, is_quick: bool) -> Result<Built> {
    packages::install(PROGRAMS)?;
    packages::install(release::PROGRAMS)?;
    fs::create_dir_all(work).with_context(|| format!("cannot make {}", work.display()))?;
    let work = fs::canonicalize(work)?;
    let cargo = Build {
        sources,
        target: work.join("target"),
        profile: if is_quick { "scenario" } else { "release" },
        epoch: version.epoch,
    };
    let built = Built {
        host: work.join("host"),
        guest: work.join("guest"),
        libraries: work.join("libraries"),
        agent: work.join("static/gantry-agent"),
    };
    for folder in [
        &built.host,
        &built.guest,
        &built.libraries,
        &work.join("static"),
    ] {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        fs::create_dir_all(folder)?;
    }
    cargo.guest(&built, &work)?;
    cargo.agent(&built)?;
    cargo.host(&built)?;
    Ok(built)
}

/// How everything is built.
struct Build<'a> {
    sources: &'a Path,
    target: PathBuf,
    profile: &'a str,
    epoch: u64,
}

impl Build<'_> {
    /// The folder of what Cargo has built.
    fn folder(&self) -> PathBuf {
        self.target.join(TARGET).join(self.profile)
    }

    /// Has a command of Cargo build with line tables, and without paths of this machine.
    fn settings(&self, command: &mut Command) -> Result<()> {
        let profile = self.profile;
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
        let home = home.context("neither CARGO_HOME nor HOME is set: set one")?;
        let toolchain = packages::output(
            Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
                .args(["--print", "sysroot"])
                .current_dir(self.sources),
        )?;
        // Of several that match, the last one counts.
        let mapped = [
            (Path::new(toolchain.trim()), "/usr/src/rust"),
            (&home, "/usr/src/cargo"),
            (self.sources, "/usr/src/gantry"),
            (&self.target, "/usr/src/gantry/target"),
        ];
        let rust = mapped.map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
        let c = mapped.map(|(from, to)| format!("-ffile-prefix-map={}={to}", from.display()));
        let upper = profile.to_uppercase();
        command
            .current_dir(self.sources)
            .args(["--locked", "--quiet", "--target-dir"])
            .arg(&self.target)
            .args([
                "--config",
                &format!("profile.{profile}.package.vmm.strip = 'none'"),
            ])
            .env(format!("CARGO_PROFILE_{upper}_DEBUG"), "line-tables-only")
            .env(format!("CARGO_PROFILE_{upper}_STRIP"), "none")
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_ENCODED_RUSTFLAGS", rust.join("\x1f"))
            .env("CFLAGS", c.join(" "))
            .env("SOURCE_DATE_EPOCH", self.epoch.to_string());
        Ok(())
    }

    /// Builds what guests load.
    fn guest(&self, built: &Built, work: &Path) -> Result<()> {
        let step = Step::new(format!(
            "building the guest's programs and libraries ({})",
            self.profile
        ));
        let mut command = cargo();
        command
            .args(["build", "--lib", "--bins", "--profile", self.profile])
            .args(["--target", TARGET])
            .args(guest_crates().flat_map(|name| ["--package", name]));
        self.settings(&mut command)?;
        packages::run(&mut command)?;
        let from = self.folder();
        for program in GUEST.iter().flat_map(|(_, programs)| *programs) {
            pack(&from.join(program), &built.guest.join(program))?;
        }
        for (_, file, name) in LIBRARIES {
            pack(&from.join(file), &built.libraries.join(name))?;
        }
        for (_, archive, link, names) in ARCHIVES {
            let linked = work.join("linked");
            fs::create_dir_all(&linked)?;
            let mut command = Command::new("sh");
            command
                .arg(self.sources.join(link))
                .args([&from.join(archive), &linked]);
            packages::run(&mut command)?;
            for name in *names {
                pack(&linked.join(name), &built.libraries.join(name))?;
            }
        }
        step.finish();
        Ok(())
    }

    /// Builds the agent that contains the driver.
    fn agent(&self, built: &Built) -> Result<()> {
        let step = Step::new("building the guest's agent as one file");
        let mut command = cargo();
        command
            .args(["rustc", "--profile", self.profile, "--target", TARGET])
            .args(["--package", "gantry-agent", "--bin", "gantry-agent"])
            .args(["--features", "carry-driver"])
            .env("GANTRY_DRIVER", built.libraries.join("libgantry_opencl.so"));
        self.settings(&mut command)?;
        command.args(["--", "-Ctarget-feature=+crt-static"]);
        packages::run(&mut command)?;
        pack(&self.folder().join("gantry-agent"), &built.agent)?;
        step.finish();
        Ok(())
    }

    /// Builds the host's programs.
    fn host(&self, built: &Built) -> Result<()> {
        let step = Step::new(format!("building the host's programs ({})", self.profile));
        let mut command = cargo();
        command
            .args(["build", "--bins", "--profile", self.profile])
            .args(["--target", TARGET])
            .args(HOST.iter().flat_map(|(_, name, ..)| ["--package", name]));
        self.settings(&mut command)?;
        packages::run(&mut command)?;
        for program in HOST.iter().flat_map(|(.., programs)| *programs) {
            release::split(&self.folder().join(program), &built.host)?;
        }
        step.finish();
        Ok(())
    }
}
