//! edk2's firmware for Cloud Hypervisor's machine, from Debian's source.

use std::{fs, path::PathBuf, process::Command, thread};

use anyhow::{Context, Result};
use gantry_tests::rig::{Cache, packages};

use gantry_build::progress::Step;

/// Programs that the build needs, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[
    ("nasm", "nasm"),
    ("iasl", "acpica-tools"),
    ("make", "make"),
    ("gcc", "gcc"),
    ("g++", "g++"),
    ("patch", "patch"),
    ("xz", "xz-utils"),
    ("/usr/bin/python3", "python3"),
    ("/usr/include/uuid/uuid.h", "uuid-dev"),
];

/// Paths in Debian's archive and SHA-256 of the source, and of Debian's patches.
const SOURCES: [(&str, &str); 2] = [
    (
        "pool/main/e/edk2/edk2_2022.11.orig.tar.xz",
        "64257dd8a2778c969b8a869cd3b6eda2db2a346bfcf24dc729859745968f1fd6",
    ),
    (
        "pool/main/e/edk2/edk2_2022.11-6+deb12u2.debian.tar.xz",
        "a1d848115ae9b140e64d3ab34f7c08210b665bee473e3242a6801c163678780e",
    ),
];

/// Its name in the cache, which differs for each way to build it.
const KEPT_AS: &str = "edk2-cloudhv-2022.11-6+deb12u2-b";

/// The firmware.
const FILE: &str = "CLOUDHV.fd";

/// Where the build leaves it.
const BUILT: &str = "Build/CloudHvX64/RELEASE_GCC5/FV/CLOUDHV.fd";

/// Builds it, without network drivers: it boots from disks. One of Debian's patches takes the shell away, and needs Secure
/// Boot, which this target has no keys for. The handler of exceptions does not write CR8: edk2 does not use the priority there,
/// and QEMU 7.2, which emulates the host in the scenario, aborts if a nested guest writes it while an interrupt is pending.
const BUILD: &str = "for patch in $(grep -v Disable-the-Shell debian/patches/series); do patch -s -p1 < debian/patches/$patch; done
sed -i '/mov  *cr8, *rax/d' UefiCpuPkg/Library/CpuExceptionHandlerLib/X64/*ExceptionHandlerAsm.nasm
. ./edksetup.sh
make -s -j$JOBS -C BaseTools ARCH=X64
exec build -q -s -n $JOBS -a X64 -t GCC5 -b RELEASE -D NETWORK_ENABLE=FALSE -p OvmfPkg/CloudHv/CloudHvX64.dsc";

/// The firmware, which is built once.
///
/// # Errors
/// Its source cannot be fetched, or it cannot be built.
pub fn firmware(cache: &Cache) -> Result<PathBuf> {
    let kept = cache.made(KEPT_AS, |work| {
        packages::install(PROGRAMS)?;
        let step = Step::new("building edk2 for Cloud Hypervisor's machine (once)");
        let (source, archive) = (work.join("source"), work.join("archive"));
        fs::create_dir(&source)?;
        for (from, parts) in SOURCES.into_iter().zip(["1", "0"]) {
            cache.fetch(from, &archive)?;
            let mut unpack = Command::new("tar");
            unpack.arg(format!("--strip-components={parts}"));
            packages::run(unpack.arg("-xJf").arg(&archive).current_dir(&source))?;
            fs::remove_file(&archive)?;
        }
        let jobs = thread::available_parallelism().map_or(1, usize::from);
        let mut build = Command::new("bash");
        build
            .args(["-ec", BUILD])
            .env("JOBS", jobs.to_string())
            .env("PYTHON_COMMAND", "/usr/bin/python3")
            .current_dir(&source);
        for variable in ["WORKSPACE", "EDK_TOOLS_PATH", "CONF_PATH", "PACKAGES_PATH"] {
            build.env_remove(variable);
        }
        packages::run(&mut build).context("edk2 cannot be built")?;
        fs::copy(source.join(BUILT), work.join(FILE))?;
        fs::remove_dir_all(source)?;
        step.finish();
        Ok(())
    })?;
    Ok(kept.join(FILE))
}
