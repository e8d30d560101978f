//! What applications that call and wait do not use: system calls, copies, and CPU time.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_tests::{bench::cpu_time, rig::packages};

use super::pool::{Pool, Way};
use crate::shared_device::{PATIENCE, wait_for};

/// Measures the CPU time of application, workers and pool while there are no requests. `cargo xtask
/// bench idle` does the same with a guest's application.
pub fn idle(pool: &Pool) -> Result<()> {
    const WHILE: Duration = Duration::from_secs(4);
    let is_little = |nanos: u64| u128::from(nanos) * 200 < WHILE.as_nanos();
    let mut application = pool
        .remoted(pool.release.join("examples/opencl_idle"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ready = String::new();
    let mut output = BufReader::new(application.stdout.take().context("no output")?);
    output.read_line(&mut ready)?;
    let id = ready
        .strip_prefix("idle ")
        .with_context(|| format!("the application said {ready:?}"))?
        .trim()
        .parse()?;
    let spent =
        |of: &[i32]| -> Result<u64> { of.iter().map(|id| cpu_time(id.cast_unsigned())).sum() };
    // Both sides poll for a moment before they sleep, and a spare worker opens its driver. That of an application before
    // may just end.
    let mut all = Vec::new();
    wait_for("workers to be ready", || {
        all = pool.workers()?;
        all.extend([id, pool.id()]);
        let before = spent(&all);
        thread::sleep(Duration::from_secs(1));
        let (Ok(before), Ok(now)) = (before, spent(&all)) else {
            return Ok(false);
        };
        Ok(u128::from(now - before) * 100 < Duration::from_secs(1).as_nanos())
    })?;
    // Once is enough: another process may have kept caches and processors from them.
    let mut nanos = u64::MAX;
    for _ in 0..3 {
        let before = spent(&all)?;
        thread::sleep(WHILE);
        nanos = nanos.min(spent(&all)? - before);
        if is_little(nanos) {
            break;
        }
    }
    drop(application.stdin.take());
    std::io::copy(&mut output, &mut std::io::sink())?;
    application.wait()?;
    ensure!(is_little(nanos), "{nanos} ns of a processor in {WHILE:?}");
    Ok(())
}

/// The application's process cannot access the memory that is copied: the worker passes exactly
/// that memory to the driver.
pub fn untouched(pool: &Pool) -> Result<()> {
    let mut application = pool.remoted(pool.release.join("examples/opencl_untouched"));
    let said = packages::output(&mut application)?;
    ensure!(
        said.lines().count() == 4,
        "not all copies were made: {said}"
    );
    // Over a stream, the process itself sends what is copied, and is killed when it reads it.
    let stream = Pool::start(Way::Unix, "touched", pool.release.clone(), &[])?;
    let output = stream
        .remoted(pool.release.join("examples/opencl_untouched"))
        .output()?;
    ensure!(
        !output.status.success() && output.stdout.is_empty(),
        "memory that cannot be read was sent by a stream: {output:?}"
    );
    Ok(())
}

/// Counts the system calls of application and worker while they only exchange requests and replies.
/// Both poll for longer than the calls take, so neither falls asleep however busy this machine is.
pub fn steady(pool: &Pool) -> Result<()> {
    const LONG: &str = "60000000";
    let pool = Pool::start(
        Way::Rings,
        "steady",
        pool.release.clone(),
        &["--spin", LONG],
    )?;
    let mut application = pool
        .remoted(pool.release.join("examples/opencl_steady"))
        .env("GANTRY_OPENCL_SPIN", LONG)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = BufReader::new(application.stdout.take().context("no output")?);
    let mut next = || -> Result<String> {
        let mut line = String::new();
        output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    };
    let ready = next()?;
    let id: i32 = ready
        .strip_prefix("ready ")
        .with_context(|| format!("the application said {ready:?}"))?
        .parse()?;
    let mut traced = pool.workers()?;
    traced.push(id);
    let log = pool.folder.join("calls");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-o"]).arg(&log);
    for id in &traced {
        strace.args(["-p", &id.to_string()]);
    }
    let mut strace = strace
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run strace")?;
    let mut attached = BufReader::new(strace.stderr.take().context("no messages")?).lines();
    for _ in &traced {
        let line = attached.next().context("strace attaches to nothing")??;
        ensure!(line.contains("attached"), "strace says: {line}");
    }
    // Threads that sleep in a system call restart it when strace attaches, and strace logs that
    // with a delay.
    let until = Instant::now() + PATIENCE;
    let mut written = None;
    loop {
        thread::sleep(Duration::from_millis(200));
        let length = fs::metadata(&log)?.len();
        if written.replace(length) == Some(length) {
            break;
        }
        ensure!(Instant::now() < until, "what is to stand still makes calls");
    }
    let mut input = application.stdin.take().context("no input")?;
    input.write_all(b"go\n")?;
    ensure!(next()? == "begin" && next()? == "end", "no marks");
    // SAFETY: a plain call; strace then detaches from its processes.
    unsafe { libc::kill(strace.id().cast_signed(), libc::SIGINT) };
    strace.wait()?;
    // Only now may the application end: strace waits forever for a process that ends while it
    // detaches.
    drop(input);
    application.wait()?;
    let log = fs::read_to_string(log)?;
    let between = log
        .lines()
        .skip_while(|line| !line.contains("\"begin"))
        .skip(1)
        .take_while(|line| !line.contains("\"end"));
    let calls: Vec<_> = between.filter(|line| !line.contains("resumed>")).collect();
    ensure!(
        log.contains("\"begin") && log.contains("\"end") && calls.is_empty(),
        "{} system calls: {:#?}",
        calls.len(),
        &calls[..calls.len().min(10)]
    );
    Ok(())
}
