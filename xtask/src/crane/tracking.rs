//! What it costs applications that they can be moved, if nobody moves them. A worker records how
//! each object was made whatever is to come, so that there is nothing to compare with but the driver
//! without any worker: the ratios are those of remoting with all that it does, tracking included.
//! A seat in a guest is the same worker, before the guest's driver.

use std::{collections::BTreeMap, fs, path::Path, process::Command, time::Instant};

use anyhow::{Context, Result, ensure};
use gantry_tests::rig::packages;

use super::{Movable, median, row};

/// Runs of each program on either side, by turns.
const RUNS: usize = 3;
/// Width, height and number of the pictures that x264 encodes.
const VIDEO: (usize, usize, usize) = (1280, 720, 240);

/// How much longer it takes, or how much less is done in a time, in percent of what it is natively.
fn added(native: f64, remoted: f64, is_rate: bool) -> f64 {
    let ratio = if is_rate {
        native / remoted
    } else {
        remoted / native
    };
    100.0 * (ratio - 1.0)
}

/// What a program measures by itself, on either side: what, and whether more is better.
fn both(
    pool: &Movable,
    mut measure: impl FnMut(Command) -> Result<BTreeMap<String, (f64, bool)>>,
    program: &Path,
) -> Result<BTreeMap<String, f64>> {
    let mut seen: BTreeMap<String, [Vec<f64>; 2]> = BTreeMap::new();
    let mut rates = BTreeMap::new();
    for _ in 0..RUNS {
        let sides = [
            pool.pool.native_for(120, program),
            pool.pool.remoted_for(120, program),
        ];
        for (side, command) in sides.into_iter().enumerate() {
            for (name, (value, is_rate)) in measure(command)? {
                seen.entry(name.clone()).or_default()[side].push(value);
                rates.insert(name, is_rate);
            }
        }
    }
    Ok(seen
        .into_iter()
        .map(|(name, [native, remoted])| {
            let is_rate = rates[&name];
            let added = added(median(native), median(remoted), is_rate);
            (name, added)
        })
        .collect())
}

/// Kernels of three lengths back to back, and a launch with its wait.
pub fn kernels(pool: &Movable) -> Result<()> {
    let program = pool.pool.release.join("examples/opencl_figures");
    let measure = |mut command: Command| {
        let text = packages::output(&mut command)?;
        let lines = text.lines().filter_map(|line| {
            let mut parts = line.split('\t');
            let name = parts.next()?;
            let wanted = name.contains("back to back") || name.ends_with("+ finish");
            let value: f64 = parts.next()?.parse().ok()?;
            wanted.then(|| (name.to_owned(), (value, false)))
        });
        Ok(lines.collect())
    };
    for (name, added) in both(pool, measure, &program)? {
        let crane = match name.contains("back to back") {
            true => "-0.1 % (long jobs)",
            false => "",
        };
        row(
            &format!("remoted and tracked, of native: {name}"),
            crane,
            &format!("{added:+.2} %"),
        );
    }
    Ok(())
}

/// A program nobody here wrote, which measures bandwidths, arithmetic and latencies, as SHOC does.
pub fn clpeak(pool: &Movable) -> Result<()> {
    if !packages::is_there("clpeak") {
        row("clpeak", "", "left out: it is not there");
        return Ok(());
    }
    let measure = |mut command: Command| {
        let text = packages::output(command.args([
            "--global-bandwidth",
            "--compute-sp",
            "--kernel-latency",
        ]))?;
        let mut group = String::new();
        let mut all = BTreeMap::new();
        for line in text.lines() {
            let Some((name, value)) = line.split_once(':') else {
                line.trim().clone_into(&mut group);
                continue;
            };
            let (name, value) = (name.trim(), value.trim());
            let is_latency = value.ends_with("us");
            let Ok(value) = value.trim_end_matches(" us").parse::<f64>() else {
                continue;
            };
            all.insert(format!("{group}, {name}"), (value, !is_latency));
        }
        ensure!(!all.is_empty(), "clpeak has measured nothing:\n{text}");
        Ok(all)
    };
    let all = both(pool, measure, Path::new("clpeak"))?;
    let is_latency = |name: &str| name.contains("atency");
    let (latencies, kernels): (Vec<_>, Vec<_>) = all.iter().partition(|(name, _)| is_latency(name));
    let mean = kernels.iter().map(|(_, added)| **added).sum::<f64>() / kernels.len() as f64;
    row(
        &format!(
            "the same: clpeak, mean of {} figures of kernels",
            kernels.len()
        ),
        "5.25 % (mean of SHOC's level 1)",
        &format!("{mean:+.2} %"),
    );
    for (name, added) in latencies {
        row(
            &format!("the same: clpeak, {name}"),
            "",
            &format!("{added:+.2} %"),
        );
    }
    Ok(())
}

