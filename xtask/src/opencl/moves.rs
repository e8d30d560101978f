//! Applications whose workers change while they run.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::{program, signal},
    pool::{Pool, Way},
};

/// A pool whose applications can be moved, and the socket for that.
fn movable(pool: &Pool, name: &str) -> Result<(Pool, PathBuf)> {
    let control = std::env::temp_dir().join(format!("gantry-{name}-{}", std::process::id()));
    let _ = fs::remove_file(&control);
    let path = control.display().to_string();
    let options = ["--control", &path];
    let pool = Pool::start(Way::Rings, name, pool.release.clone(), &options)?;
    Ok((pool, control))
}

fn moving(pool: &Pool, control: &PathBuf) -> Command {
    let mut command = Command::new(pool.release.join("gantry-accel"));
    command.arg("move").arg("--control").arg(control);
    command
}

/// Moves all applications of a pool again and again, until it is dropped.
struct Mover {
    ends: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<Vec<String>>>,
}

impl Mover {
    fn start(pool: &Pool, control: &PathBuf) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let mut all = moving(pool, control);
        all.arg("--all");
        let work = move || {
            let (mut lines, mut pause) = (Vec::new(), 7u64);
            while !seen.load(Ordering::Relaxed) {
                if let Ok(output) = all.output() {
                    let text = String::from_utf8_lossy(&output.stdout);
                    lines.extend(text.lines().map(str::to_owned));
                }
                // 50 to 500 ms, in no particular order.
                pause = (pause * 73 + 41) % 451;
                thread::sleep(Duration::from_millis(50 + pause));
            }
            lines
        };
        Self {
            ends,
            thread: Some(thread::spawn(work)),
        }
    }

    /// What the pool has said of each move.
    fn end(mut self) -> Vec<String> {
        self.ends.store(true, Ordering::Relaxed);
        let thread = self.thread.take();
        thread
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default()
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

pub fn chaos(pool: &Pool) -> Result<()> {
    let (moved, control) = movable(pool, "moved")?;
    let entries = pool.release.join("examples/opencl_entries");
    let native = packages::output(&mut pool.native(&entries))?;
    let mover = Mover::start(&moved, &control);
    let computed = packages::output(
        moved
            .remoted("/usr/bin/python3")
            .arg(program("moving.py"))
            .arg("10"),
    )?;
    ensure!(computed == "running\nok\n", "{computed}");
    for _ in 0..3 {
        let remoted = packages::output(&mut moved.remoted(&entries))?;
        ensure!(native == remoted, "natively:\n{native}\nmoved:\n{remoted}");
    }
    let lines = mover.end();
    let _ = fs::remove_file(&control);
    let count = lines
        .iter()
        .filter(|line| line.contains(" moved from "))
        .count();
    ensure!(count >= 10, "only {count} moves:\n{}", lines.join("\n"));
    Ok(())
}

fn start(pool: &Pool) -> Result<Child> {
    let mut child = pool
        .remoted("/usr/bin/python3")
        .arg(program("moving.py"))
        .arg("2")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut first = [0; 8];
    let output = child.stdout.as_mut().context("no output")?;
    std::io::Read::read_exact(output, &mut first)?;
    ensure!(&first == b"running\n", "the application does not run");
    Ok(child)
}

/// Those workers of the pool that wait for the application of another one, or the others.
fn workers(pool: &Pool, standby: bool) -> Result<Vec<i32>> {
    let is_standby = |id: &i32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        words.any(|word| word == b"--standby") == standby
    };
    let all = pool.workers()?;
    Ok(all.into_iter().filter(is_standby).collect())
}

pub fn killed(pool: &Pool) -> Result<()> {
    let (moved, control) = movable(pool, "killed-moving")?;
    for round in 0..10u64 {
        let destination = round % 2 == 1;
        let child = start(&moved)?;
        let mover = moving(&moved, &control)
            .arg("--all")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // Starting the destination takes about 50 ms here, and the rest as long.
        thread::sleep(Duration::from_millis(20 + round * 15));
        signal(&workers(&moved, destination)?, libc::SIGKILL);
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            said == "ok\n" || said == "error\n",
            "round {round}: the application said {said:?}"
        );
        ensure!(mover.wait_with_output().is_ok(), "no end of the move");
        // Whoever comes next is served, and can be moved.
        let next = start(&moved)?;
        let text = packages::output(moving(&moved, &control).arg("--all"))?;
        ensure!(text.contains(" moved from "), "round {round}: {text}");
        signal(&[next.id().cast_signed()], libc::SIGTERM);
        next.wait_with_output()?;
    }
    let _ = fs::remove_file(&control);
    Ok(())
}
