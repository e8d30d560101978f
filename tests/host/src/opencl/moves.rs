//! Applications whose workers change while they run.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::{program, signal},
    pool::{Pool, Way},
};
use crate::shared_device::PATIENCE;

/// Takes the place of an address: the application is parked.
const PARKED: &str = "parked";

/// An application's argument for its run time: until its input ends.
const TOLD: &str = "input";

/// Starts a pool whose applications can be moved. Returns it and its control socket.
pub fn movable(pool: &Pool, name: &str) -> Result<(Pool, PathBuf)> {
    movable_with(pool, name, &[])
}

/// The same with additional options.
pub(super) fn movable_with(pool: &Pool, name: &str, more: &[&str]) -> Result<(Pool, PathBuf)> {
    let control = std::env::temp_dir().join(format!("gantry-{name}-{}", std::process::id()));
    let _ = fs::remove_file(&control);
    let path = control.display().to_string();
    let options = [&["--control", &path], more].concat();
    Ok((pool.beside(Way::Rings, name, &options)?, control))
}

pub(super) fn moving(pool: &Pool, control: &Path) -> Command {
    let mut command = Command::new(pool.release.join("gantry-accel"));
    command.arg("move").arg("--control").arg(control);
    command
}

/// Moves all applications of a pool again and again, until it is dropped.
pub struct Mover {
    ends: Arc<AtomicBool>,
    moves: Arc<AtomicUsize>,
    thread: Option<thread::JoinHandle<Vec<String>>>,
}

