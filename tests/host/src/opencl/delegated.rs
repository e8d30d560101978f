//! Workers that run when applications delegate to them, and that use the applications' CPUs.

use std::{
    fs,
    io::Read,
    os::unix::{fs::symlink, net::UnixStream},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use gantry_tests::rig::packages;

use super::{
    natively::{clinfo, late, piglit, pyopencl},
    pool::{Pool, Way},
    streams::finds_nothing,
    workers::confined,
};
use crate::shared_device::PATIENCE;

/// By messages, as this machine has no exitless gate. The driver's threads have everything that
/// they need.
pub fn run(pool: &Pool) -> Result<()> {
    let passive = Pool::start(Way::Delegated, "passive", pool.release.clone(), &[])?;
    clinfo(&passive)?;
    late(&passive)?;
    pyopencl(&passive)?;
    piglit(&passive)?;
    full(&passive)?;
    let own = Pool::start(Way::Delegated, "own", pool.release.clone(), &["--own-cpu"])?;
    clinfo(&own)?;
    pyopencl(&own)?;
    // An application that requests a real gate is told why there is none.
    let asked = pool
        .remoted("clinfo")
        .arg("-l")
        .env("GANTRY_OPENCL", "gate")
        .output()?;
    let said = String::from_utf8_lossy(&asked.stderr);
    ensure!(
        said.contains("not through the gate: ") && said.contains("--accel transport=gate"),
        "{said}"
    );
    Ok(())
}

/// A driver that is neither in the usual place nor where a variable points is readable only if the
/// option allows it.
pub fn elsewhere(pool: &Pool) -> Result<()> {
    const USUAL: &str = "/usr/lib/x86_64-linux-gnu";
    let (vendors, folder) = (pool.folder("vendors-elsewhere")?, pool.folder("elsewhere")?);
    // PoCL finds its parts relative to its own location.
    let (library, share) = (folder.join("lib/all"), folder.join("share"));
    fs::create_dir_all(&library)?;
    fs::create_dir_all(&share)?;
    symlink(Path::new(USUAL).join("pocl"), library.join("pocl"))?;
    symlink("/usr/share/pocl", share.join("pocl"))?;
    let named = fs::read_to_string("/etc/OpenCL/vendors/pocl.icd")?;
    let copy = library.join("libelsewhere.so");
    fs::copy(Path::new(USUAL).join(named.trim()), &copy)?;
    fs::write(vendors.join("pocl.icd"), format!("{}\n", copy.display()))?;
    let readable = folder.display().to_string();
    let start = |name, options: &[&str]| {
        let release = pool.release.clone();
        Pool::before(vendors.clone(), Way::Delegated, name, release, options)
    };
    let without = start("unreadable", &["--own-cpu"])?;
    finds_nothing(without.remoted("clinfo"), "")?;
    let with = start("readable", &["--own-cpu", "--readable", &readable])?;
    clinfo(&with)?;
    pyopencl(&with)
}

/// If an application's process cannot be watched, the application is not served, its process does
/// not stay, and the next application is served.
pub fn unwatched(pool: &Pool) -> Result<()> {
    const STRACE: [&str; 7] = [
        "strace",
        "-D",
        "-f",
        "-qq",
        "-etrace=pidfd_open",
        "-einject=pidfd_open:error=ENFILE:when=1",
        "-o/dev/null",
    ];
    let release = pool.release.clone();
    let mut pool = Pool::under(
        &STRACE,
        Way::Delegated,
        "unwatched",
        release,
        &["--own-cpu"],
    )?;
    finds_nothing(pool.remoted("clinfo"), "")?;
    // The application is told first.
    let until = Instant::now() + PATIENCE;
    let refused = "an application is not served: cannot start a process for an application";
    while !pool.log()?.contains(refused) {
        ensure!(Instant::now() < until, "the server says {:?}", pool.log()?);
        thread::sleep(Duration::from_millis(20));
    }
    let left = pool.workers()?;
    ensure!(left.is_empty(), "{left:?} are left");
    ensure!(pool.runs()?, "the server has ended: {}", pool.log()?);
    packages::run(pool.remoted("clinfo").arg("-l"))
}

/// This many applications get a confined process each, and one more gets none. Neither this nor a
/// process that cannot be started ends the server.
fn full(passive: &Pool) -> Result<()> {
    const MOST: usize = 16;
    let connect = || UnixStream::connect(passive.folder.join("socket"));
    // The first byte comes with the shared memory.
    let served = |mut stream: &UnixStream| stream.read(&mut [0]).is_ok_and(|read| read == 1);
    let until = Instant::now() + PATIENCE;
    let mut streams = Vec::new();
    while streams.len() < MOST {
        let stream = connect()?;
        if served(&stream) {
            streams.push(stream);
        }
        // Earlier applications take a moment to end.
        ensure!(Instant::now() < until, "{} are served only", streams.len());
    }
    ensure!(!served(&connect()?), "one more than {MOST} is served");
    streams.truncate(1);
    while passive.workers()?.len() > 1 {
        ensure!(Instant::now() < until, "who serves nobody has not ended");
        thread::sleep(Duration::from_millis(20));
    }
    confined(passive)?;
    let cache = PathBuf::from(format!("/tmp/gantry-accel-{}", passive.id()));
    let away = cache.with_extension("away");
    fs::rename(&cache, &away)?;
    ensure!(!served(&connect()?), "one is served without a folder");
    fs::rename(&away, &cache)?;
    packages::run(passive.remoted("clinfo").arg("-l"))
}
