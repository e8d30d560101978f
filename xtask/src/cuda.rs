//! Runs the generator of the CUDA API's definition, a program of its own: only who generates needs bindgen and libclang.

use std::ffi::OsString;

use anyhow::{Result, ensure};
use gantry_build::cargo;

/// What the generator is told.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Options {
    #[arg(allow_hyphen_values = true, trailing_var_arg = true)]
    words: Vec<OsString>,
}

/// Runs a command of the generator.
///
/// # Errors
/// It cannot be built, or fails.
pub fn run(command: &str, options: &Options) -> Result<()> {
    let mut generator = cargo();
    generator.args(["run", "--quiet", "-p", "cuda-generator", "--", command]);
    let status = generator.args(&options.words).status()?;
    ensure!(status.success(), "{command} failed ({status})");
    Ok(())
}
