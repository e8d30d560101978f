//! How many workers of a pool a user of this machine has.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    applications::{endless, signal},
    pool::{Pool, Way},
};

/// A user without any rights.
const NOBODY: &str = "65534";

/// A user has one worker and is refused another, in words that say why; another user has one, too;
/// and who has ended makes room.
pub fn limited(pool: &Pool) -> Result<()> {
    let options = ["--per-user", "1", "--spare", "1"];
    let pool = Pool::start(Way::Rings, "users", pool.release.clone(), &options)?;
    let (mut first, output) = endless(&pool)?;
    // Each is refused by the worker that goes on waiting, which the next one finds.
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
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let said = text(pool.remoted("clinfo").arg("-l"))?;
        if said.contains("Platform") {
            return Ok(());
        }
        ensure!(Instant::now() < until, "nobody has a worker, and {said:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Another user is served.
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

/// All that a program says.
fn text(command: &mut Command) -> Result<String> {
    let output = command.output().context("cannot run a program")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr))
}
