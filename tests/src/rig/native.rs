//! Native contexts in the rig: device files for L1, and the files of a guest whose programs use them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

use super::{
    images::{pack, program},
    packages::{self, Cache, Kernel},
};

/// The module that L1 loads for the device files.
pub const MODULE: &str = "native-pages";
/// The worker in L1.
pub const WORKER: &str = "/bin/nvidia-stand-in";

const FILES: [(&str, &str); 2] = [
    ("Kbuild", include_str!("native/Kbuild")),
    ("native-pages.c", include_str!("native/native-pages.c")),
];

/// What is built for guests and hosts with native contexts.
pub struct Programs {
    /// The worker, on a stand-in for the driver.
    pub worker: PathBuf,
    /// The library that takes a guest's programs to it.
    pub library: PathBuf,
    /// Programs that use device files, and check what they see.
    pub programs: PathBuf,
}

/// Adds the worker to L1, and the module, which is built for L1's kernel.
pub fn host(programs: &Programs, cache: &Cache, kernel: &Kernel, root: &Path) -> Result<()> {
    packages::install(packages::FOR_MODULES)?;
    let headers = cache.headers(&kernel.release)?;
    let sources = cache.made(&format!("{MODULE}-{}", kernel.release), |_| Ok(()))?;
    packages::build_modules(&sources, &FILES, &headers)?;
    packages::copy_modules(&sources, &[MODULE], &root.join("modules"))?;
    program(&programs.worker, root, &WORKER[1..])
}

/// What a guest has in addition to the files of one with an accelerator.
pub fn guest(programs: &Programs, work: &Path) -> Result<PathBuf> {
    let root = work.join("l2-native");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    for folder in ["bin", "lib"] {
        fs::create_dir_all(root.join(folder))?;
    }
    program(&programs.programs, &root, "bin/native-programs")?;
    program(&programs.library, &root, "lib/libgantry_nvidia_preload.so")?;
    let archive = work.join("l2-native.cpio");
    pack(&root, &archive)?;
    Ok(archive)
}
