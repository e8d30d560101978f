//! NVIDIA's compiler NVRTC, from its Python package. It needs no GPU, is used only where it was
//! downloaded, and never becomes part of this repository.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{packages::Cache, python, root_fs};

/// The package, in the version that compiled the committed kernels.
const PACKAGE: (&str, &str) = ("nvidia-cuda-nvrtc", "13.0.88");

/// The compiler's library in that folder.
pub const LIBRARY: &str = "libnvrtc.so.13";
/// A library that the compiler opens by name.
const BUILTINS: &str = "libnvrtc-builtins.so.13.0";

const RUNTIME: &str = "libstdc++.so.6";

/// The disk's serial number in L1.
pub const SERIAL: &str = "nvrtc";
/// File in L1 with the reason why there is no such disk.
pub const MISSING: &str = "/images/nvrtc-missing";
/// Size of the disk in bytes.
const DISK: u64 = 160 << 20;

/// The folder with [`LIBRARY`], which is fetched once.
///
/// # Errors
/// The package cannot be fetched.
pub fn folder(cache: &Cache) -> Result<PathBuf> {
    let (package, version) = PACKAGE;
    let kept = cache.made(&format!("{package}-{version}"), |work| {
        python::install(&["--no-deps", &format!("{package}=={version}")], work)
    })?;
    Ok(kept.join("nvidia/cu13/lib"))
}

/// A disk image with the compiler from its folder, which is created once.
pub fn disk(folder: &Path, work: &Path) -> Result<PathBuf> {
    let image = work.join(format!("nvrtc-{}.img", PACKAGE.1));
    if image.exists() {
        return Ok(image);
    }
    let root = work.join("nvrtc");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    fs::create_dir_all(&root)?;
    for file in [LIBRARY, BUILTINS] {
        fs::copy(folder.join(file), root.join(file))?;
    }
    // The compiler is written in C++, unlike everything else that guests contain.
    let runtime = Path::new("/lib/x86_64-linux-gnu").join(RUNTIME);
    fs::copy(runtime, root.join(RUNTIME)).context("the C++ library is missing")?;
    root_fs::file_system(&root, DISK, &image)?;
    Ok(image)
}
