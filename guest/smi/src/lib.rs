//! `gantry-smi`: shows the CUDA devices that programs on this machine find, as far as scripts and
//! schedulers ask nvidia-smi for them.
//!
//! It queries the `libcuda.so.1` that programs load, through Gantry's management library. What that
//! library does not know is not shown. Used memory is known only within a context, so a context is
//! created if it is requested.

mod error;
mod facts;
mod fields;
mod table;

use std::{fmt::Write as _, io, path::PathBuf};

use base::{gpus::Name, paths::cuda_libraries};
use clap::Parser;
use facts::Facts;
use fields::{Field, Format};
use gantry_nvml::driver::Driver;
use libloading::Library;
use manual::Manual;

pub use error::Error;

/// The driver.
const DRIVER: &str = "libcuda.so.1";

const MORE: &str = "Examples:
  gantry-smi                                 the devices, and how much of their memory is used
  gantry-smi -L                              their names and UUIDs
  gantry-smi --query-gpu=name,memory.free --format=csv,noheader,nounits -i 0

Exit status: 0, 1 (the driver or the output has failed), 2 (arguments), 6 (-i names no device),
9 (no CUDA driver, or nobody serves it).";

/// Shows the CUDA devices that programs find.
#[derive(Debug, Parser)]
#[command(
    name = "gantry-smi",
    version,
    after_help = MORE,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
pub struct Arguments {
    /// What the program prints about itself.
    #[command(subcommand)]
    pub manual: Option<Manual>,
    /// List the devices with their UUIDs.
    #[arg(short = 'L', long, conflicts_with = "query_gpu")]
    list_gpus: bool,
    /// Print these fields of each device, in the given --format.
    #[arg(
        long,
        value_name = "FIELD,...",
        value_delimiter = ',',
        requires = "format"
    )]
    query_gpu: Vec<Field>,
    /// How to print fields: csv, optionally followed by noheader, nounits or both.
    #[arg(long, value_name = "csv[,noheader][,nounits]", requires = "query_gpu")]
    format: Option<Format>,
    /// Show only these devices: an index as it is printed, a UUID or its beginning, a PCI address, or a part of a
    /// model's name.
    #[arg(short, long, value_name = "ID,...", value_delimiter = ',')]
    id: Vec<Name>,
    /// The folder of libcuda.so.1 (default: where the loader finds it, lib/gantry-cuda beside this program's folder, or
    /// /usr/local/lib/gantry-cuda).
    #[arg(long, value_name = "DIR")]
    libraries: Option<PathBuf>,
}

impl Arguments {
    /// Shows what is requested.
    ///
    /// # Errors
    /// There is no driver or no such device, or the driver or `out` has failed.
    pub fn run(&self, out: &mut dyn io::Write) -> Result<(), Error> {
        let _open = self.open()?;
        Driver::start().map_err(|_| Error::not_started())?;
        let driver = Driver::get().map_err(Error::Driver)?;
        let memory = match &self.query_gpu[..] {
            [] => !self.list_gpus,
            fields => fields.iter().any(|field| field.needs_context()),
        };
        let devices = Facts::all(driver, &self.id, memory)?;
        let text = if let Some(format) = self.format {
            fields::csv(&self.query_gpu, format, &devices)
        } else if self.list_gpus {
            list(&devices)
        } else {
            table::table(driver.version().map_err(Error::Driver)?, &devices)
        };
        out.write_all(text.as_bytes()).map_err(Error::Output)
    }

    /// Opens the driver by its path, for whoever opens it by its name later.
    fn open(&self) -> Result<Library, Error> {
        // SAFETY: opening a driver runs its constructors, which are its own.
        let library = |path: PathBuf| unsafe { Library::new(path) };
        let within = |folder: PathBuf| {
            library(folder.join(DRIVER)).map_err(|source| Error::NoLibrary { folder, source })
        };
        match &self.libraries {
            Some(folder) => within(folder.clone()),
            None => library(DRIVER.into()).or_else(|_| within(cuda_libraries())),
        }
    }
}

/// The format of `nvidia-smi -L`.
fn list(devices: &[Facts]) -> String {
    devices.iter().fold(String::new(), |mut text, one| {
        let Facts {
            index, name, uuid, ..
        } = one;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "GPU {index}: {name} (UUID: {uuid})");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        manual::check::<Arguments>(
            &[
                "",
                "-L",
                "--list-gpus -i 0",
                "-i 0,GPU-12345678,0000:01:00.0",
                "--query-gpu=index,gpu_name,pci.bus_id --format=csv",
                "--query-gpu memory.free --format csv,noheader,nounits --libraries /l",
                "completions bash",
                "man /pages",
            ],
            &[
                "--query-gpu=name",
                "--format=csv",
                "--query-gpu=name --format=xml",
                "--query-gpu=name --format=noheader",
                "--query-gpu=temperature --format=csv",
                "-L --query-gpu=name --format=csv",
                "-i GPU-1",
                "-i 0,,1",
                "-L man",
            ],
        );
        let line = ["gantry-smi", "--query-gpu=serial", "--format=csv"];
        let refused = Arguments::try_parse_from(line).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        let said = refused.to_string();
        assert!(
            said.contains("memory.total") && said.contains("serial"),
            "{said}"
        );
    }

    #[test]
    fn devices_are_listed_as_scripts_expect() {
        let devices = [Facts::example(0), Facts::example(1)];
        assert_eq!(
            list(&devices),
            "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-01020304-0506-0708-090a-0b0c0d0e0f00)\n\
             GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-01020304-0506-0708-090a-0b0c0d0e0f01)\n"
        );
    }
}
