//! The kernel module, built for the kernels that it is made for.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use gantry_tests::{
    report::Outcome,
    rig::{
        Cache,
        packages::{self, Kernel},
    },
};

use super::Check;
use crate::{
    programs::{root, target},
    progress::Step,
};

/// A module that was built.
pub struct Module {
    /// The kernel that it is for.
    pub kernel: Kernel,
    /// The file.
    pub file: PathBuf,
}

/// What it is made for: Debian's kernel, and the newer one of its backports.
pub const VERSIONS: [&str; 2] = ["6.1", "6.12"];

/// Builds it for one of the versions, as DKMS does on a user's machine.
///
/// # Errors
/// Headers cannot be fetched.
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

/// A kernel that it is not made for.
const OTHER: &str = "6.5.0";

/// DKMS, in folders of its own instead of the machine's.
struct Dkms {
    /// Those folders are in this one.
    work: PathBuf,
    /// Of the kernel.
    headers: PathBuf,
}

impl Dkms {
    /// Adds, builds and installs the module, as it is loaded then. What did not change since the
    /// last time is not built again.
    fn install(&self, release: &str) -> Result<PathBuf> {
        let installed = self.work.join("modules").join(release);
        let file = self.work.join("gantry_gate.ko");
        let package = package()?;
        if !copy_sources(&self.source(&package))? && file.exists() {
            return Ok(file);
        }
        // What is left of a run that fails must not pass the next one.
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
        // What debuggers want is ten times the rest.
        let from = installed.join("updates/dkms/gantry_gate.ko");
        let mut strip = Command::new("strip");
        packages::run(strip.arg("--strip-debug").arg(from).arg("-o").arg(&file))?;
        Ok(file)
    }

    /// After [`Dkms::install`]: another kernel's headers would not get that far.
    fn refuses(&self, release: &str) -> Result<()> {
        let refused = packages::run(&mut self.command_for("build", &package()?, release));
        let refused = format!("{:#}", refused.err().context("it was built")?);
        ensure!(refused.contains("BUILD_EXCLUSIVE"), "{refused}");
        Ok(())
    }

    fn tree(&self) -> PathBuf {
        self.work.join("tree")
    }

    /// Where the sources of a package are, by the name that DKMS expects.
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
        // The folder has no other modules, whose dependencies could be looked at.
        command
            .args(["-k", release, "--no-depmod", "--kernelsourcedir"])
            .arg(&self.headers);
        command
    }
}

/// The module's sources.
fn sources() -> PathBuf {
    root().join("vmfunc-gate/module")
}

/// Name and version, as DKMS is told them.
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

/// Copies the module's sources; whether they have changed.
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

/// DKMS, which wants to be root where it installs: of a namespace, if nothing else. In folders of
/// this user's, that is enough.
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
