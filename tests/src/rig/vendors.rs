//! Kernel modules for L1 that give devices to VFIO in other ways than vfio-pci.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::packages::{self, Cache, Kernel};

/// The modules in load order: a variant of vfio-pci, mediated devices, and the kernel's sample of
/// such a device.
pub const MODULES: &[&str] = &["vendors-vfio", "mdev", "mtty"];

/// The Debian package with the sources.
const PACKAGE: &str = "linux-source-6.1";

/// The required part of the sources.
const SOURCES: [&str; 2] = ["drivers/vfio/mdev", "samples/vfio-mdev/mtty.c"];

/// What is built in addition, and the build file.
const FILES: [(&str, &str); 2] = [
    ("Kbuild", include_str!("vendors/Kbuild")),
    ("vendors.c", include_str!("vendors/vendors.c")),
];

/// Builds the modules for a kernel, once. Returns their directory.
pub fn modules(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    packages::install(packages::FOR_MODULES)?;
    let headers = cache.headers(&kernel.release)?;
    let sources = cache.made(&format!("vendors-vfio-{}", kernel.release), |work| {
        cache.unpack_sources(PACKAGE, &SOURCES, &headers, work)
    })?;
    packages::build_modules(&sources, &FILES, &headers)?;
    Ok(sources)
}

/// Copies the modules without debug information.
pub fn copy(sources: &Path, to: &Path) -> Result<()> {
    packages::copy_modules(sources, MODULES, to)
}
