//! Measures the cost of GLoop, compared with native kernels in the same run.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use gloop::{
    cuda::Args,
    job::{Grid, Job, State},
};

use crate::{
    bed::Bed,
    files::Grep,
    images::Images,
    servers::Matmul,
    single::{LavaMd, Steps, Tpacf},
    sorting::HybridSort,
};

/// Each figure is the median of this many runs.
const RUNS: usize = 5;
/// The number of threads that read files when the kernel does not.
const READERS: usize = 8;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn percentile(times: &mut [f64], part: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() as f64 * part) as usize).min(times.len() - 1)]
}

fn seconds(run: impl Fn() -> Result<Duration>) -> Result<f64> {
    run()?;
    let times = (0..RUNS).map(|_| Ok(run()?.as_secs_f64()));
    Ok(median(times.collect::<Result<_>>()?))
}

fn row(what: &str, native: &str, here: &str, thesis: &str, reach: &str) {
    println!("| {what} | {native} | {here} | {thesis} | {reach} |");
}

type Figure = fn(&Bed) -> Result<()>;

const FIGURES: &[(&str, Figure)] = &[
    ("points", points),
    ("split", split),
    ("stops", stops),
    ("lavamd", lavamd),
    ("tpacf", tpacf),
    ("hybridsort", hybridsort),
    ("grep", grep),
    ("img", img),
    ("matmul", matmul),
    ("free", free),
];

/// Measures everything, or only the named figures.
pub fn run(bed: &Bed, only: &[String]) -> Result<()> {
    let unknown = |name: &&String| FIGURES.iter().all(|(known, _)| known != name);
    if let Some(name) = only.iter().find(unknown) {
        let known: Vec<_> = FIGURES.iter().map(|(name, _)| *name).collect();
        bail!("there is no figure {name}: {}", known.join(", "));
    }
    println!("{}; medians of {RUNS} runs", bed.machine());
    println!("| what | native | GLoop | thesis | to reach |\n|---|---|---|---|---|");
    for (name, figure) in FIGURES {
        if only.is_empty() || only.iter().any(|one| one == name) {
            figure(bed)?;
        }
    }
    Ok(())
}

fn lavamd(bed: &Bed) -> Result<()> {
    let program = LavaMd::new(bed, 50)?;
    let mut job = program.job(bed)?;
    let vanilla = seconds(|| program.vanilla(bed))?;
    let looped = looped(&mut job)?;
    let split = seconds(|| program.split(bed, 5000))?;
    overhead("LavaMD, 125,000 boxes", vanilla, looped, split, "2 %");
    Ok(())
}

fn tpacf(bed: &Bed) -> Result<()> {
    let program = Tpacf::new(bed, 1056)?;
    let mut job = program.job(bed)?;
    let vanilla = seconds(|| program.vanilla(bed))?;
    let looped = looped(&mut job)?;
    let split = seconds(|| program.split(bed, 50))?;
    overhead("TPACF, 270,336 points", vanilla, looped, split, "2 %");
    Ok(())
}

/// Runs a job from start to end, and returns the median time.
fn looped(job: &mut Job) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..=RUNS {
        let start = Instant::now();
        job.resume()?;
        job.finish()?;
        times.push(start.elapsed().as_secs_f64());
        job.rewind()?;
    }
    times.remove(0);
    Ok(median(times))
}

fn hybridsort(bed: &Bed) -> Result<()> {
    let program = HybridSort::new(bed, 64 << 20)?;
    let vanilla = seconds(|| program.vanilla(bed))?;
    let mut jobs = program.jobs(bed)?;
    program.looped(&mut jobs)?;
    let times = (0..RUNS).map(|_| Ok(program.looped(&mut jobs)?.as_secs_f64()));
    let looped = median(times.collect::<Result<_>>()?);
    let split = seconds(|| program.split(bed))?;
    overhead("hybridsort, 64 Mi floats", vanilla, looped, split, "5 %");
    Ok(())
}

fn overhead(what: &str, vanilla: f64, looped: f64, split: f64, reach: &str) {
    row(
        &format!("{what} (ms; split {:.2})", split * 1e3),
        &format!("{:.2}", vanilla * 1e3),
        &format!(
            "{:.2} ({:+.1} %)",
            looped * 1e3,
            (looped / vanilla - 1.0) * 1e2
        ),
        "-0.2 to 7.3 %",
        reach,
    );
}

