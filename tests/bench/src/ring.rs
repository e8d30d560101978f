//! The cost of calls over an accelerator's rings from ring 3 of a guest without an operating system, on this machine's own
//! KVM.

use anyhow::{Result, ensure};
use gantry_host_tests::ring::{Api, build, program};

/// Options of `cargo xtask bench ring`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// ring: which API to call
    #[arg(long, value_enum, default_value_t = Api::Opencl)]
    api: Api,
    /// ring: how often to measure everything, taking turns
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    rounds: usize,
}

/// Measures, and prints a table.
pub fn bench(options: &Options) -> Result<()> {
    let folder = build()?;
    println!(
        "(copy {} to another machine, and run gantry-ring-bench in it)",
        folder.display()
    );
    let mut program = program(&folder, options.api)?;
    let status = program
        .args(["--rounds", &options.rounds.to_string()])
        .status()?;
    ensure!(status.success(), "the measurement has failed: {status}");
    Ok(())
}
