//! Measures the cost of moves for the moved application.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    Movable,
    pauses::{Application, Rounds},
    row,
};
use crate::median;

/// Number of moves of each kind.
const STOPS: usize = 5;
/// MiB that change in a round. A round must be short compared to a stop.
const CHANGED: usize = 1;
/// Argument that makes the application change another part of its state in each round.
const IN_TURN: usize = 0;
/// MiB of state, and how long Crane's applications with that much state stopped when they left and when they arrived.
const STATES: [(usize, &str, &str); 2] = [
    (16, "0.10 s (x264)", "0.83 s (x264)"),
    (256, "1.57 s (DeepCL)", "4.90 s (DeepCL)"),
];

fn start(pool: &Movable, size: usize) -> Result<Application> {
    start_with(pool, size, CHANGED)
}

fn start_with(pool: &Movable, size: usize, changed: usize) -> Result<Application> {
    let program = pool.pool.release.join("examples/opencl_pauses");
    let mut application = Application::start(pool.pool.remoted_for(300, program), size, changed)?;
    thread::sleep(Duration::from_millis(200));
    application.rounds()?;
    Ok(application)
}

/// Returns the rounds around a move, and how many seconds the command took.
fn around(
    application: &mut Application,
    from: &Movable,
    to: Option<&Movable>,
) -> Result<(Rounds, f64)> {
    thread::sleep(Duration::from_millis(100));
    application.rounds()?;
    let start = Instant::now();
    from.move_all(to)?;
    let seconds = start.elapsed().as_secs_f64();
    thread::sleep(Duration::from_millis(100));
    Ok((application.rounds()?, seconds))
}

/// Measures the application's stop for each size of its state.
pub fn stops(pools: &[Movable; 2]) -> Result<()> {
    let [one, two] = pools;
    for (size, leaving, arriving) in STATES {
        let mut application = start(one, size)?;
        let ways = [
            ("to another worker of its pool", leaving, vec![(one, None)]),
            (
                "to another pool, and back",
                arriving,
                vec![(one, Some(two)), (two, Some(one))],
            ),
        ];
        for (way, crane, steps) in ways {
            let (mut stops, mut all) = (Vec::new(), Vec::new());
            for _ in 0..STOPS {
                for (from, to) in &steps {
                    let (rounds, seconds) = around(&mut application, from, *to)?;
                    stops.push(rounds.stop());
                    all.push(seconds);
                }
            }
            let longest = stops.iter().copied().fold(0.0, f64::max);
            row(
                &format!("stop, {size} MiB of state, {way}"),
                crane,
                &format!(
                    "{:.1} ms (longest of {} {longest:.1}); the command takes {:.2} s",
                    median(stops.clone()),
                    stops.len(),
                    median(all)
                ),
            );
        }
        application.end()?;
        large_write_set(one, size)?;
    }
    Ok(())
}

/// Measures the stop of an application that rewrites all of its state, part after part, between one pre-copy round and
/// the next, alternating between postcopy and plain pre-copy.
fn large_write_set(pool: &Movable, size: usize) -> Result<()> {
    let mut application = start_with(pool, size, IN_TURN)?;
    let ways: [(&str, &[&str]); 2] = [("pre-copy", &[]), ("postcopy", &["--postcopy"])];
    let mut stops = [Vec::new(), Vec::new()];
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..STOPS {
        for (way, (_, options)) in ways.iter().enumerate() {
            thread::sleep(Duration::from_millis(100));
            application.rounds()?;
            let start = Instant::now();
            pool.move_by(options)?;
            all[way].push(start.elapsed().as_secs_f64());
            thread::sleep(Duration::from_millis(100));
            stops[way].push(application.rounds()?.stop());
        }
    }
    application.end()?;
    for (way, (name, _)) in ways.iter().enumerate() {
        let longest = stops[way].iter().copied().fold(0.0, f64::max);
        row(
            &format!("stop, {size} MiB of state that is all written meanwhile, {name}"),
            "",
            &format!(
                "{:.1} ms (longest of {STOPS} {longest:.1}); the command takes {:.2} s",
                median(stops[way].clone()),
                median(all[way].clone())
            ),
        );
    }
    Ok(())
}

