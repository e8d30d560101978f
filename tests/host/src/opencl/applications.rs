//! Applications that several scenarios use.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, ChildStdout, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use gantry_build::root;

use super::pool::Pool;

/// Path of a test program.
pub fn program(name: &str) -> PathBuf {
    root().join("guest/opencl/tests/programs").join(name)
}

/// Starts an application that computes endlessly. Returns it and its output.
pub fn endless(pool: &Pool) -> Result<(Child, BufReader<ChildStdout>)> {
    running(pool, &["endless.py"])
}

/// Starts an application, a program and its arguments, that reports when it computes. Returns it and its output.
pub fn running(pool: &Pool, line: &[&str]) -> Result<(Child, BufReader<ChildStdout>)> {
    let mut application = pool
        .remoted("/usr/bin/python3")
        .arg(program(line.first().unwrap_or(&"")))
        .args(line.iter().skip(1))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut output = BufReader::new(application.stdout.take().context("no output")?);
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(line == "running\n", "the application said {line:?}");
    Ok((application, output))
}

pub fn signal(processes: &[i32], signal: i32) {
    for process in processes {
        // SAFETY: a plain call.
        unsafe { libc::kill(*process, signal) };
    }
}

/// In a pool that serves two applications at a time, a third one waits until one of them has ended.
pub fn third_waits(pool: &Pool) -> Result<()> {
    let (mut first, output) = endless(pool)?;
    let (mut second, _output) = endless(pool)?;
    ensure!(pool.workers()?.len() == 2, "more workers than there may be");
    let mut third = pool
        .remoted("clinfo")
        .arg("-l")
        .stdout(Stdio::piped())
        .spawn()?;
    thread::sleep(Duration::from_secs(1));
    ensure!(third.try_wait()?.is_none(), "a third one does not wait");
    signal(&[first.id() as i32], libc::SIGTERM);
    first.wait()?;
    drop(output);
    let served = third.wait_with_output()?;
    signal(&[second.id() as i32], libc::SIGTERM);
    second.wait()?;
    let listed = String::from_utf8_lossy(&served.stdout);
    ensure!(
        listed.contains("Platform"),
        "the third one got nothing: {listed:?}"
    );
    Ok(())
}
