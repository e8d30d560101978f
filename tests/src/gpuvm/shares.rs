//! How two guests with nouveau share a GPU, one with short commands and one with long ones,
//! according to the mediator's account.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use gpu_mediator::status::{Client, Status};
use serde_json::json;

use crate::scenarios::{Context, gf100::load, virtual_gpu::Mediated};

/// Name of the measurement in L1.
pub const NAME: &str = "gpuvm-shares";

/// MiB copied by a short and by a long submission: GPUvm's long commands compute 15 times as much.
/// Several short ones take longer than a guest, whose processor is emulated, needs for the next
/// one.
const SHORT: u32 = 8;
const LONG: u32 = 120;
/// How long two guests share the GPU, without the initial time before both use it.
const SHARING: Duration = Duration::from_secs(20);
const BEFORE: Duration = Duration::from_secs(4);
const WINDOW: Duration = Duration::from_millis(100);

/// Measures two policies.
pub fn measure(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    for policy in ["band", "fifo"] {
        share(policy, row).with_context(|| format!("sharing by {policy}"))?;
    }
    Ok(())
}

/// Two guests work, and the mediator's status is sampled.
fn share(policy: &str, row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = PathBuf::from("/tmp/bench-gpuvm").join(policy);
    fs::create_dir_all(&dir)?;
    let context = Context { dir };
    let mediated = Mediated::start_with(&context, policy)?;
    let mut guests = Vec::new();
    for size in [SHORT, LONG] {
        let name = size.to_string();
        let (gantry, mut guest) = mediated.boot_with(&context, &name, "", json!({}))?;
        load(&mut guest)?;
        guests.push((gantry, guest, size));
    }
    for (_, guest, size) in &mut guests {
        let seconds = (BEFORE + SHARING + BEFORE).as_secs();
        guest.run(&format!(
            "agent gpu-load {size} {seconds} >/tmp/load 2>&1 &"
        ))?;
    }
    std::thread::sleep(BEFORE);
    let start = Instant::now();
    let mut seen = vec![mediated.status()?];
    while start.elapsed() < SHARING {
        // No window is shorter, even if this process is late.
        std::thread::sleep(WINDOW);
        seen.push(mediated.status()?);
    }
    for (_, guest, _) in &mut guests {
        guest.eventually("cat /tmp/load", |text| text.contains("are done"))?;
    }
    let mut row = |what: &str, figure: String| {
        row(
            &format!("{policy}, two guests, submissions of {SHORT} and {LONG} MiB: {what}"),
            figure,
        )
    };
    for windows in [1, 5] {
        let moments: Vec<_> = seen.iter().step_by(windows).collect();
        let pairs: Vec<_> = moments
            .windows(2)
            .map(|two| Stretch::new(two[0], two[1]))
            .collect();
        let ratios = pairs.iter().map(Stretch::ratio);
        let lengths = pairs.iter().map(|two| two.time);
        row(
            &format!(
                "Min-Max Ratio per {} ms: mean, worst; ms that a window has, mean",
                WINDOW.as_millis() * windows as u128
            ),
            format!(
                "{:.3}, {:.3}; {:.0}",
                mean(ratios.clone()),
                ratios.fold(1.0, f64::min),
                mean(lengths) / 1e6
            ),
        );
    }
    let all = Stretch::new(&seen[0], &seen[seen.len() - 1]);
    let each =
        |figure: fn(&Client) -> u64, unit: f64| all.each(figure).map(move |figure| figure / unit);
    row(
        "part of the time for which the GPU was somebody's, %",
        format!(
            "{:.1}",
            each(|client| client.device_time, all.time).sum::<f64>() * 100.0
        ),
    );
    let wants = |client: &Client| client.device_time + client.queueing_time;
    for (what, figures) in [
        (
            "part of the time for which each had something submitted, %",
            each(wants, all.time / 100.0),
        ),
        ("submissions of each", each(|client| client.calls, 1.0)),
        ("turns of each", each(|client| client.turns, 1.0)),
        (
            "ms of GPU time of each",
            each(|client| client.device_time, 1e6),
        ),
    ] {
        let figures: Vec<_> = figures.map(|figure| format!("{figure:.0}")).collect();
        row(what, figures.join(" and "));
    }
    Ok(())
}

fn mean(figures: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = figures.len() as f64;
    figures.sum::<f64>() / count
}

/// The interval between two samples.
struct Stretch<'a> {
    clients: Vec<(&'a Client, &'a Client)>,
    /// Duration in nanoseconds on the mediator's clock.
    time: f64,
}

impl<'a> Stretch<'a> {
    fn new(before: &'a Status, after: &'a Status) -> Self {
        Self {
            clients: before.clients.iter().zip(&after.clients).collect(),
            time: (after.uptime - before.uptime) as f64,
        }
    }

    /// The increase of a figure for each client.
    fn each(&self, figure: fn(&Client) -> u64) -> impl Iterator<Item = f64> {
        let clients = self.clients.iter();
        clients.map(move |(before, after)| figure(after).saturating_sub(figure(before)) as f64)
    }

    /// The smaller share of the GPU time divided by the larger one: 1 if both are equal.
    fn ratio(&self) -> f64 {
        let used = || self.each(|client| client.device_time);
        used().fold(f64::MAX, f64::min) / used().fold(1.0, f64::max)
    }
}