/// Pictures a second, with nobody's moves, and with one every half second.
pub fn x264(pool: &Movable) -> Result<()> {
    if !packages::is_there("x264") {
        row("x264", "12.5 %", "left out: it is not there");
        return Ok(());
    }
    let folder = pool.pool.folder("video")?;
    let video = folder.join("video.yuv");
    write_video(&video)?;
    let run = |mut command: Command| {
        let (width, height, _) = VIDEO;
        let output = command
            .args([
                "--opencl",
                "--no-progress",
                "--demuxer",
                "raw",
                "--input-res",
            ])
            .arg(format!("{width}x{height}"))
            .args(["--fps", "25", "--muxer", "raw", "-o", "/dev/null"])
            .arg(&video)
            .current_dir(&folder)
            .output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "x264 failed:\n{text}");
        if text.contains("OpenCL: Unable") || text.contains("failed to load OpenCL") {
            return Ok(BTreeMap::new());
        }
        let line = text.lines().find(|line| line.contains(" fps,"));
        let line = line.with_context(|| format!("x264 does not say how fast it was:\n{text}"))?;
        let words: Vec<_> = line.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "fps,");
        let rate = at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok());
        let rate: f64 = rate.with_context(|| format!("no rate in {line:?}"))?;
        Ok(BTreeMap::from([("x264".to_owned(), (rate, true))]))
    };
    let all = both(pool, run, Path::new("x264"))?;
    let Some(added) = all.get("x264") else {
        row("x264", "12.5 %", "left out: it does not take this device");
        return Ok(());
    };
    row(
        "the same: x264 --opencl, time for a picture",
        "12.5 %",
        &format!("{added:+.2} %"),
    );
    let alone = run(pool.pool.remoted_for(300, "x264"))?["x264"].0;
    let (moved, moves) = moved(pool, || {
        Ok(run(pool.pool.remoted_for(300, "x264"))?["x264"].0)
    })?;
    row(
        &format!("rate, x264 --opencl, moved {moves} times, one every half second"),
        "33 % (20.1 of 60 frames/s while RAM moves)",
        &format!("{:.1} % of {alone:.1} frames/s", 100.0 * moved / alone),
    );
    Ok(())
}

/// What comes of some work while the applications of a pool are moved every half second, and how
/// often they were.
fn moved<T: Send>(pool: &Movable, work: impl FnOnce() -> Result<T> + Send) -> Result<(T, usize)> {
    std::thread::scope(|scope| {
        let work = scope.spawn(work);
        let mut moves = 0;
        while !work.is_finished() {
            let next = Instant::now() + std::time::Duration::from_millis(500);
            // Before the application has come there is none to move.
            moves += usize::from(pool.move_all(None).is_ok());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        let done = work.join();
        let done = done.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        Ok((done?, moves))
    })
}

fn write_video(path: &Path) -> Result<()> {
    let (width, height, count) = VIDEO;
    let mut video = Vec::with_capacity(width * height * 3 / 2 * count);
    for picture in 0..count {
        for y in 0..height {
            video.extend((0..width).map(|x| ((x + 3 * picture) ^ (y + 2 * picture)) as u8));
        }
        video.extend((0..width * height / 2).map(|at| (at / width + picture) as u8));
    }
    fs::write(path, video).with_context(|| format!("cannot write {}", path.display()))
}
