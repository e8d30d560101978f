//! Building the programs that are run.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use gantry_tests::rig::Binaries;

use crate::progress::Step;

/// The root of the repository.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}

/// Where builds and logs go.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Cargo, as it runs this program.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Builds the release binaries of Gantry and of the tests.
pub fn build() -> Result<Binaries> {
    let step = Step::new("building gantry and its tests (release)");
    let status = cargo()
        .args([
            "build",
            "--release",
            "--quiet",
            "--bin",
            "gantry",
            "--bin",
            "runner",
        ])
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("gantry does not build: see the errors above");
    }
    step.finish();
    let release = target().join("release");
    Ok(Binaries {
        gantry: release.join("gantry"),
        runner: release.join("runner"),
    })
}
