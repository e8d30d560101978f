//! OpenCL in the rig: PoCL on a disk for L1, and the files of a guest that uses it.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::{
    packages::{self, output, run},
    root_fs::{self, pack, program},
};
use crate::net::HOST;

/// What is copied from this machine, and the Debian packages that contain it.
pub const NEEDED: &[(&str, &str)] = &[
    ("/usr/lib/x86_64-linux-gnu/libpocl.so.2", "libpocl2"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    ("clinfo", "clinfo"),
    ("/usr/sbin/mke2fs", "e2fsprogs"),
    // PoCL links kernels like any other program.
    ("ld", "binutils"),
    ("/usr/lib/x86_64-linux-gnu/libc.so", "libc6-dev"),
    ("/usr/lib/gcc/x86_64-linux-gnu", "libgcc-12-dev"),
    (PIGLIT, "piglit"),
    ("openssl", "openssl"),
];

/// Size of the disk in bytes: what is copied, and some spare space.
const DISK: u64 = 512 << 20;

const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Folder of piglit, here and on the disk.
pub const PIGLIT: &str = "/usr/lib/x86_64-linux-gnu/piglit";

/// The piglit programs that are included.
pub const PIGLIT_TESTS: &[&str] = &[
    "cl-api-get-platform-info",
    "cl-api-get-device-ids",
    "cl-api-create-context",
    "cl-api-create-buffer",
    "cl-api-enqueue-copy-buffer-rect",
    "cl-api-enqueue-map-buffer",
    "cl-custom-run-simple-kernel",
];

/// Those that mostly build programs, which takes an emulated CPU up to a minute and a half for
/// each.
pub const PIGLIT_BUILDS: &[&str] = &["cl-api-set-kernel-arg", "cl-api-build-program"];

/// What is built for guests and hosts with accelerators.
pub struct Programs {
    /// The worker pool.
    pub pool: PathBuf,
    /// The arbiter, which shares its device by weight.
    pub arbiter: PathBuf,
    /// The guest's agent, which embeds the driver.
    pub agent: PathBuf,
    /// A program that computes, checks its results, and prints figures.
    pub example: PathBuf,
    /// A program whose device follows pointers that the host has written.
    pub shared: PathBuf,
    /// A program that only holds a context.
    pub idle: PathBuf,
    /// A program that computes until it is told to stop, and checks its results.
    pub moving: PathBuf,
    /// A program that keeps the device busy with kernels of several lengths.
    pub turns: PathBuf,
    /// A program that breaks the rules.
    pub hostile: PathBuf,
    /// CUDA in a guest and in a worker.
    pub cuda: Cuda,
}

/// What guests that compute with CUDA need, and their host.
pub struct Cuda {
    /// The guest's driver.
    pub driver: PathBuf,
    /// Programs that compute, and check their results.
    pub programs: PathBuf,
    /// A stand-in for the host's driver that needs no GPU.
    pub stand_in: PathBuf,
}

/// A disk image with everything that PoCL needs, and third-party programs. It is created only once,
/// because it contains nothing of this repository.
pub fn disk(work: &Path) -> Result<PathBuf> {
    packages::install(NEEDED)?;
    let archive = work.join("pocl-and-programs.img");
    if archive.exists() {
        return Ok(archive);
    }
    let root = work.join("pocl");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    for folder in [
        "usr/bin",
        "usr/lib64",
        "etc/OpenCL/vendors",
        "tmp",
        "run",
        "proc",
        "sys",
        "dev",
    ] {
        fs::create_dir_all(root.join(folder))?;
    }
    for (link, to) in [
        ("lib", "usr/lib"),
        ("lib64", "usr/lib64"),
        ("bin", "usr/bin"),
    ] {
        fs::create_dir_all(root.join(to))?;
        symlink(to, root.join(link))?;
    }
    fs::create_dir_all(root.join(&LIBRARIES[1..]).join("pocl"))?;
    for tool in ["usr/bin/ld", "usr/bin/clinfo"] {
        program(&Path::new("/").join(tool), &root, tool)?;
    }
    let drivers = [
        "libpocl.so.2",
        "libOpenCL.so.1",
        "pocl/libpocl-devices-basic.so",
        "pocl/libpocl-devices-pthread.so",
    ];
    for file in drivers {
        let path = format!("{LIBRARIES}/{file}");
        program(Path::new(&path), &root, &path[1..])?;
    }
    fs::write(root.join("etc/OpenCL/vendors/pocl.icd"), "libpocl.so.2\n")?;
    fs::create_dir_all(root.join(&PIGLIT[1..]).join("bin"))?;
    for test in PIGLIT_TESTS.iter().chain(PIGLIT_BUILDS) {
        let path = format!("{PIGLIT}/bin/{test}");
        program(Path::new(&path), &root, &path[1..])?;
    }
    for file in [
        "libc.so",
        "libm.so",
        "libc_nonshared.a",
        "libmvec.so.1",
        "libm.so.6",
    ] {
        copy(&root, &format!("{LIBRARIES}/{file}"))?;
    }
    let compiler = "/usr/lib/gcc/x86_64-linux-gnu";
    for version in fs::read_dir(compiler)?.filter_map(Result::ok) {
        for file in [
            "libgcc.a",
            "libgcc_s.so",
            "crtbegin.o",
            "crtend.o",
            "crtbeginS.o",
            "crtendS.o",
        ] {
            let path = version.path().join(file);
            if let (true, Some(path)) = (path.exists(), path.to_str()) {
                copy(&root, path)?;
            }
        }
    }
    run(Command::new("cp").args(["-a", "/usr/share/pocl"]).arg({
        let share = root.join("usr/share");
        fs::create_dir_all(&share)?;
        share
    }))?;
    root_fs::file_system(&root, DISK, &archive)?;
    Ok(archive)
}

fn copy(root: &Path, path: &str) -> Result<()> {
    let target = root.join(path.trim_start_matches('/'));
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::copy(path, target).with_context(|| format!("cannot copy {path}"))?;
    Ok(())
}

/// What a guest with an accelerator has in addition to L2's other files: the loader and programs,
/// and of Gantry only the agent's file, which has yet to install the rest.
pub fn guest(programs: &Programs, work: &Path) -> Result<PathBuf> {
    packages::install(NEEDED)?;
    let root = work.join("l2-opencl");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    for folder in ["bin", "lib/x86_64-linux-gnu", "run"] {
        fs::create_dir_all(root.join(folder))?;
    }
    let linked = output(Command::new("ldd").arg(&programs.agent)).unwrap_or_default();
    ensure!(
        !linked.contains("=>"),
        "the agent needs shared objects:\n{linked}"
    );
    program(&programs.agent, &root, "bin/gantry-agent")?;
    program(&programs.example, &root, "bin/opencl-figures")?;
    program(&programs.shared, &root, "bin/opencl-shared")?;
    program(&programs.idle, &root, "bin/opencl-idle")?;
    program(&programs.moving, &root, "bin/opencl-moving")?;
    program(&programs.turns, &root, "bin/opencl-turns")?;
    program(&programs.hostile, &root, "bin/opencl-hostile")?;
    program(Path::new("/usr/bin/clinfo"), &root, "bin/clinfo")?;
    program(&programs.cuda.programs, &root, "bin/cuda-programs")?;
    let cuda = "lib/x86_64-linux-gnu/libcuda.so.1";
    program(&programs.cuda.driver, &root, cuda)?;
    let library = "lib/x86_64-linux-gnu/libOpenCL.so.1";
    program(&Path::new("/usr").join(library), &root, library)?;
    // For NVIDIA's compiler, which a guest gets from a disk.
    for library in ["libpthread.so.0", "libdl.so.2", "libm.so.6", "librt.so.1"] {
        copy(&root, &format!("/lib/x86_64-linux-gnu/{library}"))?;
    }
    let keys = keys(work)?;
    fs::create_dir_all(root.join("keys"))?;
    for file in ["ca.pem", "guest.pem", "guest.key"] {
        fs::copy(keys.join(file), root.join("keys").join(file))?;
    }
    let archive = work.join("l2-opencl.cpio");
    pack(&root, &archive)?;
    Ok(archive)
}

/// Creates keys and certificates for L1 (by its address) and for a guest.
fn keys(work: &Path) -> Result<PathBuf> {
    let folder = work.join("keys");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../remoting/certificates.sh");
    let mut make = Command::new("sh");
    make.arg(script).arg(&folder).args([HOST, "guest"]);
    run(&mut make)?;
    Ok(folder)
}

/// Copies what a pool in L1 shows to applications of other machines, and the authority that it
/// trusts.
pub fn host_keys(work: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for file in [
        format!("{HOST}.pem"),
        format!("{HOST}.key"),
        "ca.pem".to_owned(),
    ] {
        fs::copy(work.join("keys").join(&file), to.join(file))?;
    }
    Ok(())
}