impl Mover {
    /// Starts to move them, by these options of `gantry-accel move`.
    pub fn start(pool: &Pool, control: &Path, how: &[&str]) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let moves = Arc::new(AtomicUsize::new(0));
        let made = Arc::clone(&moves);
        let mut all = moving(pool, control);
        all.arg("--all").args(how);
        let work = move || {
            let (mut lines, mut pause) = (Vec::new(), 7u64);
            while !seen.load(Ordering::Relaxed) {
                if let Ok(output) = all.output() {
                    let text = String::from_utf8_lossy(&output.stdout);
                    let moved = text.lines().filter(|line| is_moved(line)).count();
                    made.fetch_add(moved, Ordering::Relaxed);
                    lines.extend(text.lines().map(str::to_owned));
                }
                // 50 to 500 ms, in irregular order.
                pause = (pause * 73 + 41) % 451;
                thread::sleep(Duration::from_millis(50 + pause));
            }
            lines
        };
        Self {
            ends,
            moves,
            thread: Some(thread::spawn(work)),
        }
    }

    /// Number of moves that have been made.
    pub fn moves(&self) -> usize {
        self.moves.load(Ordering::Relaxed)
    }

    /// Stops moving, and returns what the pool has printed on each move.
    pub fn end(mut self) -> Vec<String> {
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

pub(super) fn chaos(pool: &Pool) -> Result<()> {
    let (moved, control) = movable(pool, "moved")?;
    let entries = pool.release.join("examples/opencl_entries");
    let native = packages::output(&mut pool.native(&entries))?;
    let mover = Mover::start(&moved, &control, &[]);
    let computed = packages::output(
        moved
            .remoted("/usr/bin/python3")
            .arg(program("moving.py"))
            .arg("10"),
    )?;
    ensure!(computed == "running\nok\n", "{computed}");
    writes_what_it_is_to(&moved, 1)?;
    for _ in 0..3 {
        let remoted = packages::output(&mut moved.remoted(&entries))?;
        ensure!(native == remoted, "natively:\n{native}\nmoved:\n{remoted}");
    }
    let lines = mover.end();
    let _ = fs::remove_file(&control);
    has_moved(&lines, 10)
}

/// Whether a line of a pool reports that an application has a new worker.
fn is_moved(line: &str) -> bool {
    line.contains(" moved from ")
}

/// Checks that there were at least this many moves.
pub(super) fn has_moved(lines: &[String], least: usize) -> Result<()> {
    let count = lines.iter().filter(|line| is_moved(line)).count();
    ensure!(count >= least, "only {count} moves:\n{}", lines.join("\n"));
    Ok(())
}

pub(super) fn followed(pool: &Pool) -> Result<()> {
    let (moved, control) = movable(pool, "followed")?;
    let mover = Mover::start(&moved, &control, &["--postcopy"]);
    let mut objects = moved.remoted("/usr/bin/python3");
    let computed = packages::output(objects.arg(program("moving.py")).arg("10"))?;
    ensure!(computed == "running\nok\n", "{computed}");
    writes_what_it_is_to(&moved, 1)?;
    writes_what_it_is_to(&moved, 3)?;
    let lines = mover.end();
    let _ = fs::remove_file(&control);
    let lost = lines.iter().find(|line| line.contains("lost"));
    ensure!(lost.is_none(), "{lost:?}");
    has_moved(&lines, 10)
}

/// Size in MiB of an application's memory, all of which it writes again and again.
const MEMORY: &str = "192";

pub(super) fn lost(pool: &Pool) -> Result<()> {
    const LEAST: u64 = 5;
    const MOST: u64 = 25;
    let (moved, control) = movable(pool, "lost")?;
    let mut lost = 0;
    for round in 0..MOST {
        // On a busy machine, this process may be too late for all of the first ones.
        if round >= LEAST && lost > 0 {
            break;
        }
        let program = moved.release.join("examples/opencl_pauses");
        let mut command = moved.remoted(program);
        let mut child = command
            .args([MEMORY, "0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        await_running(&mut child)?;
        let mut mover = moving(&moved, &control)
            .args(["--all", "--postcopy"])
            .stdout(Stdio::piped())
            .spawn()?;
        let output = mover.stdout.take().context("no output")?;
        let mut lines = BufReader::new(output).lines();
        let line = lines.next().context("the pool says nothing")??;
        let worker = line.split(" moved from worker ").nth(1);
        let worker = worker.and_then(|rest| rest.split(' ').next()?.parse().ok());
        let worker = worker.with_context(|| format!("no move: {line}"))?;
        thread::sleep(Duration::from_millis(round % LEAST * 10));
        // A worker that has ended by then has transferred everything.
        signal(&[worker], libc::SIGKILL);
        let rest: Vec<_> = lines.collect::<Result<_, _>>()?;
        mover.wait()?;
        let is_lost = rest.iter().any(|line| line.contains("has lost contents"));
        lost += usize::from(is_lost);
        drop(child.stdin.take());
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let failed = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_wrong = failed.contains("of buffer");
        ensure!(
            !is_wrong && said.starts_with("right ") != is_lost,
            "round {round}: {rest:?}: the application said {said:?} {failed:?}"
        );
        ensure!(workers(&moved, true)?.len() <= 1, "a worker is left");
    }
    let _ = fs::remove_file(&control);
    ensure!(lost > 0, "no worker was killed before all had followed");
    Ok(())
}

/// An application with randomly chosen commands has the memory contents that they produce, wherever it was moved in
/// between.
fn writes_what_it_is_to(pool: &Pool, seed: u32) -> Result<()> {
    let mut command = pool.remoted("/usr/bin/python3");
    let written = packages::output(
        command
            .arg(program("written.py"))
            .args(["10", &seed.to_string()]),
    )?;
    ensure!(written == "running\nok\n", "seed {seed}: {written}");
    Ok(())
}

fn start(pool: &Pool) -> Result<Child> {
    start_for(pool, "2")
}

/// Starts an application that computes for this many seconds or until it is [`TOLD`] to end, unless somebody ends it.
fn start_for(pool: &Pool, time: &str) -> Result<Child> {
    let mut child = pool
        .remoted("/usr/bin/python3")
        .arg(program("moving.py"))
        .arg(time)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    await_running(&mut child)?;
    Ok(child)
}

/// Waits until an application reports that it computes.
pub(super) fn await_running(child: &mut Child) -> Result<()> {
    let mut first = [0; 8];
    let output = child.stdout.as_mut().context("no output")?;
    std::io::Read::read_exact(output, &mut first)?;
    ensure!(&first == b"running\n", "the application does not run");
    Ok(())
}

/// The workers of a pool that wait for the application of another one; or all others.
fn workers(pool: &Pool, standby: bool) -> Result<Vec<i32>> {
    let is_standby = |id: &i32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        words.any(|word| word == b"--standby") == standby
    };
    let all = pool.workers()?;
    Ok(all.into_iter().filter(is_standby).collect())
}

pub(super) fn killed(pool: &Pool) -> Result<()> {
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
        // The next application is served, and can be moved.
        let next = start_for(&moved, "60")?;
        let text = packages::output(moving(&moved, &control).arg("--all"))?;
        ensure!(text.contains(" moved from "), "round {round}: {text}");
        signal(&[next.id().cast_signed()], libc::SIGTERM);
        next.wait_with_output()?;
    }
    let _ = fs::remove_file(&control);
    Ok(())
}

/// Makes a pool send applications that it serves, or has served, to an address. Returns what the pool prints.
pub(super) fn send(from: &Pool, control: &Path, which: &str, to: &str) -> Result<String> {
    let mut command = moving(from, control);
    command.args([which, "--to", to]);
    // An application that stays makes that program fail, but is not an error here.
    let output = command.output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether an application that was started by [`start`] or a similar function has ended.
fn has_ended(child: &mut Child) -> Result<bool> {
    Ok(child.try_wait()?.is_some())
}

pub(super) fn between_pools(pool: &Pool) -> Result<()> {
    let (first, first_control) = movable(pool, "first")?;
    let (second, second_control) = movable(pool, "second")?;
    let pools = [(&first, &first_control), (&second, &second_control)];
    // Objects of all kinds, a wait for an undecided event, and memory that is mapped most of the time; and random
    // commands, whose memory is compared.
    back_and_forth(pools, "moving.py", &[TOLD], 20)?;
    back_and_forth(pools, "written.py", &[TOLD, "2"], 10)?;
    nobody_is_left(pools)?;
    through_tls(pool, &first, &first_control)?;
    let _ = fs::remove_file(&first_control);
    let _ = fs::remove_file(&second_control);
    Ok(())
}

/// Waits until pools have noticed the end of everything that they have served.
fn nobody_is_left(pools: [(&Pool, &PathBuf); 2]) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    for (pool, control) in pools {
        loop {
            let left = packages::output(moving(pool, control).arg("--list"))?;
            if left.is_empty() {
                break;
            }
            ensure!(Instant::now() < until, "{left}");
            thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// Moves a program from the first pool to the second and back this many times, and ends it: it must be right.
fn back_and_forth(
    pools: [(&Pool, &PathBuf); 2],
    name: &str,
    arguments: &[&str],
    often: usize,
) -> Result<()> {
    let [first, second] = pools;
    let mut child = first
        .0
        .remoted("/usr/bin/python3")
        .arg(program(name))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (mut said, mut moves) = (String::new(), 0);
    while moves < often && !has_ended(&mut child)? {
        let before = moves;
        for ((from, control), (to, _)) in [(first, second), (second, first)] {
            let text = send(from, control, "--all", &to.address)?;
            moves += text.matches(" moved to ").count();
            said += &text;
        }
        if moves == before {
            thread::sleep(Duration::from_millis(20));
        }
    }
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    ensure!(
        output.stdout == b"running\nok\n" && moves >= often,
        "{name}: {moves} moves, {}{said}",
        String::from_utf8_lossy(&output.stdout)
    );
    Ok(())
}

/// To what looks like another machine to the application, and back.
fn through_tls(pool: &Pool, first: &Pool, control: &Path) -> Result<()> {
    let far = Pool::start(Way::Tls, "far", pool.release.clone(), &[])?;
    let keys = far.folder.join("keys");
    let mut command = first.remoted("/usr/bin/python3");
    command
        .arg(program("moving.py"))
        .args([TOLD, "unmapped"])
        .env("GANTRY_TLS_CA", keys.join("ca.pem"))
        .env("GANTRY_TLS_CERT", keys.join("guest.pem"))
        .env("GANTRY_TLS_KEY", keys.join("guest.key"));
    there_and_back(command, first, control, &far)
}

pub(super) fn behind_a_gate(pool: &Pool) -> Result<()> {
    // No larger than what a gate shares.
    let (first, control) = movable_with(pool, "before-a-gate", &["--window", "15"])?;
    let release = pool.release.clone();
    let gate = Pool::start(Way::Delegated, "gate", release, &["--own-cpu"])?;
    let mut command = first.remoted("/usr/bin/python3");
    command.arg(program("moving.py")).arg(TOLD);
    there_and_back(command, &first, &control, &gate)?;
    let _ = fs::remove_file(&control);
    Ok(())
}

/// Moves an application of the first pool to another pool that has no control socket, and back, again and again.
fn there_and_back(mut command: Command, first: &Pool, control: &Path, far: &Pool) -> Result<()> {
    const OFTEN: usize = 12;
    let mut child = (command.stdin(Stdio::piped()).stdout(Stdio::piped())).spawn()?;
    await_running(&mut child)?;
    let mut said = send(first, control, "--all", &far.address)?;
    let line = packages::output(moving(first, control).arg("--list"))?;
    let process = line
        .split_ascii_whitespace()
        .nth(1)
        .context("nobody is listed")?;
    let pid = ["--pid", process].join("=");
    let (mut moves, mut alone) = (0, false);
    while (moves < OFTEN || !alone) && !has_ended(&mut child)? {
        for to in [&first.address, &far.address] {
            let there = far.workers()?;
            let text = send(first, control, &pid, to)?;
            said += &text;
            moves = said.matches(" moved to ").count();
            if text.contains(" moved to ") {
                is_listed_once(
                    &mut child,
                    moving(first, control),
                    process,
                    to == &far.address,
                )?;
            }
            if to == &first.address && text.contains(" moved to ") {
                alone |= is_left_by(&mut child, far, &there)?;
            }
        }
    }
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    ensure!(
        alone,
        "workers that it has left stay until it ends:\n{said}"
    );
    ensure!(
        output.stdout == b"ok\n" && moves >= OFTEN,
        "{moves} moves:\n{said}"
    );
    Ok(())
}

/// Checks that exactly one pool lists a process, if it has not ended.
fn is_listed_once(
    child: &mut Child,
    mut moving: Command,
    process: &str,
    is_away: bool,
) -> Result<()> {
    let list = packages::output(moving.arg("--list"))?;
    let place = if is_away { "at" } else { "worker" };
    let expected = format!("process {process} {place} ");
    let is_right = list.lines().count() == 1 && list.starts_with(&expected);
    ensure!(is_right || has_ended(child)?, "{list}");
    Ok(())
}

/// The process ID of the only application of a pool, in the form that `move` accepts.
fn listed(pool: &Pool, control: &Path) -> Result<String> {
    let line = packages::output(moving(pool, control).arg("--list"))?;
    let process = line.split_ascii_whitespace().nth(1);
    Ok(format!("--pid={}", process.context("nobody is listed")?))
}

/// Parks the only application of a pool, and waits until its worker has ended.
fn park(pool: &Pool, control: &Path) -> Result<()> {
    let before = pool.workers()?;
    let text = send(pool, control, "--all", PARKED)?;
    ensure!(text.contains(" moved to parked"), "{text}");
    let listed = packages::output(moving(pool, control).arg("--list"))?;
    ensure!(listed.contains(" at parked"), "{listed}");
    let now = pool.workers()?;
    ensure!(
        before.iter().any(|worker| !now.contains(worker)),
        "its worker has not ended: {before:?}, {now:?}"
    );
    Ok(())
}

pub(super) fn parked(pool: &Pool) -> Result<()> {
    thread::scope(|scope| {
        // Both wait for long, so they run at the same time.
        let alone = scope.spawn(|| ends_without_a_pool(pool));
        goes_on(pool)?;
        alone.join().map_err(|_| anyhow!("a thread has panicked"))?
    })
}

fn goes_on(pool: &Pool) -> Result<()> {
    let (first, control) = movable(pool, "parks")?;
    let (second, _second_control) = movable(pool, "unparks")?;
    let mut child = start_for(&first, TOLD)?;
    let process = listed(&first, &control)?;
    for to in [&first.address, &second.address] {
        park(&first, &control)?;
        // An address at which it cannot be served has no effect.
        let nowhere = send(&first, &control, &process, "/nowhere/pool")?;
        ensure!(nowhere.contains("it cannot connect with"), "{nowhere}");
        let text = send(&first, &control, "--all", to)?;
        ensure!(text.contains(" moved to "), "{text}");
        let back = send(&first, &control, &process, &first.address)?;
        ensure!(
            to == &first.address || back.contains(" moved to "),
            "{back}"
        );
    }
    park(&first, &control)?;
    // The pool is killed, and a new one is started in its place: the application goes there by itself.
    drop(first);
    ensure!(!has_ended(&mut child)?, "it has ended with the pool");
    let (first, control) = movable(pool, "parks")?;
    let until = Instant::now() + PATIENCE;
    while !packages::output(moving(&first, &control).arg("--list"))?.contains(" worker ") {
        ensure!(Instant::now() < until && !has_ended(&mut child)?);
        thread::sleep(Duration::from_millis(20));
    }
    // It computes there for a while.
    thread::sleep(Duration::from_secs(1));
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    ensure!(
        output.stdout == b"ok\n",
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    let _ = fs::remove_file(&control);
    Ok(())
}

/// If an application is parked and its pool ends for good, the application gets an error.
fn ends_without_a_pool(pool: &Pool) -> Result<()> {
    let (first, control) = movable(pool, "ends")?;
    let child = start_for(&first, "120")?;
    park(&first, &control)?;
    drop(first);
    let output = child.wait_with_output()?;
    let _ = fs::remove_file(&control);
    ensure!(
        output.stdout == b"error\n",
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    Ok(())
}

/// Waits until a worker of a pool that an application has left has ended. Returns whether that was before the
/// application's own end.
fn is_left_by(child: &mut Child, pool: &Pool, there: &[i32]) -> Result<bool> {
    loop {
        let now = pool.workers()?;
        let ended = has_ended(child)?;
        if ended || there.iter().any(|worker| !now.contains(worker)) {
            return Ok(!ended);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// The child processes of a program: an application runs under one that enforces a time limit.
pub(super) fn children(id: u32) -> Result<Vec<i32>> {
    let children = gantry_tests::processes::children(id)?;
    Ok(children.into_iter().map(u32::cast_signed).collect())
}

/// A second pool that is stopped does not delay an application. Returns how long a move there takes if it is not
/// stopped.
fn stopped(first: &Pool, control: &Path, second: &Pool) -> Result<Duration> {
    // The pool first, so that it starts no more workers.
    let pool = [second.id()];
    signal(&pool, libc::SIGSTOP);
    let workers = second.workers()?;
    signal(&workers, libc::SIGSTOP);
    let mut child = start_for(first, TOLD)?;
    let mut order = moving(first, control);
    let order = order.args(["--all", "--drain", "500", "--to", &second.address]);
    let text = order.output()?.stdout;
    let text = String::from_utf8_lossy(&text);
    ensure!(text.contains("it cannot connect with"), "{text}");
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    signal(&workers, libc::SIGCONT);
    signal(&pool, libc::SIGCONT);
    ensure!(output.stdout == b"ok\n", "it has not computed on");
    // The first application has programs built there; later ones take less time.
    let mut whole = Duration::MAX;
    for _ in 0..2 {
        let mut child = start_for(first, "60")?;
        let began = Instant::now();
        let text = send(first, control, "--all", &second.address)?;
        whole = whole.min(began.elapsed());
        ensure!(text.contains(" moved to "), "{text}");
        signal(&[child.id().cast_signed()], libc::SIGTERM);
        child.wait()?;
    }
    Ok(whole)
}

/// The process that requested an application's move is killed after some time. The application computes correctly, and
/// moves as soon as somebody else requests it, unless it has moved already.
fn mover_killed(first: &Pool, control: &Path, second: &Pool, after: Duration) -> Result<()> {
    let mut child = start_for(first, TOLD)?;
    let mut order = moving(first, control);
    order.args(["--all", "--to", &second.address]);
    let mut order = order.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    thread::sleep(after);
    order.kill()?;
    order.wait()?;
    let until = Instant::now() + PATIENCE;
    loop {
        let text = send(first, control, "--all", &second.address)?;
        if text.is_empty() || text.contains(" moved to ") {
            break;
        }
        let is_moving = text.contains("being moved already");
        ensure!(is_moving && Instant::now() < until, "{text}");
    }
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    ensure!(output.stdout == b"ok\n", "the application said {output:?}");
    Ok(())
}

pub(super) fn between_killed(pool: &Pool) -> Result<()> {
    let (first, first_control) = movable(pool, "left")?;
    let (second, second_control) = movable(pool, "come-to")?;
    let whole = stopped(&first, &first_control, &second)?;
    for round in 0..12u32 {
        let child = start(&first)?;
        let mut order = moving(&first, &first_control);
        order.args(["--all", "--to", &second.address]);
        let order = order.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        // Kills the workers of the source, of the destination, or of both, after some fraction of the time that a whole
        // move takes here.
        thread::sleep(whole * (1 + round / 3) / 5);
        match round % 3 {
            0 => signal(&first.workers()?, libc::SIGKILL),
            1 => signal(&second.workers()?, libc::SIGKILL),
            _ => signal(&children(child.id())?, libc::SIGKILL),
        }
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let expected: &[_] = if round % 3 == 2 {
            &[""]
        } else {
            &["ok\n", "error\n"]
        };
        ensure!(
            expected.contains(&said.as_str()),
            "round {round}: the application said {said:?}"
        );
        ensure!(order.wait_with_output().is_ok(), "no end of the move");
    }
    for round in 0..5 {
        let once = whole * round / 4;
        mover_killed(&first, &first_control, &second, once)
            .with_context(|| format!("its mover was killed after {once:?}"))?;
    }
    // The next application is served and can be moved, and nothing is left behind.
    let mut next = start_for(&first, "60")?;
    let text = send(&first, &first_control, "--all", &second.address)?;
    ensure!(text.contains(" moved to "), "{text}");
    signal(&[next.id().cast_signed()], libc::SIGTERM);
    next.wait()?;
    nobody_is_left([(&first, &first_control), (&second, &second_control)])?;
    let _ = fs::remove_file(&first_control);
    let _ = fs::remove_file(&second_control);
    Ok(())
}
