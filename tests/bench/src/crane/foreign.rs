//! Third-party programs: what it costs them to be served by workers, and to be moved every 50 to 500 ms, to another
//! worker of a pool and to another pool. Their results must not change with moves.
//!
//! x264 keeps a buffer mapped from its beginning to its end, so it cannot move to another pool: another pool has
//! another window, and memory that a program has pointers to stays in the window that it has.

use std::{
    collections::BTreeMap,
    fmt, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use gantry_tests::rig::{packages, root_fs};

use super::{
    Movable, row,
    tracking::{RUNS, both},
};
use crate::median;

/// The programs, and the Debian packages of these and of what they open by name.
pub const PACKAGES: &[(&str, &str)] = &[
    ("x264", "x264"),
    ("clpeak", "clpeak"),
    (LOADER, "ocl-icd-opencl-dev"),
];
/// The name by which x264 opens the loader.
const LOADER: &str = "/usr/lib/x86_64-linux-gnu/libOpenCL.so";
/// Libraries that x264 links to read films, and does not call here. They in turn link most of the other libraries.
const UNCALLED: &[&str] = &["libffms2.so.5", "libavformat.so.59", "libavcodec.so.59"];
/// Their directory among the files for another machine.
const FOLDER: &str = "foreign";

/// Width and height of the pictures that x264 encodes.
const SIZE: (usize, usize) = (1280, 720);
/// Number of pictures for measuring the rate, and for comparing the output.
const PICTURES: (usize, usize) = (1000, 240);
/// Maximum run time in seconds.
pub const LONGEST: u32 = 300;

/// Packs the programs for another machine, together with all libraries that they link except the C library. Libraries
/// that they do not call are replaced by empty ones, since they would be too large.
pub fn pack(folder: &Path) -> Result<()> {
    packages::install(PACKAGES)?;
    let all = folder.join(FOLDER);
    let libraries = all.join("libraries");
    // An earlier run may have packed more.
    let _ = fs::remove_dir_all(&all);
    fs::create_dir_all(&libraries)?;
    for name in UNCALLED {
        let mut link = Command::new("cc");
        link.args(["-shared", "-nostdlib", "-x", "c", "/dev/null"])
            .arg(format!("-Wl,-soname,{name}"))
            .arg("-o")
            .arg(libraries.join(name));
        packages::run(&mut link)?;
    }
    let mut linked = String::new();
    for (name, _) in PACKAGES.iter().filter(|(name, _)| !name.contains('/')) {
        let program = Path::new("/usr/bin").join(name);
        linked += &packages::output(
            Command::new("ldd")
                .arg(&program)
                .env("LD_LIBRARY_PATH", &libraries),
        )?;
        fs::copy(&program, all.join(format!("{name}.program")))?;
        root_fs::script(
            &all.join(name),
            "#!/bin/sh\nhere=$(dirname \"$0\")\nexport LD_LIBRARY_PATH=\"$here/libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\"\nexec \"$0.program\" \"$@\"\n",
        )?;
    }
    for line in linked.lines() {
        let path = line
            .split_once("=> ")
            .map(|(_, rest)| rest.split(' ').next());
        let Some(path) = path
            .flatten()
            .map(Path::new)
            .filter(|path| path.is_absolute())
        else {
            continue;
        };
        if path.starts_with(&libraries) {
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let of_c = [
            "libc.",
            "libm.",
            "libdl.",
            "librt.",
            "libpthread.",
            "libresolv.",
        ];
        if !of_c.iter().any(|start| name.starts_with(start)) {
            fs::copy(path, libraries.join(&*name))?;
        }
    }
    let loader = libraries.join("libOpenCL.so");
    let _ = fs::remove_file(&loader);
    symlink("libOpenCL.so.1", loader)?;
    Ok(())
}

/// Finds a program where it was packed, or where it is installed.
fn find(pool: &Movable, name: &str) -> Option<PathBuf> {
    let brought = pool.pool.release.join(FOLDER).join(name);
    let installed = || packages::is_there(name).then(|| PathBuf::from(name));
    brought.exists().then_some(brought).or_else(installed)
}

/// Runs a program that measures bandwidths, arithmetic and latencies, like SHOC does.
pub fn clpeak(pools: &[Movable; 2]) -> Result<()> {
    let pool = &pools[0];
    let Some(program) = find(pool, "clpeak") else {
        row("clpeak", "", "left out: it is not there");
        return Ok(());
    };
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
    let all = both(pool, measure, &program)?;
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
    let alone = measure(pool.pool.remoted_for(LONGEST, &program))?;
    let (amid, moves) = moved(pools, Way::Both, || {
        measure(pool.pool.remoted_for(LONGEST, &program))
    })?;
    let ratios = alone.iter().filter(|(_, (_, is_rate))| *is_rate);
    let ratios: Vec<_> = ratios
        .filter_map(|(name, (value, _))| Some(amid.get(name)?.0 / value))
        .collect();
    ensure!(
        amid.len() == alone.len(),
        "{amid:?} are not all of {alone:?}"
    );
    row(
        &format!("clpeak, moved {moves} times: its figures of kernels, of those without moves"),
        "",
        &format!(
            "mean {:.1} %; it ends without an error",
            100.0 * ratios.iter().sum::<f64>() / ratios.len() as f64
        ),
    );
    Ok(())
}

/// The result of x264: pictures per second, and the checksum of its output.
struct Encoded {
    rate: f64,
    checksum: String,
}

/// Encodes with the device; `None` if x264 does not accept it.
fn encode(mut command: Command, folder: &Path, more: &[&str]) -> Result<Option<Encoded>> {
    let output = command
        .args(["--opencl", "--no-progress", "--demuxer", "raw"])
        .arg("--input-res")
        .arg(format!("{}x{}", SIZE.0, SIZE.1))
        .args(["--fps", "25", "--muxer", "raw", "-o", "encoded"])
        .args(more)
        .arg("video.yuv")
        .current_dir(folder)
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "x264 failed:\n{text}");
    if !text.contains("OpenCL acceleration enabled") {
        return Ok(None);
    }
    // x264 continues without the device if it fails.
    ensure!(!text.contains("[error]"), "x264 says:\n{text}");
    let line = text.lines().find(|line| line.contains(" fps,"));
    let line = line.with_context(|| format!("x264 does not say how fast it was:\n{text}"))?;
    let words: Vec<_> = line.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "fps,");
    let rate = at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok());
    let sum = packages::output(Command::new("sha256sum").arg(folder.join("encoded")))?;
    Ok(Some(Encoded {
        rate: rate.with_context(|| format!("no rate in {line:?}"))?,
        checksum: sum.chars().take(16).collect(),
    }))
}

