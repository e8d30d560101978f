//! `cargo xtask release`: the programs that users install, each with its line tables in a file beside it.

use std::{fs, path::PathBuf};

use anyhow::Result;
use gantry_build::release;

/// The packages that users install, except the guest's agent, and their programs.
const RELEASED: &[(&str, &[&str])] = &[
    ("vmm", &["gantry"]),
    ("remoting-pool", &["gantry-accel"]),
    ("gf100", &["gantry-gf100"]),
    (
        "gpu-mediator",
        &["gantry-arbiter", "gantry-gpu", "gantry-top"],
    ),
    ("gantry-exporter", &["gantry-exporter"]),
    ("gantry-tunnel", &["gantry-tunnel"]),
    // For guests, and for hosts whose programs are served by a pool.
    ("gantry-nvidia", &["gantry-nvidia"]),
    ("gantry-smi", &["gantry-smi"]),
    ("gantry-checkpoint", &["gantry-checkpoint"]),
    ("gantry-cuda-run", &["gantry-cuda"]),
];

/// Options of `cargo xtask release`.
#[derive(clap::Args)]
pub struct Options {
    /// Destination directory of the programs.
    folder: PathBuf,
}

/// Builds the programs, and splits each one.
pub fn run(options: &Options) -> Result<()> {
    for stripped in release::build(RELEASED, &options.folder)? {
        let size = fs::metadata(&stripped)?.len();
        println!("{} ({} KiB)", stripped.display(), size >> 10);
    }
    Ok(())
}
