//! What users install: Debian packages, RPM packages, and for guests a tarball and a Python wheel.
//!
//! - [`version`]: the version of the packages, from the commit.
//! - [`build`]: the programs and libraries, without paths of this machine in them.
//! - [`floor`]: the oldest C library that a file works with.
//! - [`stage`]: one tree of files for each package, which all formats share.
//! - [`sbom`]: the crates that the programs consist of.
//! - [`deb`], [`rpm`], [`wheel`]: the formats.

mod build;
mod deb;
mod floor;
mod rpm;
mod sbom;
mod stage;
mod version;
mod wheel;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use gantry_build::{root, target};
use version::Version;

/// Options of `cargo xtask package`.
#[derive(clap::Args)]
pub struct Options {
    /// What to make (default: everything).
    formats: Vec<Format>,
    /// Destination directory (default: packages in the build folder).
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Version of the Debian and RPM packages (default: that of the commit).
    #[arg(long)]
    version: Option<String>,
    /// Build without link-time optimization: to try the packages.
    #[arg(long)]
    quick: bool,
}

/// A format of packages.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Format {
    /// Debian packages, for host and guest.
    Deb,
    /// RPM packages, for host and guest.
    Rpm,
    /// An archive of the guest's programs and libraries.
    Tar,
    /// A Python package of the guest's CUDA libraries and programs.
    Wheel,
}

/// All formats.
const ALL: [Format; 4] = [Format::Deb, Format::Rpm, Format::Tar, Format::Wheel];

/// The folder beside the packages in which they are made. What it contains is removed by the next run, so its name is
/// none that a user would choose.
const WORKSHOP: &str = "gantry-packages-in-work";

/// Makes packages, and prints their paths.
///
/// # Errors
/// A program cannot be built, or a package cannot be made.
pub fn run(options: &Options) -> Result<()> {
    let out = match &options.out {
        Some(out) => out.clone(),
        None => target().join("packages"),
    };
    let mut version = Version::of_commit(&root())?;
    if let Some(text) = &options.version {
        version.package.clone_from(text);
    }
    let formats = match &options.formats[..] {
        [] => &ALL,
        formats => formats,
    };
    for file in make(&root(), &out, &version, options.quick, formats)? {
        println!(
            "{} ({} KiB)",
            file.display(),
            fs::metadata(&file)?.len() >> 10
        );
    }
    Ok(())
}

/// Makes packages of the sources in a folder, and returns their paths in order.
fn make(
    sources: &Path,
    out: &Path,
    version: &Version,
    is_quick: bool,
    formats: &[Format],
) -> Result<Vec<PathBuf>> {
    let workshop = out.join(WORKSHOP);
    let work = workshop.join("trees");
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let work = fs::canonicalize(work)?;
    let built = build::build(sources, &workshop.join("build"), version, is_quick)?;
    let trees = stage::stage(sources, &built, version, &work.join("stage"))?;
    let mut files = Vec::new();
    for format in formats {
        files.extend(match format {
            Format::Deb => deb::make(sources, &trees, version, &work, out)?,
            Format::Rpm => rpm::make(sources, &trees, version, &work, out)?,
            Format::Tar => vec![wheel::tarball(sources, &trees, version, &work, out)?],
            Format::Wheel => vec![wheel::make(sources, &trees, version, &work, out)?],
        });
    }
    files.sort();
    Ok(files)
}
