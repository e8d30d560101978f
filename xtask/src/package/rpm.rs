//! RPM packages, by rpmbuild.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_build::progress::Step;
use gantry_tests::rig::packages;

use super::{stage::Trees, version::Version};

/// Programs that this needs, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[("rpmbuild", "rpm")];

/// The packages. The kernel module is built by DKMS for Debian's kernels only.
const NAMES: [&str; 4] = ["gantry", "gantry-accel", "gantry-exporter", "gantry-guest"];

/// Makes the RPM packages.
///
/// # Errors
/// rpmbuild refuses them.
pub fn make(
    sources: &Path,
    trees: &Trees,
    version: &Version,
    work: &Path,
    out: &Path,
) -> Result<Vec<PathBuf>> {
    packages::install(PROGRAMS)?;
    let step = Step::new("making RPM packages");
    let top = work.join("rpm");
    let stage = top.join("stage");
    fs::create_dir_all(&top)?;
    packages::run(Command::new("cp").arg("-a").args([&trees.folder, &stage]))?;
    let spec = fs::read_to_string(sources.join("packaging/rpm/gantry.spec"))?
        .replace("@VERSION@", &version.package)
        .replace("@STAGE@", &stage.display().to_string())
        .replace("@LICENSE@", &sources.join("LICENSE").display().to_string());
    let file = top.join("gantry.spec");
    fs::write(&file, spec)?;
    packages::run(
        Command::new("rpmbuild")
            .args(["-bb", "--target", "x86_64-linux", "--define"])
            .arg(format!("_topdir {}", top.display()))
            .arg(&file)
            .env("SOURCE_DATE_EPOCH", version.epoch.to_string()),
    )?;
    let mut made = Vec::new();
    for name in NAMES {
        let file = format!("{name}-{}-1.x86_64.rpm", version.package);
        let to = out.join(&file);
        fs::copy(top.join("RPMS/x86_64").join(&file), &to)
            .with_context(|| format!("rpmbuild has made no {file}"))?;
        made.push(to);
    }
    step.finish();
    Ok(made)
}
