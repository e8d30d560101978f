//! The same over streams: through a Unix socket without shared memory, and through TLS.

use std::{
    io::BufRead,
    net::TcpStream,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::{endless, signal, third_waits},
    natively::{clinfo, figures, late, piglit, pyopencl, svm},
    pool::{Pool, Way, certificates},
    workers::{self, confined, stopped},
};
use crate::shared_device::PATIENCE;

/// Third-party programs, and errors that are reported late.
fn programs(pool: &Pool) -> Result<()> {
    clinfo(pool)?;
    figures(pool)?;
    pyopencl(pool)?;
    late(pool)
}

pub fn unix(pool: &Pool) -> Result<()> {
    let pool = Pool::start(Way::Unix, "unix", pool.release.clone(), &[])?;
    programs(&pool)?;
    piglit(&pool)
}

pub fn tls(pool: &Pool) -> Result<()> {
    let pool = Pool::start(Way::Tls, "tls", pool.release.clone(), &[])?;
    programs(&pool)?;
    confined(&pool)?;
    svm(&pool)?;
    workers::killed(&pool)?;
    stopped(&pool)
}

/// Runs a program that must find no platform, for the reason that its driver reports.
pub fn finds_nothing(mut command: Command, why: &str) -> Result<()> {
    let output = command.arg("-l").stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let listed = String::from_utf8_lossy(&output.stdout);
    ensure!(
        said.contains(why) && !listed.contains("Platform"),
        "the driver said {said:?} and not {why:?}; there were {listed:?}"
    );
    Ok(())
}

pub fn refused(pool: &Pool) -> Result<()> {
    let release = &pool.release;
    let pool = Pool::start(Way::Tls, "refused", release.clone(), &[])?;
    let others = pool.folder.join("others");
    certificates(&others)?;
    let mut stranger = pool.remoted("clinfo");
    stranger
        .env("GANTRY_TLS_CERT", others.join("guest.pem"))
        .env("GANTRY_TLS_KEY", others.join("guest.key"));
    finds_nothing(stranger, "received fatal alert")?;
    // Logged after the stranger has been told.
    let until = Instant::now() + PATIENCE;
    while !pool
        .log()?
        .contains("was refused: invalid peer certificate")
    {
        ensure!(
            Instant::now() < until,
            "the pool says of the stranger: {:?}",
            pool.log()?
        );
        thread::sleep(Duration::from_millis(20));
    }
    // A certificate that authenticates a host to an application does not authenticate an
    // application to a host.
    let mut posing = pool.remoted("clinfo");
    posing
        .env("GANTRY_TLS_CERT", pool.folder.join("keys/localhost.pem"))
        .env("GANTRY_TLS_KEY", pool.folder.join("keys/localhost.key"));
    finds_nothing(posing, "received fatal alert")?;
    let mut careful = pool.remoted("clinfo");
    careful.env("GANTRY_TLS_CA", others.join("ca.pem"));
    finds_nothing(careful, "invalid peer certificate")?;
    let mut forgetful = pool.remoted("clinfo");
    forgetful.env_remove("GANTRY_TLS_KEY");
    finds_nothing(forgetful, "GANTRY_TLS_KEY is not set")?;
    let mut plain = pool.remoted("clinfo");
    plain.env("GANTRY_OPENCL", pool.address.replace("tls:", "tcp:"));
    finds_nothing(plain, "no worker has said hello")?;
    // Meanwhile, no other application is served by mistake, and no worker is lost.
    packages::run(pool.remoted("clinfo").arg("-l"))?;
    for listen in ["tcp:127.0.0.1:1", "tcp:0.0.0.0:1"] {
        let plain: &[&str] = if listen.contains("0.0.0.0") {
            &["--plain"]
        } else {
            &[]
        };
        let output = Command::new(release.join("gantry-accel"))
            .args(["serve", "--listen", listen])
            .args(plain)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && said.contains("is served by TLS only"),
            "{listen}: {said}"
        );
    }
    Ok(())
}

/// Kills applications, and workers, at several points.
pub fn killed(pool: &Pool) -> Result<()> {
    let pool = Pool::start(Way::Tls, "moments", pool.release.clone(), &[])?;
    for after in [
        "0.02", "0.04", "0.08", "0.12", "0.16", "0.24", "0.32", "0.48",
    ] {
        let application = pool
            .remoted("timeout")
            .args(["-s", "KILL", after])
            .arg(pool.release.join("examples/opencl_figures"))
            .stdin(Stdio::null())
            .output()?;
        ensure!(
            !application.status.success(),
            "{after} s are enough for everything: no moment in the middle of it"
        );
    }
    // On the way to a worker: whether this application is served is left open, but it must end.
    for after in [5, 10, 20, 40, 80] {
        let mut application = pool.remoted("clinfo").stdout(Stdio::null()).spawn()?;
        thread::sleep(Duration::from_millis(after));
        signal(&pool.workers()?, libc::SIGKILL);
        let until = Instant::now() + PATIENCE;
        while application.try_wait()?.is_none() {
            ensure!(
                Instant::now() < until,
                "clinfo, whose worker was killed after {after} ms, goes on"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
    // In the middle of calls.
    for after in [0, 3, 17] {
        let (mut application, mut output) = endless(&pool)?;
        thread::sleep(Duration::from_millis(after));
        signal(&pool.workers()?, libc::SIGKILL);
        let mut line = String::new();
        output.read_line(&mut line)?;
        application.wait()?;
        ensure!(
            line.starts_with("error -"),
            "the application said {line:?} when its worker was killed"
        );
    }
    packages::run(pool.remoted("clinfo").arg("-l"))
}

pub fn many_clients(pool: &Pool) -> Result<()> {
    let options = ["--connections", "2"];
    let pool = Pool::start(Way::Tls, "many-clients", pool.release.clone(), &options)?;
    third_waits(&pool)
}

/// Opens idle connections, more than all workers have places for, again and again.
pub fn silent(pool: &Pool) -> Result<()> {
    let pool = Pool::start(Way::Tls, "silent", pool.release.clone(), &[])?;
    let address = pool.address.replace("tls://localhost", "127.0.0.1");
    let connect = || TcpStream::connect(&address);
    let mut silent = (0..100).map(|_| connect()).collect::<Result<Vec<_>, _>>()?;
    let mut served = pool
        .remoted("clinfo")
        .arg("-l")
        .stdout(Stdio::piped())
        .spawn()?;
    // The oldest ones are dropped over time, and others take their places.
    for turn in 0.. {
        if served.try_wait()?.is_some() {
            break;
        }
        let oldest = turn % silent.len();
        silent[oldest] = connect()?;
        thread::sleep(Duration::from_millis(100));
    }
    let listed = served.wait_with_output()?;
    let listed = String::from_utf8_lossy(&listed.stdout);
    ensure!(
        listed.contains("Platform"),
        "who is served found no worker: {listed:?}"
    );
    Ok(())
}
