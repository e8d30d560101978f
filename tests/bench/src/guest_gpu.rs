//! CUDA programs in Linux guests, for a machine with an NVIDIA GPU where nothing of this repository can be built.

use std::{
    collections::hash_map::DefaultHasher,
    fs,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use gantry_build::{cargo, programs, progress::Step, root, target};
use gantry_tests::rig::{Cache, packages};

/// The scripts, in the repository.
const SCRIPTS: &str = "remoting/nvidia/machine";
/// The package with the kernel's sources.
const SOURCES: &str = "linux-source-6.1";
/// Programs that are needed, and the Debian packages that contain them.
const NEEDED: &[(&str, &str)] = &[
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("xz", "xz-utils"),
    ("/usr/include/libelf.h", "libelf-dev"),
    ("/usr/sbin/mkfs.xfs", "xfsprogs"),
    ("/bin/busybox", "busybox-static"),
];
/// The packages whose programs and libraries are taken along.
const PACKAGES: &[&str] = &[
    "vmm",
    "remoting-pool",
    "gantry-checkpoint",
    "gantry-nvidia",
    "gantry-native",
    "gantry-cuda-run",
    "gantry-cuda",
    "gantry-opencl",
];
/// What is taken along of them, besides the agent.
const BUILT: &[&str] = &[
    "gantry",
    "gantry-accel",
    "gantry-checkpoint",
    "gantry-nvidia",
    "gantry-cuda",
    "libgantry_nvidia_preload.so",
    "libgantry_cuda.so",
];
/// The most that a pack may take.
const MOST_MIB: u64 = 60;

/// Packs what a machine with a GPU needs, and, without `pack`, runs it on this one.
pub fn bench(pack: bool) -> Result<()> {
    packages::install(NEEDED)?;
    let folder = target().join("guest-gpu");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let binaries = folder.join("binaries");
    fs::create_dir_all(&binaries)?;
    build(&binaries)?;
    kernel(&binaries)?;
    fs::copy("/bin/busybox", binaries.join("busybox"))?;
    formatter(&binaries.join("xfs"))?;
    copy_folder(&root().join(SCRIPTS), &folder.join("machine"))?;
    let size = packages::output(Command::new("du").arg("-sm").arg(&folder))?;
    let size: u64 = size
        .split_whitespace()
        .next()
        .and_then(|size| size.parse().ok())
        .context("du printed no size")?;
    ensure!(
        size <= MOST_MIB,
        "{} takes {size} MiB: at most {MOST_MIB} are meant",
        folder.display()
    );
    let run = "machine/guest/run.py";
    if pack {
        println!(
            "bring {0} ({size} MiB) there, and run FOLDER/{run} FOLDER/binaries RESULTS",
            folder.display()
        );
        return Ok(());
    }
    let results = target().join("guest-gpu-results");
    let mut run = Command::new(folder.join(run));
    packages::run(run.args([&binaries, &results]))?;
    println!("kept in {}", results.display());
    Ok(())
}

/// Builds programs.
fn build(binaries: &Path) -> Result<()> {
    let profile = programs::chosen().profile();
    let step = Step::new(format!(
        "building gantry, workers and the guest's programs ({profile})"
    ));
    packages::run(
        cargo()
            .args(["build", "--profile", profile, "--quiet", "--lib", "--bins"])
            .args(PACKAGES.iter().flat_map(|name| ["--package", name])),
    )?;
    let built = target().join(profile);
    let agent = programs::agent(&built.join("libgantry_opencl.so"))?;
    step.finish();
    for path in BUILT.iter().map(|name| built.join(name)).chain([agent]) {
        gantry_build::pack(&path, &binaries.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

/// The guests' kernel, which is kept.
fn kernel(binaries: &Path) -> Result<()> {
    let scripts = root().join(SCRIPTS).join("guest");
    let mut recipe = DefaultHasher::new();
    for name in ["kernel.config", "kernel.patch", "make-kernel.sh"] {
        fs::read(scripts.join(name))?.hash(&mut recipe);
    }
    let cache = Cache::open()?;
    let sources = cache.unpacked(SOURCES)?;
    let tarball = sources.join(format!("usr/src/{SOURCES}.tar.xz"));
    let name = format!("guest-gpu-kernel-{:016x}", recipe.finish());
    let step = Step::new("building the guests' kernel, unless it was built before");
    let kept = cache.made(&name, |work| {
        let mut make = Command::new(scripts.join("make-kernel.sh"));
        packages::run(make.arg(&tarball).arg(work))
    })?;
    step.finish();
    for name in ["vmlinux.xz", "System.map.xz", "kernel.txt"] {
        fs::copy(kept.join(name), binaries.join(name))?;
    }
    Ok(())
}

/// `mkfs.xfs` with its libraries, but for the C library.
fn formatter(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let program = Path::new("/usr/sbin/mkfs.xfs");
    let libraries = packages::output(Command::new("ldd").arg(program))?;
    let libraries = libraries.lines().filter_map(|line| {
        let path = line.split_once("=> ")?.1.split_whitespace().next()?;
        (!path.contains("/libc.so")).then(|| PathBuf::from(path))
    });
    for path in libraries.chain([program.to_owned()]) {
        fs::copy(&path, folder.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    packages::run(Command::new("cp").arg("-r").arg(from).arg(to))
}
