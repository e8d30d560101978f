//! Debian packages, by debhelper.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_build::progress::Step;
use gantry_tests::rig::packages;

use super::{
    stage::{NAMES, Trees},
    version::Version,
};

/// Programs that this needs, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[
    ("make", "make"),
    ("dpkg-buildpackage", "dpkg-dev"),
    ("dh", "debhelper"),
    ("dh_dkms", "dh-dkms"),
];

/// Makes the Debian packages.
///
/// # Errors
/// debhelper refuses them.
pub fn make(
    sources: &Path,
    trees: &Trees,
    version: &Version,
    work: &Path,
    out: &Path,
) -> Result<Vec<PathBuf>> {
    packages::install(PROGRAMS)?;
    let step = Step::new("making Debian packages");
    // debhelper writes the packages beside the folder.
    let folder = work.join("deb/gantry");
    let debian = folder.join("debian");
    fs::create_dir_all(&debian)?;
    for entry in fs::read_dir(sources.join("packaging/debian"))? {
        let from = entry?.path();
        let to = debian.join(from.file_name().context("it has a name")?);
        let text = fs::read_to_string(&from)?
            .replace("@MAINTAINER@", &version.maintainer)
            .replace("@MODULE@", &trees.module);
        fs::write(&to, text)?;
        fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
    }
    let date = packages::output(Command::new("date").args([
        "--utc",
        "--rfc-email",
        "--date",
        &format!("@{}", version.epoch),
    ]))?;
    let changelog = format!(
        "gantry ({}) unstable; urgency=medium\n\n  * See CHANGELOG.md of the sources.\n\n -- {}  {}\n",
        version.package,
        version.maintainer,
        date.trim()
    );
    fs::write(debian.join("changelog"), changelog)?;
    fs::create_dir_all(debian.join("source"))?;
    fs::write(debian.join("source/format"), "3.0 (native)\n")?;
    packages::run(
        Command::new("cp")
            .arg("-a")
            .args([&trees.folder, &folder.join("stage")]),
    )?;
    packages::run(
        Command::new("dpkg-buildpackage")
            // What it needs is installed above. Otherwise it would also ask for build-essential, of which it uses nothing.
            .args(["--build=binary", "--no-sign", "--no-check-builddeps"])
            .env("SOURCE_DATE_EPOCH", version.epoch.to_string())
            .current_dir(&folder),
    )?;
    let mut made = Vec::new();
    for name in NAMES {
        let machine = match name {
            "gantry-gate-dkms" => "all",
            _ => "amd64",
        };
        let file = format!("{name}_{}_{machine}.deb", version.package);
        let to = out.join(&file);
        fs::copy(work.join("deb").join(&file), &to)
            .with_context(|| format!("debhelper has made no {file}"))?;
        made.push(to);
    }
    step.finish();
    Ok(made)
}