/// Measures the rate of an application from the beginning of a move to its end, and with a move every second.
pub fn rates(pools: &[Movable; 2]) -> Result<()> {
    let [pool, other] = pools;
    for (size, ..) in STATES {
        let mut application = start(pool, size)?;
        thread::sleep(Duration::from_secs(2));
        let alone = application.rounds()?;
        let ways = [
            (
                "to another worker of its pool",
                [(pool, None), (pool, None)],
            ),
            (
                "to another pool, and back",
                [(pool, Some(other)), (other, Some(pool))],
            ),
        ];
        for (way, steps) in ways {
            let mut amid = Vec::new();
            for (from, to) in [steps, steps].concat() {
                thread::sleep(Duration::from_millis(100));
                application.rounds()?;
                from.move_all(to)?;
                amid.push(application.rounds()?);
            }
            let of = |what: fn(&Rounds) -> f64| median(amid.iter().map(what).collect());
            row(
                &format!("rate, {size} MiB of state, amid a move {way}"),
                "33 % (20.1 of 60 frames/s, x264 while RAM moves)",
                &format!(
                    "{:.1} % of {:.0} rounds/s; median round {:.3} ms of {:.3} alone, longest {:.1} ms; {:.2} s",
                    100.0 * of(Rounds::rate) / alone.rate(),
                    alone.rate(),
                    of(|rounds| rounds.median),
                    alone.median,
                    of(|rounds| rounds.longest),
                    of(|rounds| rounds.seconds)
                ),
            );
        }
        application.rounds()?;
        let until = Instant::now() + Duration::from_secs(5);
        let mut moves = 0;
        while Instant::now() < until {
            let next = Instant::now() + Duration::from_secs(1);
            pool.move_all(None)?;
            moves += 1;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        let often = application.rounds()?.rate();
        application.end()?;
        row(
            &format!("rate, {size} MiB of state, with {moves} moves to other workers in 5 s"),
            "",
            &format!("{:.1} %", 100.0 * often / alone.rate()),
        );
    }
    Ok(())
}

/// The resources that a pool holds, and its use of the device.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    descriptors: usize,
    mappings: usize,
    workers: usize,
    /// KiB.
    resident: u64,
}

impl Held {
    fn by(pool: &Movable) -> Result<Self> {
        let folder = format!("/proc/{}", pool.pool.id());
        let status = fs::read_to_string(format!("{folder}/status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        Ok(Self {
            descriptors: fs::read_dir(format!("{folder}/fd"))?.count(),
            mappings: fs::read_to_string(format!("{folder}/maps"))?
                .lines()
                .count(),
            workers: pool.pool.workers()?.len(),
            resident: resident.context("a pool without memory")?,
        })
    }

    /// Measures once ended processes are gone, and a pool has started the worker that it held back for an application
    /// from the other pool.
    fn at_rest(pools: &[Movable; 2]) -> Result<[Self; 2]> {
        thread::sleep(Duration::from_secs(7));
        Ok([Self::by(&pools[0])?, Self::by(&pools[1])?])
    }
}

/// MiB of device memory in use, if this can be queried.
fn device_memory() -> Option<u64> {
    let mut smi = Command::new("nvidia-smi");
    smi.args(["--query-gpu=memory.used", "--format=csv,noheader,nounits"]);
    let output = smi.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Moves one application many times, and checks its results and what is left behind.
pub fn many(pools: &[Movable; 2], count: usize) -> Result<()> {
    let [one, two] = pools;
    // What a first move allocates permanently exists before the measurement.
    let mut application = start(one, 16)?;
    around(&mut application, one, None)?;
    around(&mut application, one, Some(two))?;
    around(&mut application, two, Some(one))?;
    application.end()?;
    let (before, memory) = (Held::at_rest(pools)?, device_memory());
    let mut application = start(one, 16)?;
    let steps = [(one, None), (one, Some(two)), (two, None), (two, Some(one))];
    let begun = Instant::now();
    let mut longest = 0.0f64;
    for (from, to) in steps.into_iter().cycle().take(count) {
        from.move_all(to)?;
        longest = longest.max(application.rounds()?.stop());
    }
    let seconds = begun.elapsed().as_secs_f64();
    let said = application.end()?;
    let (after, left) = (Held::at_rest(pools)?, device_memory());
    let grown: Vec<_> = before
        .iter()
        .zip(&after)
        .map(|(before, after)| {
            format!(
                "descriptors {} to {}, mappings {} to {}, workers {} to {}, resident {} to {} KiB",
                before.descriptors,
                after.descriptors,
                before.mappings,
                after.mappings,
                before.workers,
                after.workers,
                before.resident,
                after.resident
            )
        })
        .collect();
    let device = memory
        .zip(left)
        .map(|(before, after)| format!("; device memory {before} to {after} MiB"))
        .unwrap_or_default();
    row(
        &format!("lost pages, wrong results, leaks in {count} moves"),
        "not published",
        &format!(
            "0: {said}, in {seconds:.0} s, longest stop {longest:.1} ms; pools: {}{device}",
            grown.join("; ")
        ),
    );
    let stays = before.iter().zip(&after).all(|(before, after)| {
        after.descriptors <= before.descriptors && after.workers <= before.workers
    });
    ensure!(stays, "a pool has more open than before: {grown:?}");
    Ok(())
}
