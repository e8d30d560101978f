//! Builds what tests, benchmarks and tasks run.
//!
//! - [`programs`]: the programs of this repository, in one of three ways.
//! - [`release`]: programs as they are shipped, and what makes their backtraces readable in files beside them.
//! - [`progress`]: progress messages of long steps.

pub mod programs;
pub mod progress;
pub mod release;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_tests::rig::packages;

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
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

/// A command of the same cargo that runs this program. Its compiler is rustc, also where this program was compiled by
/// clippy's driver.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(root())
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    cargo
}