fn steps(bed: &Bed, count: u32, cycles: u32) -> Result<(gloop::cuda::Buffer, Steps)> {
    let out = bed.runtime.gpu().allocate(528 * 4)?;
    let steps = Steps {
        out: out.at(),
        count,
        cycles,
    };
    Ok((out, steps))
}

/// The cost of a scheduling point, in nanoseconds compared with the vanilla kernel.
fn points(bed: &Bed) -> Result<()> {
    const COUNT: u32 = 100_000;
    let (_out, steps) = steps(bed, COUNT, 0)?;
    let vanilla = bed.kernel("throttle", "vanilla")?;
    for (name, what, goals) in [
        ("posted", "scheduling point (ns)", ["450", "500", "700"]),
        (
            "posted_device",
            "the same, loop in device memory (ns)",
            ["", "", ""],
        ),
        ("checked", "gated check (ns)", ["100", "150", "200"]),
    ] {
        for (threads, goal) in [1, 256, 1024].into_iter().zip(goals) {
            let args = || Args::new().with(steps);
            let native = seconds(|| bed.native(&vanilla, 132, threads, &args()))?;
            let grid = Grid::logical(132).threads(threads).blocks(132);
            let mut job = bed
                .runtime
                .prepare(&bed.kernel("throttle", name)?, grid, args())?;
            let cost = (looped(&mut job)? - native) / f64::from(COUNT) * 1e9;
            let thesis = if name == "posted" && threads == 1 {
                "1,230"
            } else {
                ""
            };
            row(
                &format!("{what}, {threads} threads, 132 blocks"),
                &format!("{:.1} a step", native / f64::from(COUNT) * 1e9),
                &format!("{cost:.0}"),
                thesis,
                goal,
            );
        }
    }
    Ok(())
}

/// Throttle compared with one launch per step.
fn split(bed: &Bed) -> Result<()> {
    const COUNT: u32 = 100_000;
    let (_out, steps) = steps(bed, COUNT, 0)?;
    let args = || Args::new().with(steps);
    let kernel = bed.kernel("throttle", "split")?;
    let split = seconds(|| {
        let args = args();
        let start = Instant::now();
        for _ in 0..COUNT {
            bed.stream.launch(&kernel, 1, 1, 0, None, &args)?;
        }
        bed.stream.wait()?;
        Ok(start.elapsed())
    })?;
    let grid = Grid::logical(1).blocks(1);
    let mut job = bed
        .runtime
        .prepare(&bed.kernel("throttle", "posted")?, grid, args())?;
    let posted = looped(&mut job)?;
    row(
        "throttle, 1 block of 1 thread: against kernel split",
        &format!("{:.2} us a launch", split / f64::from(COUNT) * 1e6),
        &format!(
            "{:.0} ns a step, {:.1} times faster",
            posted / f64::from(COUNT) * 1e9,
            split / posted
        ),
        "4.36 times",
        "8 times",
    );
    Ok(())
}

