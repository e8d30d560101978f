//! Kernel modules for L1 that give devices to VFIO in other ways than vfio-pci does.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::packages::{self, Cache, Kernel};

/// The modules, in the order in which they are loaded: a variant of vfio-pci, mediated devices, and
/// the kernel's sample of such devices.
pub const MODULES: &[&str] = &["vendors-vfio", "mdev", "mtty"];

/// What Debian has the sources in.
const PACKAGE: &str = "linux-source-6.1";

/// Which of the sources are needed.
const SOURCES: [&str; 2] = ["drivers/vfio/mdev", "samples/vfio-mdev/mtty.c"];

/// What is built beside them, and how.
const FILES: [(&str, &str); 2] = [
    ("Kbuild", include_str!("vendors/Kbuild")),
    ("vendors.c", include_str!("vendors/vendors.c")),
];

/// Builds the modules for a kernel, once. The folder that has them.
pub fn modules(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    packages::install(packages::FOR_MODULES)?;
    let headers = cache.headers(&kernel.release)?;
    let sources = cache.made(&format!("vendors-vfio-{}", kernel.release), |work| {
        cache.unpack_sources(PACKAGE, &SOURCES, &headers, work)
    })?;
    packages::build_modules(&sources, &FILES, &headers)?;
    Ok(sources)
}

/// Copies the modules, without what debuggers want.
pub fn copy(sources: &Path, to: &Path) -> Result<()> {
    packages::copy_modules(sources, MODULES, to)
}
