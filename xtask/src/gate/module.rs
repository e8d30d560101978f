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

/// What it is made for: Debian's kernel, and the newer one of its backports.
pub const VERSIONS: [&str; 2] = ["6.1", "6.12"];

/// Builds it for one of the versions.
///
/// # Errors
/// Headers cannot be fetched.
pub fn build(cache: &Cache, version: &str) -> Result<(Check, Option<Module>)> {
    let step = Step::new("fetching a kernel with its headers, and building the gate's module");
    let kernel = if version == VERSIONS[0] {
        cache.kernel()?
    } else {
        cache.kernel_of(&cache.release_of(&format!("linux-image-{version}-cloud-amd64"))?)?
    };
    let name = format!("gate: the kernel module builds for {}", kernel.release);
    let work = target().join("gate-module").join(&kernel.release);
    let headers = cache.headers(&kernel.release)?;
    let (outcome, module) = match make(&headers, &work) {
        Ok(file) => (Outcome::Passed, Some(Module { kernel, file })),
        Err(error) => (Outcome::Failed(vec![format!("{error:#}")]), None),
    };
    step.finish();
    Ok(((name, outcome), module))
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