/// Measures pictures per second and the output: natively, with workers, and while these are moved.
pub fn x264(pools: &[Movable; 2]) -> Result<()> {
    let pool = &pools[0];
    let Some(program) = find(pool, "x264") else {
        row("x264", "12.5 %", "left out: it is not there");
        return Ok(());
    };
    let folder = pool.pool.folder("video")?;
    write_video(&folder.join("video.yuv"))?;
    let native = || pool.pool.native_for(LONGEST, &program);
    let remoted = || pool.pool.remoted_for(LONGEST, &program);
    // With more threads, and while the driver compiles, the output depends on timing.
    let frames = PICTURES.1.to_string();
    let same = ["--threads", "1", "--frames", &frames];
    if encode(native(), &folder, &same)?.is_none() {
        row("x264", "12.5 %", "left out: it does not take this device");
        return Ok(());
    }
    let taken = |encoded: Option<Encoded>| encoded.context("x264 has not taken the device");
    taken(encode(remoted(), &folder, &same)?)?;
    let natively = taken(encode(native(), &folder, &same)?)?.checksum;
    let by_workers = taken(encode(remoted(), &folder, &same)?)?.checksum;
    let (amid, moves) = moved(pools, Way::Within, || {
        taken(encode(remoted(), &folder, &same)?)
    })?;
    row(
        &format!("x264 --opencl --threads 1: what is encoded of {frames} pictures"),
        "",
        &format!(
            "natively {natively}, by workers {by_workers}, moved {moves} times {}",
            amid.checksum
        ),
    );
    ensure!(
        natively == by_workers && by_workers == amid.checksum,
        "x264 has not encoded the same"
    );
    let (mut alone, mut served) = (Vec::new(), Vec::new());
    let mut amid = WITHIN.map(|way| (way, Vec::new(), 0));
    for _ in 0..RUNS {
        alone.push(taken(encode(native(), &folder, &[])?)?.rate);
        served.push(taken(encode(remoted(), &folder, &[])?)?.rate);
        for (way, rates, moves) in &mut amid {
            let work = || taken(encode(remoted(), &folder, &[])?);
            let (encoded, count) = moved(pools, *way, work)?;
            rates.push(encoded.rate);
            *moves += count;
        }
    }
    let all = format!("natively {alone:.1?}, by workers {served:.1?} frames/s");
    let (alone, served) = (median(alone), median(served));
    row(
        "the same: x264 --opencl, time for a picture",
        "12.5 %",
        &format!("{:+.2} % ({all})", 100.0 * (alone / served - 1.0)),
    );
    for (way, rates, moves) in amid {
        row(
            &format!("rate, x264 --opencl, {way}, {moves} times in {RUNS} runs"),
            "33 % (20.1 of 60 frames/s while RAM moves)",
            &format!(
                "{:.1} % of {served:.1} frames/s ({rates:.1?})",
                100.0 * median(rates.clone()) / served
            ),
        );
    }
    Ok(())
}

