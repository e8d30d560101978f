//! The vendor's headers from its Python packages, kept in the cache.
//! They are used there and never become part of this repository.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_build::progress::Step;
use gantry_tests::rig::{Cache, packages};

/// Packages with headers, in the versions that the committed definition was generated from.
const HEADERS: &[(&str, &str)] = &[
    ("nvidia-cuda-runtime", "13.0.96"),
    ("nvidia-cuda-crt", "13.0.88"),
    ("nvidia-cuda-profiler-api", "13.0.85"),
];

/// The package with the headers of cuBLAS. Its libraries, almost a gigabyte, are not kept.
const CUBLAS: &[(&str, &str)] = &[("nvidia-cublas", "13.1.0.3")];

/// Returns the directory with `cuda.h`.
///
/// # Errors
/// A package cannot be fetched.
pub fn headers() -> Result<PathBuf> {
    let folder = fetched("cuda-headers", HEADERS)?.join("nvidia/cu13/include");
    let found = folder.join("cuda.h").exists();
    anyhow::ensure!(
        found,
        "the package of the CUDA runtime has no {}/cuda.h",
        folder.display()
    );
    Ok(folder)
}

/// Returns the directory with `cublas_v2.h`.
///
/// # Errors
/// The package cannot be fetched.
pub fn cublas() -> Result<PathBuf> {
    Ok(made("cublas-headers", CUBLAS, |work| {
        Ok(std::fs::remove_dir_all(work.join("nvidia/cu13/lib"))?)
    })?
    .join("nvidia/cu13/include"))
}

fn fetched(name: &str, wheels: &[(&str, &str)]) -> Result<PathBuf> {
    made(name, wheels, |_| Ok(()))
}

fn made(
    name: &str,
    wheels: &[(&str, &str)],
    trim: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let versions: Vec<_> = wheels.iter().map(|(_, version)| *version).collect();
    let name = format!("{name}-{}", versions.join("-"));
    Cache::open()?.made(&name, |work| {
        let step = Step::new(format!("fetching {name} (once)"));
        // All in one call, since a second call would not add to the directories of the first.
        let mut install = Command::new("python3");
        install
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
            .arg(work);
        install.args(
            wheels
                .iter()
                .map(|(package, version)| format!("{package}=={version}")),
        );
        packages::run(&mut install)
            .context("cannot fetch Python packages: check the network and pip")?;
        trim(work)?;
        step.finish();
        Ok(())
    })
}
