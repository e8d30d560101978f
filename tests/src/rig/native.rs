//! Native contexts in the rig: device files for L1, and the files of a guest whose programs use them and are suspended.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use super::{
    packages::{self, Cache, Kernel},
    root_fs::{pack, program},
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
    /// What suspends and resumes them.
    pub checkpoint: PathBuf,
}

/// Libraries in place of the driver's, by their names, and what NVML says of its only device: UUID, free and used bytes.
const LIBRARIES: [(&str, &str); 2] = [
    ("libcuda.so.1", include_str!("native/libcuda.c")),
    (
        "libnvidia-ml.so.1",
        include_str!("../../../guest/checkpoint/tests/libnvidia-ml.c"),
    ),
];
const GPU: &str = "GPU-00000000-0000-0000-0000-00000000000a 1073741824 1048576\n";
/// Where all of that is in the guest, which has another `libcuda.so.1` where libraries are.
pub const STAND_IN: &str = "/lib/stand-in";

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
    let preloaded = "usr/local/lib/gantry-cuda";
    for folder in ["bin", "lib", preloaded, &STAND_IN[1..]] {
        fs::create_dir_all(root.join(folder))?;
    }
    program(&programs.programs, &root, "bin/native-programs")?;
    let library = format!("{preloaded}/libgantry_nvidia_preload.so");
    program(&programs.library, &root, &library)?;
    program(&programs.checkpoint, &root, "bin/gantry-checkpoint")?;
    let stand_in = root.join(&STAND_IN[1..]);
    fs::write(stand_in.join("gpu"), GPU)?;
    for (name, text) in LIBRARIES {
        let source = work.join(format!("{name}.c"));
        fs::write(&source, text)?;
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-w", "-o"]);
        packages::run(compile.arg(stand_in.join(name)).arg(&source))?;
    }
    let archive = work.join("l2-native.cpio");
    pack(&root, &archive)?;
    Ok(archive)
}
