//! Pools that run out of file descriptors.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::{endless, signal, third_waits},
    pool::{Pool, Way},
};
use crate::shared_device::{PATIENCE, wait_for};

pub fn short(pool: &Pool) -> Result<()> {
    let mut pool = Pool::start(Way::Rings, "short", pool.release.clone(), &["--spare", "1"])?;
    let (mut first, output) = endless(&pool)?;
    let until = Instant::now() + PATIENCE;
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
    // One for the connection that a worker hands over, and none for what a new worker needs.
    let free = (0..).filter(|number| !used.contains(number)).nth(1);
    let before = limit_descriptors(id, free.context("all are used")?)?;
    let (mut second, _output) = endless(&pool)?;
    while !pool.log()?.contains("cannot start a worker process") {
        soon("the pool starts workers without descriptors")?;
    }
    ensure!(first.try_wait()?.is_none(), "the first one has ended");
    // This also holds when no worker is left: the pool retries every second. It keeps these open
    // permanently, and polls no others.
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

/// The kernel refuses to poll more descriptors than a process may open, even if they are already
/// open.
pub fn lowered(pool: &Pool) -> Result<()> {
    let mut pool = Pool::start(Way::Rings, "lowered", pool.release.clone(), &[])?;
    let (mut application, _output) = endless(&pool)?;
    let before = pool.workers()?;
    let limit = limit_descriptors(pool.id(), 2)?;
    // The next poll notices what ends.
    signal(&[application.id() as i32], libc::SIGTERM);
    application.wait()?;
    let until = Instant::now() + PATIENCE;
    while pool.runs()? && pool.workers()?.len() == before.len() {
        ensure!(Instant::now() < until, "the worker's end is not noticed");
        thread::sleep(Duration::from_millis(20));
    }
    ensure!(pool.runs()?, "the pool has ended: {}", pool.log()?);
    limit_descriptors(pool.id(), limit)?;
    packages::run(pool.remoted("clinfo").arg("-l"))
}

/// A pool uses the hard limit for itself, and serves no more applications than it has room for.
pub fn bounded(pool: &Pool) -> Result<()> {
    // 64 for itself, and 9 for each of two.
    let program = ["prlimit", "--nofile=40:82"];
    let release = pool.release.clone();
    let options = ["--spare", "1"];
    let pool = Pool::under(&program, Way::Rings, "bounded", release, &options)?;
    // It listens before it prints this.
    let said = "2 applications are served at a time, as this process may have 82";
    wait_for("the pool to say its bound", || {
        Ok(pool.log()?.contains(said))
    })?;
    third_waits(&pool)?;
    // Drivers get the usual limit.
    let started = pool.started_workers()?;
    let worker = started.first().context("no worker waits")?;
    let limits = fs::read_to_string(format!("/proc/{worker}/limits"))?;
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let files: Vec<_> = files.unwrap_or_default().split_whitespace().collect();
    ensure!(files[3..5] == ["40", "82"], "{limits}");
    Ok(())
}

/// Sets the number of descriptors that a process may have. Returns the previous limit.
fn limit_descriptors(process: i32, count: u64) -> Result<u64> {
    // SAFETY: all-zero limits are valid.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    let which = libc::RLIMIT_NOFILE;
    // SAFETY: nothing is set; `limit` outlives the call.
    let mut done = unsafe { libc::prlimit(process, which, std::ptr::null(), &raw mut limit) };
    let before = std::mem::replace(&mut limit.rlim_cur, count);
    if done == 0 {
        // SAFETY: the old limits are not requested; `limit` outlives the call.
        done = unsafe { libc::prlimit(process, which, &raw const limit, std::ptr::null_mut()) };
    }
    ensure!(
        done == 0,
        "cannot limit its descriptors: {}",
        std::io::Error::last_os_error()
    );
    Ok(before)
}