/// Where and how an application is moved.
#[derive(Clone, Copy, PartialEq)]
pub enum Way {
    /// To other workers of its pool.
    Within,
    /// The same, with postcopy.
    Postcopy,
    /// Alternating between another worker and another pool.
    Both,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Within => "moved within its pool",
            Self::Postcopy => "moved within its pool by postcopy",
            Self::Both => "moved within its pool and to another one",
        })
    }
}

/// The ways for an application that cannot move to another pool.
const WITHIN: [Way; 2] = [Way::Within, Way::Postcopy];

/// Runs some work while its application, which belongs to the first pool, is moved again 50 to 500 ms after each move.
/// Returns the result of the work, and the number of moves.
pub fn moved<T: Send>(
    pools: &[Movable; 2],
    way: Way,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<(T, usize)> {
    thread::scope(|scope| {
        let work = scope.spawn(work);
        let (mut moves, mut pause, mut at, mut last) = (0, 7, 0, None);
        let leaves = [false, way == Way::Both];
        for leaves in leaves.into_iter().cycle() {
            if work.is_finished() {
                break;
            }
            let (from, other) = (&pools[at], &pools[1 - at]);
            // The application may not exist yet, or may just have ended.
            let outcome = match way {
                Way::Postcopy => from.move_by(&["--postcopy"]),
                _ => from.move_all(leaves.then_some(other)),
            };
            match outcome {
                Ok(()) => {
                    moves += 1;
                    at = if leaves { 1 - at } else { at };
                }
                Err(error) => last = Some(error),
            }
            pause = (pause * 73 + 41) % 451;
            thread::sleep(Duration::from_millis(50 + pause));
        }
        let done = work.join();
        let done = done.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        match (moves, last) {
            (0, Some(error)) => Err(error.context("it was never moved")),
            (0, None) => bail!("it has ended before it was moved"),
            _ => Ok((done, moves)),
        }
    })
}

fn write_video(path: &Path) -> Result<()> {
    let ((width, height), (count, _)) = (SIZE, PICTURES);
    let file =
        fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut file = std::io::BufWriter::new(file);
    for picture in 0..count {
        let mut bytes = Vec::with_capacity(width * height * 3 / 2);
        for y in 0..height {
            bytes.extend((0..width).map(|x| ((x + 3 * picture) ^ (y + 2 * picture)) as u8));
        }
        bytes.extend((0..width * height / 2).map(|at| (at / width + picture) as u8));
        std::io::Write::write_all(&mut file, &bytes)?;
    }
    std::io::Write::flush(&mut file)?;
    Ok(())
}
