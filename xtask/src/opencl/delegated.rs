//! Workers that run when applications delegate to them, and lend them their CPUs.

use std::{
    fs,
    io::Read,
    os::unix::net::UnixStream,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use gantry_tests::rig::packages;

use super::{
    natively::{clinfo, late, piglit, pyopencl},
    pool::{Pool, Way},
    workers::confined,
};

/// By messages, as this machine has no exitless gate; whatever the driver's threads need, they have.
pub fn run(pool: &Pool) -> Result<()> {
    let lent = Pool::start(Way::Delegated, "lent", pool.release.clone(), &[])?;
    clinfo(&lent)?;
    late(&lent)?;
    pyopencl(&lent)?;
    piglit(&lent)?;
    crowded(&lent)?;
    let own = Pool::start(Way::Delegated, "own", pool.release.clone(), &["--own-cpu"])?;
    clinfo(&own)?;
    pyopencl(&own)?;
    // Who asks for a real gate hears why there is none.
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

/// So many applications get a confined process each, one more gets none, and neither ends the
/// server; nor does a process that cannot be started.
fn crowded(lent: &Pool) -> Result<()> {
    const MOST: usize = 16;
    let connect = || UnixStream::connect(lent.folder.join("socket"));
    // The first byte comes with the memory that is shared.
    let served = |mut stream: &UnixStream| stream.read(&mut [0]).is_ok_and(|read| read == 1);
    let until = Instant::now() + Duration::from_secs(20);
    let mut crowd = Vec::new();
    while crowd.len() < MOST {
        let stream = connect()?;
        if served(&stream) {
            crowd.push(stream);
        }
        // Who was there before takes a moment to end.
        ensure!(Instant::now() < until, "{} are served only", crowd.len());
    }
    ensure!(!served(&connect()?), "one more than {MOST} is served");
    crowd.truncate(1);
    while lent.workers()?.len() > 1 {
        ensure!(Instant::now() < until, "who serves nobody has not ended");
        thread::sleep(Duration::from_millis(20));
    }
    confined(lent)?;
    let cache = PathBuf::from(format!("/tmp/gantry-accel-{}", lent.id()));
    let away = cache.with_extension("away");
    fs::rename(&cache, &away)?;
    ensure!(!served(&connect()?), "one is served without a folder");
    fs::rename(&away, &cache)?;
    packages::run(lent.remoted("clinfo").arg("-l"))
}