/// The time from the store to an idle stream, and from there back to running.
fn stops(bed: &Bed) -> Result<()> {
    const STOPS: usize = 2000;
    for (what, us, name) in [
        ("1 us steps, posted", 1, "posted"),
        ("1 us steps, checked", 1, "checked"),
        ("10 us steps, checked", 10, "checked"),
    ] {
        let cycles = bed.runtime.gpu().clock / 1000 * us;
        let (_out, steps) = steps(bed, u32::MAX, cycles)?;
        let kernel = bed.kernel("throttle", name)?;
        let grid = Grid::logical(528).threads(256).blocks(528);
        let mut job = bed
            .runtime
            .prepare(&kernel, grid, Args::new().with(steps))?;
        let mut random = fastrand::Rng::with_seed(3);
        let (mut times, mut launches) = (Vec::new(), Vec::new());
        for _ in 0..STOPS {
            let start = Instant::now();
            job.resume()?;
            launches.push(start.elapsed().as_secs_f64() * 1e6);
            let wait = Duration::from_micros(random.u64(100..300));
            while start.elapsed() < wait {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            let state = job.suspend()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            anyhow::ensure!(state == State::Ready, "it was to stop: {state:?}");
        }
        row(
            &format!("stop of 528 blocks of 256 threads, {what} (us, median/P99/max of {STOPS})"),
            "does not stop",
            &format!(
                "{:.1} / {:.1} / {:.1}; launch call {:.1}",
                percentile(&mut times, 0.5),
                percentile(&mut times, 0.99),
                percentile(&mut times, 1.0),
                percentile(&mut launches, 0.5),
            ),
            "2,500 polling",
            if us == 1 { "P99 20" } else { "P99 50" },
        );
    }
    Ok(())
}

fn grep(bed: &Bed) -> Result<()> {
    let program = Grep::new(528, 1 << 20, 32)?;
    let native = seconds(|| program.vanilla(bed, 1))?;
    let together = seconds(|| program.vanilla(bed, READERS))?;
    let split = seconds(|| program.split(bed))?;
    let (mut job, memory) = program.job(bed)?;
    memory[0].clear()?;
    let looped = looped(&mut job)?;
    row(
        &format!(
            "grep, 528 files of 1 MiB, 32 words (ms; files are read by host or kernel; split {:.1})",
            split * 1e3
        ),
        &format!(
            "{:.1}; {:.1} if {READERS} threads read",
            native * 1e3,
            together * 1e3
        ),
        &format!("{:.1} ({:.2} times)", looped * 1e3, looped / native),
        "1.08 times",
        "1.02 times",
    );
    Ok(())
}

fn img(bed: &Bed) -> Result<()> {
    let program = Images::new(528, 3, 4000)?;
    let native = seconds(|| program.vanilla(bed))?;
    let split = seconds(|| program.split(bed, 100))?;
    let (mut job, _memory) = program.job(bed)?;
    let looped = looped(&mut job)?;
    row(
        &format!(
            "img, 528 images among 12,000 (ms; databases are read by host or kernel; split {:.1})",
            split * 1e3
        ),
        &format!("{:.1}", native * 1e3),
        &format!("{:.1} ({:.2} times)", looped * 1e3, looped / native),
        "3.88 to 5.68 times of GPUfs",
        "",
    );
    Ok(())
}

/// A server alone, and one that is stopped for a moment every millisecond.
fn matmul(bed: &Bed) -> Result<()> {
    for (what, stopped) in [("alone", false), ("stopped every 1 ms", true)] {
        let mut program = Matmul::new(bed, 4)?;
        let mut times = program.round(100, |job| {
            job.resume()?;
            if stopped {
                stop_often(job)
            } else {
                Ok(job.finish()?)
            }
        })?;
        program.close()?;
        times.sort();
        let at = |part: f64| {
            times[((times.len() as f64 * part) as usize).min(times.len() - 1)].as_secs_f64() * 1e3
        };
        row(
            &format!("matmul server, {what}: a request of 4 clients (ms, median/P99)"),
            "",
            &format!("{:.2} / {:.2}", at(0.5), at(0.99)),
            "",
            "",
        );
    }
    Ok(())
}

/// Stops a job every millisecond until it is done.
fn stop_often(job: &mut Job) -> Result<()> {
    loop {
        std::thread::sleep(Duration::from_millis(1));
        if job.suspend()? == State::Done {
            return Ok(());
        }
        job.resume()?;
    }
}

/// A call that waits for running kernels, beside an eater that never ends.
fn free(bed: &Bed) -> Result<()> {
    let (_out, steps) = steps(bed, u32::MAX, bed.runtime.gpu().clock / 100)?;
    let kernel = bed.kernel("throttle", "checked")?;
    let grid = Grid::logical(528).threads(256).blocks(528);
    let mut job = bed
        .runtime
        .prepare(&kernel, grid, Args::new().with(steps))?;
    let (mut times, mut drops) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        job.resume()?;
        let (memory, other) = {
            std::thread::sleep(Duration::from_micros(300));
            let gpu = bed.runtime.gpu();
            (gpu.allocate(1 << 20)?, gpu.allocate(1 << 20)?)
        };
        let start = Instant::now();
        drop(other);
        drops.push(start.elapsed().as_secs_f64() * 1e3);
        let start = Instant::now();
        job.suspend()?;
        drop(memory);
        job.resume()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        job.suspend()?;
    }
    row(
        "cuMemFree beside an eater, which is stopped for it (ms, median/P99)",
        "never returns",
        &format!(
            "{:.3} / {:.3}",
            percentile(&mut times, 0.5),
            percentile(&mut times, 0.99)
        ),
        "",
        "1",
    );
    row(
        "a buffer dropped beside an eater that goes on, freed when it stops (ms, median/P99)",
        "never returns",
        &format!(
            "{:.4} / {:.4}",
            percentile(&mut drops, 0.5),
            percentile(&mut drops, 0.99)
        ),
        "",
        "1",
    );
    Ok(())
}
