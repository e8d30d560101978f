//! Measuring on a machine where nothing can be built or installed, with what was built elsewhere.

use std::path::PathBuf;

use crate::shared_device::Programs;

/// Options of benchmarks that use a device of this machine.
#[derive(clap::Args)]
#[group(skip)]
pub struct Elsewhere {
    /// sharing, programs: a folder with what was built elsewhere (gantry-accel, gantry-arbiter,
    /// libgantry_opencl.so, examples/opencl_turns); nothing is built or installed then.
    #[arg(long, value_name = "FOLDER", requires = "vendors")]
    built: Option<PathBuf>,
    /// sharing, programs: the folder with the .icd file of this machine's driver.
    #[arg(long, value_name = "FOLDER", requires = "built")]
    vendors: Option<PathBuf>,
}

impl Elsewhere {
    /// What was built elsewhere, if that is to be used.
    pub fn programs(&self) -> Option<Programs<'_>> {
        let (built, vendors) = (self.built.as_deref()?, self.vendors.as_deref()?);
        Some(Programs { built, vendors })
    }
}
