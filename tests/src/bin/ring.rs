//! `gantry-ring-bench [FOLDER] [--check]`: what a call over the rings costs, as a table. FOLDER holds
//! `gantry`, `gantry-accel` and `gantry-ring-guest`; without one it is that of this program. With
//! `--check` it only checks that a guest's calls are no exits and no system calls.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use gantry_tests::ring::{check, programs, run};

fn work() -> Result<()> {
    let (options, mut folders): (Vec<_>, Vec<_>) = std::env::args_os()
        .skip(1)
        .partition(|word| word == "--check");
    let folder = match folders.pop() {
        Some(folder) => PathBuf::from(folder),
        None => {
            let program = std::env::current_exe()?;
            let folder = program.parent().context("this program has no folder")?;
            folder.to_owned()
        }
    };
    let programs = programs(folder)?;
    if options.is_empty() {
        run(&programs)
    } else {
        check(&programs)
    }
}

fn main() -> ExitCode {
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gantry-ring-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
