//! Builds the kernel module for the supported kernels.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use gantry_build::{progress::Step, root, target};
use gantry_tests::{
    report::Outcome,
    rig::{
        Cache,
        packages::{self, Kernel},
    },
};

use super::Check;

/// A module that has been built.
pub struct Module {
    /// The kernel that it was built for.
    pub kernel: Kernel,
    /// The module file.
    pub file: PathBuf,
}

/// The supported kernels: Debian's kernel, and the newer one of its backports.
pub const VERSIONS: [&str; 2] = ["6.1", "6.12"];

/// Builds the module for one of the versions, as DKMS does on a user's machine.
///
/// # Errors
/// The headers cannot be fetched.
pub fn build(cache: &Cache, version: &str) -> Result<(Vec<Check>, Option<Module>)> {
    let step = Step::new("fetching a kernel with its headers, and building the gate's module");
    let kernel = if version == VERSIONS[0] {
        cache.kernel()?
    } else {
        cache.kernel_of(&cache.release_of(&format!("linux-image-{version}-cloud-amd64"))?)?
    };
    let release = kernel.release.clone();
    let dkms = Dkms {
        work: target().join("gate-module").join(&release),
        headers: cache.headers(&release)?,
    };
    let (outcome, module) = match dkms.install(&release) {
        Ok(file) => (Outcome::Passed, Some(Module { kernel, file })),
        Err(error) => (Outcome::Failed(vec![format!("{error:#}")]), None),
    };
    let name = format!("gate: DKMS builds and installs the kernel module for {release}");
    let mut checks = vec![(name, outcome)];
    if module.is_some() {
        let outcome = match dkms.refuses(OTHER) {
            Ok(()) => Outcome::Passed,
            Err(error) => Outcome::Failed(vec![format!("{error:#}")]),
        };
        let name = format!("gate: DKMS refuses to build the kernel module for {OTHER} ({release})");
        checks.push((name, outcome));
    }
    step.finish();
    Ok((checks, module))
}

/// A kernel that is not supported.
const OTHER: &str = "6.5.0";

/// DKMS with directories of its own instead of the machine's.
struct Dkms {
    /// The directory that contains them.
    work: PathBuf,
    /// The headers of the kernel.
    headers: PathBuf,
}

impl Dkms {
    /// Adds, builds and installs the module, and returns it in its final form. If nothing has
    /// changed since the last time, it is not built again.
    fn install(&self, release: &str) -> Result<PathBuf> {
        let installed = self.work.join("modules").join(release);
        let file = self.work.join("gantry_gate.ko");
        let package = package()?;
        if !copy_sources(&self.source(&package))? && file.exists() {
            return Ok(file);
        }
        // Leftovers of a failed run must not make the next one pass.
        let _ = fs::remove_file(&file);
        for old in [self.tree(), installed.clone()] {
            if old.exists() {
                fs::remove_dir_all(&old)?;
            }
            fs::create_dir_all(&old)?;
        }
        packages::run(&mut self.command("add", &package))?;
        for action in ["build", "install"] {
            packages::run(&mut self.command_for(action, &package, release)).or_else(|error| {
                let log = self.tree().join(&package).join("build/make.log");
                let log = fs::read_to_string(log).unwrap_or_default();
                bail!("{error:#}\n{log}")
            })?;
        }
        // Debug information is ten times the size of the rest.
        let from = installed.join("updates/dkms/gantry_gate.ko");
        let mut strip = Command::new("strip");
        packages::run(strip.arg("--strip-debug").arg(from).arg("-o").arg(&file))?;
        Ok(file)
    }

    /// Must be called after [`Dkms::install`]: another kernel's headers would not get that far.
    fn refuses(&self, release: &str) -> Result<()> {
        let refused = packages::run(&mut self.command_for("build", &package()?, release));
        let refused = format!("{:#}", refused.err().context("it was built")?);
        ensure!(refused.contains("BUILD_EXCLUSIVE"), "{refused}");
        Ok(())
    }

    fn tree(&self) -> PathBuf {
        self.work.join("tree")
    }

    /// Directory of a package's sources, with the name that DKMS expects.
    fn source(&self, package: &str) -> PathBuf {
        self.work.join("source").join(package.replace('/', "-"))
    }

    fn command(&self, action: &str, package: &str) -> Command {
        let mut command = as_root();
        command
            .args([action, package, "--sourcetree"])
            .arg(self.work.join("source"))
            .arg("--dkmstree")
            .arg(self.tree())
            .arg("--installtree")
            .arg(self.work.join("modules"))
            .env("KCFLAGS", "-Werror");
        command
    }

    fn command_for(&self, action: &str, package: &str, release: &str) -> Command {
        let mut command = self.command(action, package);
        // The directory has no other modules whose dependencies could be scanned.
        command
            .args(["-k", release, "--no-depmod", "--kernelsourcedir"])
            .arg(&self.headers);
        command
    }
}

/// Directory of the module's sources.
fn sources() -> PathBuf {
    root().join("vmfunc-gate/module")
}

/// Name and version, in DKMS's notation.
fn package() -> Result<String> {
    let settings = fs::read_to_string(sources().join("dkms.conf"))?;
    let setting = |name: &str| {
        let mut lines = settings.lines();
        lines
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
            .map(|value| value.trim_matches('"'))
            .with_context(|| format!("dkms.conf has no {name}"))
    };
    let (name, version) = (setting("PACKAGE_NAME")?, setting("PACKAGE_VERSION")?);
    Ok(format!("{name}/{version}"))
}

/// Copies the module's sources. Returns whether they have changed.
fn copy_sources(to: &Path) -> Result<bool> {
    fs::create_dir_all(to)?;
    let mut changed = false;
    for file in fs::read_dir(sources())? {
        let from = file?.path();
        let Some(to) = from.file_name().map(|name| to.join(name)) else {
            continue;
        };
        if fs::read(&to).ok() != Some(fs::read(&from)?) {
            fs::copy(&from, to)?;
            changed = true;
        }
    }
    Ok(changed)
}

/// DKMS requires root where it installs. In this user's directories, root of a user namespace is
/// sufficient.
fn as_root() -> Command {
    const DKMS: &str = "/usr/sbin/dkms";
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } == 0 {
        return Command::new(DKMS);
    }
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", DKMS]);
    command
}
