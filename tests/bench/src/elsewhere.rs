//! Measures on a machine where nothing can be built or installed, with programs that were built
//! elsewhere.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use gantry_host_tests::shared_device::Programs;

/// Options of benchmarks that use a device of this machine.
#[derive(clap::Args)]
#[group(skip)]
pub struct Elsewhere {
    /// sharing, gpu, crane: use the programs in this directory, as created by `gpu
    /// --pack`; nothing is built or installed.
    #[arg(long, value_name = "FOLDER", requires = "vendors")]
    built: Option<PathBuf>,
    /// sharing, gpu, crane: directory with the .icd file of this machine's driver.
    #[arg(long, value_name = "FOLDER", requires = "built")]
    vendors: Option<PathBuf>,
}

impl Elsewhere {
    /// Returns the programs that were built elsewhere, if they are to be used.
    pub fn programs(&self) -> Option<Programs<'_>> {
        let (built, vendors) = (self.built.as_deref()?, self.vendors.as_deref()?);
        Some(Programs { built, vendors })
    }
}

/// Checks that results can be written to a directory before a long measurement starts. The default
/// directories are in the checkout, which need not exist on this machine.
pub fn takes_results(folder: &Path, option: &str) -> Result<()> {
    let name = || format!("name another place by {option}");
    ensure!(
        folder.is_dir(),
        "there is no folder {}: {}",
        folder.display(),
        name()
    );
    let tried = folder.join(format!(".results-{}", std::process::id()));
    File::create(&tried)
        .and_then(|_| std::fs::remove_file(&tried))
        .with_context(|| format!("cannot write to {}: {}", folder.display(), name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_takes_nothing_is_noticed_first() {
        let here = std::env::temp_dir();
        takes_results(&here, "--pictures").unwrap();
        let error = takes_results(&here.join("nowhere"), "--pictures").unwrap_err();
        assert!(error.to_string().contains("--pictures"), "{error}");
        // Not even root can create files there.
        let error = takes_results(Path::new("/proc/self"), "--output").unwrap_err();
        assert!(error.to_string().contains("--output"), "{error}");
    }
}
