//! Stock firmware and a stock image: edk2's target for Cloud Hypervisor's machine, and a Debian disk that boots by UEFI.

mod edk2;
mod image;
mod scenario;

use std::{fs, path::PathBuf};

use anyhow::Result;
use gantry_tests::rig::Cache;

pub use scenario::stock_image;

/// Options of `cargo xtask firmware`.
#[derive(clap::Args)]
pub struct Options {
    /// The folder for CLOUDHV.fd.
    folder: PathBuf,
    /// Also make `debian.raw`, a disk that boots with it: as root, without a password, on the serial port.
    #[arg(long)]
    image: bool,
}

/// Builds the firmware and makes the disk, or takes them from the cache.
///
/// # Errors
/// One of them cannot be built.
pub fn run(options: &Options) -> Result<()> {
    let cache = Cache::open()?;
    fs::create_dir_all(&options.folder)?;
    let mut made = vec![edk2::firmware(&cache)?];
    if options.image {
        made.push(image::disk(&cache)?);
    }
    for file in made {
        let name = file.file_name().unwrap_or_default();
        let to = options.folder.join(name);
        fs::copy(&file, &to)?;
        println!("{}", to.display());
    }
    Ok(())
}
