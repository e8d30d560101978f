//! Pools that run out of file descriptors.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::{endless, signal},
    pool::{Pool, Way},
};

pub fn short(pool: &Pool) -> Result<()> {
    let mut pool = Pool::start(Way::Rings, "short", pool.release.clone(), &["--spare", "1"])?;
    let (mut first, output) = endless(&pool)?;
    let until = Instant::now() + Duration::from_secs(20);
    let soon = |what: &str| {
        thread::sleep(Duration::from_millis(20));
        ensure!(Instant::now() < until, "{what}");
        Ok(())
    };
    while pool.workers()?.len() < 2 {
        soon("the pool has no worker for another application")?;
    }
    let id = pool.id();
    let descriptors = fs::read_dir(format!("/proc/{id}/fd"))?;
    let used: Vec<u64> = descriptors
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    // One for the connection that a worker hands over, and none for what a new one needs.
    let free = (0..).filter(|number| !used.contains(number)).nth(1);
    let before = limit_descriptors(id, free.context("all are used")?)?;
    let (mut second, _output) = endless(&pool)?;
    while !pool.log()?.contains("cannot start a worker process") {
        soon("the pool starts workers without descriptors")?;
    }
    ensure!(first.try_wait()?.is_none(), "the first one has ended");
    // Also when nobody is left: it tries every second. It has these open for good, and polls no more.
    limit_descriptors(id, 5)?;
    signal(&pool.workers()?, libc::SIGKILL);
    for application in [&mut first, &mut second] {
        application.wait()?;
    }
    drop(output);
    thread::sleep(Duration::from_millis(1500));
    ensure!(
        pool.workers()?.is_empty(),
        "a worker was started without descriptors"
    );
    ensure!(pool.runs()?, "the pool has ended: {}", pool.log()?);
    limit_descriptors(id, before)?;
    packages::run(pool.remoted("clinfo").arg("-l"))?;
    Ok(())
}

/// Sets how many descriptors a process may have; how many it might before.
fn limit_descriptors(process: i32, count: u64) -> Result<u64> {
    // SAFETY: all zeroes are valid limits.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    let which = libc::RLIMIT_NOFILE;
    // SAFETY: nothing is set; `limit` outlives the call.
    let mut done = unsafe { libc::prlimit(process, which, std::ptr::null(), &raw mut limit) };
    let before = std::mem::replace(&mut limit.rlim_cur, count);
    if done == 0 {
        // SAFETY: the old limits are not wanted; `limit` outlives the call.
        done = unsafe { libc::prlimit(process, which, &raw const limit, std::ptr::null_mut()) };
    }
    ensure!(
        done == 0,
        "cannot limit its descriptors: {}",
        std::io::Error::last_os_error()
    );
    Ok(before)
}
