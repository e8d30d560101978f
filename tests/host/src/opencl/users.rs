//! Limits on the number of a user's workers in a pool.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    applications::{endless, program, running, signal},
    moves::{children, has_moved, movable_with, moving},
    pool::{Pool, Way},
};
use crate::shared_device::PATIENCE;

/// A user without any privileges.
const NOBODY: &str = "65534";

/// A user has one worker and is refused another one with a reason; another user also gets one; and
/// a user whose application ends makes room.
pub fn limited(pool: &Pool) -> Result<()> {
    let options = ["--per-user", "1", "--spare", "1"];
    let pool = Pool::start(Way::Rings, "users", pool.release.clone(), &options)?;
    let (mut first, output) = endless(&pool)?;
    // Each one is refused by the worker that keeps waiting, which the next one finds.
    for _ in 0..20 {
        let said = text(pool.remoted("clinfo").arg("-l"))?;
        ensure!(said.contains("--per-user"), "a second one hears {said:?}");
    }
    let log = pool.log()?;
    ensure!(
        log.contains("was refused: it has 1 workers, as many as --per-user allows"),
        "the pool says {log:?}"
    );
    ensure!(pool.workers()?.len() == 2, "there are more workers");
    // SAFETY: a plain call.
    if unsafe { libc::geteuid() } == 0 {
        other(&pool)?;
    }
    ensure!(first.try_wait()?.is_none(), "the first one has ended");
    signal(&[first.id() as i32], libc::SIGTERM);
    first.wait()?;
    drop(output);
    is_served(&pool)
}

/// What two applications of a pool have is one sum, also after one of them has moved to another worker, and until its
/// process has been killed.
pub fn one_sum(pool: &Pool) -> Result<()> {
    let options = ["--memory-total", "256"];
    let (pool, control) = movable_with(pool, "sum", &options)?;
    let (mut first, output) = running(&pool, &["memory.py", "160", "stay"])?;
    let refused = |mib: &str| -> Result<bool> {
        let mut second = pool.remoted("/usr/bin/python3");
        let said = text(second.arg(program("memory.py")).arg(mib))?;
        match said.lines().next() {
            Some("running") => Ok(false),
            Some("MEM_OBJECT_ALLOCATION_FAILURE") => Ok(true),
            _ => bail!("an application says {said:?}"),
        }
    };
    ensure!(refused("160")?, "160 and 160 of 256 MiB are allocated");
    ensure!(!refused("64")?, "160 and 64 of 256 MiB are refused");
    let moved = text(moving(&pool, &control).arg("--all"))?;
    has_moved(&[moved], 1)?;
    ensure!(
        refused("160")?,
        "an application's memory is not counted after a move"
    );
    ensure!(
        !refused("64")?,
        "an application's memory is counted twice after a move"
    );
    signal(&children(first.id())?, libc::SIGKILL);
    first.wait()?;
    drop(output);
    let until = Instant::now() + PATIENCE;
    while refused("160")? {
        ensure!(
            Instant::now() < until,
            "an application that was killed keeps its memory"
        );
    }
    let _ = fs::remove_file(&control);
    Ok(())
}

/// Clients that send descriptors whose close hangs, whether served or refused, do not affect
/// others.
pub fn hanging(pool: &Pool) -> Result<()> {
    let options = ["--per-user", "1", "--spare", "1"];
    let pool = Pool::start(Way::Rings, "hanging", pool.release.clone(), &options)?;
    let mut hostile = Vec::new();
    for _ in 0..2 {
        hostile.push(sends_files(&pool)?);
        is_served(&pool)?;
    }
    let (mut first, output) = endless(&pool)?;
    for _ in 0..3 {
        hostile.push(sends_files(&pool)?);
    }
    signal(&[first.id() as i32], libc::SIGTERM);
    first.wait()?;
    drop(output);
    is_served(&pool)?;
    for (child, _) in &mut hostile {
        ensure!(child.try_wait()?.is_none(), "what was sent closes by now");
        drop(child.stdin.take());
        child.wait()?;
    }
    Ok(())
}

/// Starts such a client, which runs until its input ends. It has sent its files when this returns.
fn sends_files(pool: &Pool) -> Result<(Child, BufReader<ChildStdout>)> {
    let mut child = Command::new(pool.release.join("examples/opencl_hostile"))
        .arg(pool.folder.join("socket"))
        .arg("files")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = BufReader::new(child.stdout.take().context("no output")?);
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(line == "sent\n", "the application said {line:?}");
    Ok((child, output))
}

/// Waits until an application has a worker, for less time than a close hangs.
fn is_served(pool: &Pool) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let said = text(pool.remoted_for(20, "clinfo").arg("-l"))?;
        if said.contains("Platform") {
            return Ok(());
        }
        ensure!(Instant::now() < until, "nobody has a worker, and {said:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Checks that another user is served.
fn other(pool: &Pool) -> Result<()> {
    let vendors = pool.public_driver("others")?;
    let socket = pool.folder.join("socket");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o777))?;
    let mut listing = pool.remoted("setpriv");
    listing
        .args(["--reuid", NOBODY, "--clear-groups", "clinfo", "-l"])
        .env("OCL_ICD_VENDORS", vendors.join(""));
    let said = text(&mut listing)?;
    ensure!(said.contains("Platform"), "another user hears {said:?}");
    Ok(())
}

/// Returns everything that a program prints.
fn text(command: &mut Command) -> Result<String> {
    let output = command.output().context("cannot run a program")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr))
}
