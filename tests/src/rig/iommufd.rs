//! Kernel modules for iommufd, which Debian's kernels are configured without.
//!
//! They are built from Debian's sources of the same version. The kernel that loads them is Debian's
//! unmodified kernel, which has everything that iommufd needs.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::packages::{self, Cache, Kernel};

/// The modules in load order.
pub const MODULES: &[&str] = &[
    "iommufd",
    "vfio",
    "vfio_iommu_type1",
    "vfio-pci-core",
    "vfio-pci",
];

/// The Debian package with the sources.
const PACKAGE: &str = "linux-source-6.12";

/// The required part of the sources.
const SOURCES: [&str; 3] = ["drivers/iommu", "drivers/vfio", "lib/interval_tree.c"];

/// The build files.
const FILES: [(&str, &str); 2] = [
    ("Kbuild", include_str!("iommufd/Kbuild")),
    ("spans.c", include_str!("iommufd/spans.c")),
];

/// Builds the modules for a kernel, once. Returns their directory.
pub fn modules(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    packages::install(packages::FOR_MODULES)?;
    let headers = cache.headers(&kernel.release)?;
    let sources = cache.made(&format!("iommufd-{}", kernel.release), |work| {
        cache.unpack_sources(PACKAGE, &SOURCES, &headers, work)
    })?;
    packages::build_modules(&sources, &FILES, &headers)?;
    Ok(sources)
}

/// Copies the modules without debug information, which is nine tenths of their size.
pub fn copy(sources: &Path, to: &Path) -> Result<()> {
    packages::copy_modules(sources, MODULES, to)
}
