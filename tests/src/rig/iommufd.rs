//! Kernel modules for iommufd, which Debian's kernels are configured without.
//!
//! They are built from Debian's sources of the same version. The kernel that they are loaded into
//! is Debian's as it is: what iommufd needs of it is there.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::packages::{self, Cache, Kernel};

/// The modules, in the order in which they are loaded.
pub const MODULES: &[&str] = &[
    "iommufd",
    "vfio",
    "vfio_iommu_type1",
    "vfio-pci-core",
    "vfio-pci",
];

/// What Debian has the sources in.
const PACKAGE: &str = "linux-source-6.12";

/// Which of the sources are needed.
const SOURCES: [&str; 3] = ["drivers/iommu", "drivers/vfio", "lib/interval_tree.c"];

/// How they are built.
const FILES: [(&str, &str); 2] = [
    ("Kbuild", include_str!("iommufd/Kbuild")),
    ("spans.c", include_str!("iommufd/spans.c")),
];

/// Builds the modules for a kernel, once. The folder that has them.
pub fn modules(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    packages::install(packages::FOR_MODULES)?;
    let headers = cache.headers(&kernel.release)?;
    let sources = cache.made(&format!("iommufd-{}", kernel.release), |work| {
        cache.unpack_sources(PACKAGE, &SOURCES, &headers, work)
    })?;
    packages::build_modules(&sources, &FILES, &headers)?;
    Ok(sources)
}

/// Copies the modules, without what debuggers want: that is nine tenths.
pub fn copy(sources: &Path, to: &Path) -> Result<()> {
    packages::copy_modules(sources, MODULES, to)
}
