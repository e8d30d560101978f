//! The kernel module, built for the kernels that it is made for.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use gantry_tests::{
    report::Outcome,
    rig::{
        Cache,
        packages::{self, Kernel},
    },
};

use super::Check;
use crate::{
    programs::{root, target},
    progress::Step,
};

/// A module that was built.
pub struct Module {
    /// The kernel that it is for.
    pub kernel: Kernel,
    /// The file.
    pub file: PathBuf,
}

/// Builds it for Debian's kernel and for the newer one of its backports.
///
/// # Errors
/// Headers cannot be fetched.
pub fn build(cache: &Cache) -> Result<(Vec<Check>, Vec<Module>)> {
    let step = Step::new("fetching Debian's kernels and headers, and building the gate's module");
    let newer = cache.release_of("linux-image-6.12-cloud-amd64")?;
    let mut checks = Vec::new();
    let mut modules = Vec::new();
    for kernel in [cache.kernel()?, cache.kernel_of(&newer)?] {
        let name = format!("gate: the kernel module builds for {}", kernel.release);
        let work = target().join("gate-module").join(&kernel.release);
        let headers = cache.headers(&kernel.release)?;
        let outcome = match make(&headers, &work) {
            Ok(file) => {
                modules.push(Module { kernel, file });
                Outcome::Passed
            }
            Err(error) => Outcome::Failed(vec![format!("{error:#}")]),
        };
        checks.push((name, outcome));
    }
    step.finish();
    Ok((checks, modules))
}

/// Builds in a copy, as the kernel's build writes beside the sources. What did not change since the
/// last time is not built again.
fn make(headers: &Path, work: &Path) -> Result<PathBuf> {
    fs::create_dir_all(work)?;
    for file in fs::read_dir(root().join("vmfunc-gate/module"))? {
        let from = file?.path();
        let Some(to) = from.file_name().map(|name| work.join(name)) else {
            continue;
        };
        if fs::read(&to).ok() != Some(fs::read(&from)?) {
            fs::copy(&from, to)?;
        }
    }
    packages::run(
        Command::new("make")
            .args(["-s", "modules", "KCFLAGS=-Werror"])
            // Needs the kernel's debug information, which is in no package that is fetched here.
            .arg("CONFIG_DEBUG_INFO_BTF_MODULES=")
            .arg("-C")
            .arg(headers)
            .arg(format!("M={}", work.display())),
    )?;
    let file = work.join("gantry_gate.ko");
    // What debuggers want is ten times the rest.
    packages::run(Command::new("strip").arg("--strip-debug").arg(&file))?;
    Ok(file)
}
