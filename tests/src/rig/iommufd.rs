//! Kernel modules for iommufd, which Debian's kernels are configured without.
//!
//! They are built from Debian's sources of the same version. The kernel that they are loaded into
//! is Debian's as it is: what iommufd needs of it is there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::packages::{self, Cache, Kernel, output, run};

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

/// Programs that this needs, and the Debian packages that have them.
const PROGRAMS: &[(&str, &str)] = &[("xz", "xz-utils"), ("make", "make"), ("gcc-12", "gcc-12")];

/// Builds the modules for a kernel, once. The folder that has them.
pub fn modules(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    packages::install(PROGRAMS)?;
    let headers = cache.headers(&kernel.release)?;
    let sources = cache.made(&format!("iommufd-{}", kernel.release), |work| {
        let package = format!("{PACKAGE}={}", version(&headers)?);
        cache.unpack(&package, work)?;
        let archive = work.join(format!("usr/src/{PACKAGE}.tar.xz"));
        let names = SOURCES.map(|name| format!("{PACKAGE}/{name}"));
        run(Command::new("tar")
            .args(["--strip-components=1", "-xJf"])
            .arg(archive)
            .args(names)
            .current_dir(work))?;
        fs::remove_dir_all(work.join("usr"))?;
        Ok(())
    })?;
    // What has not changed since the last time is not built again.
    for (name, text) in FILES {
        let file = sources.join(name);
        if fs::read_to_string(&file).ok().as_deref() != Some(text) {
            fs::write(file, text)?;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    run(Command::new("make")
        .args(["-s", "modules", &format!("-j{cores}")])
        // Needs the kernel's debug information, which is in no package that is fetched here.
        .arg("CONFIG_DEBUG_INFO_BTF_MODULES=")
        .arg("-C")
        .arg(headers)
        .arg(format!("M={}", sources.display())))?;
    Ok(sources)
}

/// Copies the modules, without what debuggers want: that is nine tenths.
pub fn copy(sources: &Path, to: &Path) -> Result<()> {
    for name in MODULES {
        let file = format!("{name}.ko");
        run(Command::new("strip")
            .args(["--strip-debug", "-o"])
            .arg(to.join(&file))
            .arg(sources.join(&file)))?;
    }
    Ok(())
}

/// Debian's version of the headers in a folder, such as `6.12.117-1~deb12u1`: the sources have the
/// same.
fn version(headers: &Path) -> Result<String> {
    let name = headers.file_name().context("the headers have no name")?;
    let changes = headers.join("../../share/doc").join(name);
    let text = output(Command::new("zcat").arg(changes.join("changelog.Debian.gz")))?;
    let version = text
        .split_once('(')
        .and_then(|(_, rest)| Some(rest.split_once(')')?.0));
    version
        .map(str::to_owned)
        .with_context(|| format!("{} names no version", changes.display()))
}
