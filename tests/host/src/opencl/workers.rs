//! How workers are confined, and the effects of their end.

use std::{
    fs,
    io::BufRead,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::{endless, program, running, signal},
    natively::figures,
    pool::{Pool, Way},
};
use crate::shared_device::PATIENCE;

pub fn confined(pool: &Pool) -> Result<()> {
    // An application that is served has a confined worker.
    packages::run(pool.remoted("clinfo").arg("-l"))?;
    let workers = pool.workers()?;
    ensure!(!workers.is_empty(), "the pool has no workers");
    let until = Instant::now() + PATIENCE;
    let mut seen = 0;
    for worker in workers {
        while let Ok(status) = fs::read_to_string(format!("/proc/{worker}/status")) {
            let is = |line: &str| status.lines().any(|known| known == line);
            let powerless = is("CapEff:\t0000000000000000") && is("CapPrm:\t0000000000000000");
            if is("Seccomp:\t2") && is("NoNewPrivs:\t1") && powerless {
                seen += 1;
                break;
            }
            // A process that has just been started may not be confined yet.
            ensure!(
                Instant::now() < until,
                "worker {worker} is not confined:\n{status}"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
    ensure!(seen > 0, "all workers have ended");
    Ok(())
}

pub fn killed(pool: &Pool) -> Result<()> {
    let (mut application, mut output) = endless(pool)?;
    signal(&pool.workers()?, libc::SIGKILL);
    let start = Instant::now();
    let mut line = String::new();
    output.read_line(&mut line)?;
    let waited = start.elapsed();
    application.wait()?;
    if !line.starts_with("error -") {
        bail!("the application said {line:?} when its worker was killed");
    }
    ensure!(
        waited < PATIENCE,
        "the application noticed after {waited:?}"
    );
    // The pool continues.
    packages::run(pool.remoted("clinfo").arg("-l"))
}

pub fn stopped(pool: &Pool) -> Result<()> {
    let (mut application, _output) = endless(pool)?;
    let before = pool.started_workers()?;
    // None of its threads notices the end of the application.
    signal(&before, libc::SIGSTOP);
    // `timeout`, which runs it, forwards the signal.
    signal(&[application.id() as i32], libc::SIGTERM);
    application.wait()?;
    let until = Instant::now() + PATIENCE;
    let left = loop {
        let now = pool.workers()?;
        let left = before.iter().filter(|id| now.contains(id)).count();
        if left + 1 == before.len() || Instant::now() > until {
            break left;
        }
        thread::sleep(Duration::from_millis(20));
    };
    signal(&before, libc::SIGCONT);
    ensure!(
        left + 1 == before.len(),
        "{left} of {} workers are left",
        before.len()
    );
    packages::run(pool.remoted("clinfo").arg("-l"))
}

pub fn limited(pool: &Pool) -> Result<()> {
    let options = ["--kernel-limit", "2000"];
    let pool = Pool::start(Way::Rings, "limited", pool.release.clone(), &options)?;
    let (mut application, mut output) = running(&pool, &["stuck.py"])?;
    let start = Instant::now();
    let mut line = String::new();
    output.read_line(&mut line)?;
    let waited = start.elapsed();
    application.wait()?;
    ensure!(
        line.starts_with("error -"),
        "the application said {line:?} when its kernel had run for too long"
    );
    ensure!(
        // It has run for a while when it is reported, for longer on a busy machine.
        waited > Duration::from_secs(1) && waited < PATIENCE,
        "the kernel was ended after {waited:?}"
    );
    let log = pool.log()?;
    ensure!(log.contains("more than --kernel-limit allows"), "{log}");
    // Applications whose kernels end are not affected, even if they have more kernels than are
    // tracked.
    let many = packages::output(pool.remoted("/usr/bin/python3").arg(program("many.py")))?;
    ensure!(many == "40000 have run\n", "{many}");
    figures(&pool)
}
