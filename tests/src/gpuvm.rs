//! What a virtual GPU costs a guest with nouveau as Debian ships it: counts of exits to the VMM and
//! of page table accesses. Nothing here is a time, since the CPU is emulated.
//!
//! GPUvm's mechanisms are enabled one by one: `remap` (BAR remap) and `lazy` (lazy shadowing).
//! GPUvm did not have `watch`: only table pages that were written are compared.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

pub mod record;
pub mod replay;
pub mod shares;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::{
    gantry::Gantry,
    guest::Guest,
    rig::images::L2_GPU,
    scenarios::{Context, gf100::does, virtual_gpu::Mediated},
};

/// Flushes and submissions to count one by one.
const FLUSHES: u64 = 100;
const SUBMISSIONS: u64 = 100;

/// Modes: a name, and whether `remap`, `lazy` and `watch` are enabled.
const MODES: &[(&str, [bool; 3])] = &[
    ("all", [true, true, true]),
    ("remap and lazy (GPUvm, FV optimized)", [true, true, false]),
    ("remap (GPUvm, FV BAR remap)", [true, false, false]),
    ("lazy (GPUvm, FV lazy)", [false, true, false]),
    ("none (GPUvm, FV naive)", [false, false, false]),
];

/// Counters by name.
type Counts = BTreeMap<String, u64>;

fn counts(gantry: &Gantry) -> Result<Counts> {
    let all = gantry.ok("GET", "vm.counters", None)?;
    let its = all["gpu"].as_object().context("the GPU has no counters")?;
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    Ok(its
        .iter()
        .map(|(name, value)| (name.clone(), number(value)))
        .collect())
}

fn since(before: &Counts, now: &Counts) -> Counts {
    let spent = |(name, count): (&String, &u64)| {
        let earlier = before.get(name).copied().unwrap_or(0);
        (name.clone(), count.saturating_sub(earlier))
    };
    now.iter().map(spent).collect()
}

fn get(counts: &Counts, name: &str) -> u64 {
    counts.get(name).copied().unwrap_or(0)
}

/// The counters of a virtual GPU that count exits to the VMM.
pub const EXIT_COUNTERS: [&str; 5] = [
    "register_reads",
    "register_writes",
    "bar_reads",
    "bar_writes",
    "doorbells",
];

/// Exits to the VMM.
fn exits(counts: &Counts) -> u64 {
    EXIT_COUNTERS.iter().map(|name| get(counts, name)).sum()
}

/// Loads nouveau and runs the copy test, however long it takes. With all accesses trapped that is a
/// million exits and several minutes, in which the guest's CPU does nothing else. While the number
/// of exits grows, the guest has not stopped.
fn start_and_copy(gantry: &Gantry, guest: &mut Guest) -> Result<()> {
    let modules = L2_GPU.join(" ");
    guest.run(&format!(
        "(for m in {modules}; do [ ! -e /modules/$m.ko ] || insmod /modules/$m.ko; done; \
         agent gpu-check; echo finished) >/tmp/work 2>&1 &"
    ))?;
    let mut seen = 0;
    loop {
        if let Ok(said) = guest.eventually("cat /tmp/work", |text| text.contains("finished")) {
            ensure!(said.contains("gpu works"), "it says: {said}");
            return Ok(());
        }
        let now = exits(&counts(gantry)?);
        ensure!(
            now > seen,
            "nouveau's start does not go on, after {now} exits"
        );
        seen = now;
    }
}

/// Measures, and passes on a row for each figure.
pub fn measure(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    shares::measure(row)?;
    let dir = PathBuf::from("/tmp/bench-gpuvm");
    for (nth, (name, [remap, lazy, watch])) in MODES.iter().enumerate() {
        let dir = dir.join(nth.to_string());
        fs::create_dir_all(&dir)?;
        let context = Context { dir };
        let mediated = Mediated::start(&context)?;
        let switches = json!({"remap": remap, "lazy": lazy, "watch": watch});
        let (gantry, mut guest) = mediated.boot_with(&context, "guest", "", switches)?;
        if nth == 0 {
            let exits = exits_of_a_flush(&gantry, &mut guest)?;
            row(
                "exits of a flush of page tables, as nouveau does it",
                format!("{exits:.2}"),
            );
        }
        let before = counts(&gantry)?;
        start_and_copy(&gantry, &mut guest).with_context(|| format!("with {name}"))?;
        // Lets interrupts under way arrive.
        std::thread::sleep(Duration::from_secs(1));
        let spent = since(&before, &counts(&gantry)?);
        row(
            &format!("{name}: nouveau's start and the copy test, exits to the VMM"),
            exits(&spent).to_string(),
        );
        let parts: Vec<_> = spent
            .iter()
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        row(&format!("{name}: of that"), parts.join(", "));
        if nth == 0 {
            submissions(&gantry, &mut guest, row)?;
        }
    }
    Ok(())
}

/// Exits of a flush as nouveau does it, without a driver.
pub fn exits_of_a_flush(gantry: &Gantry, guest: &mut Guest) -> Result<f64> {
    let mut run = |count: u64| -> Result<u64> {
        let before = counts(gantry)?;
        does(guest, &format!("gpu-flush {count}"), "flushes")?;
        Ok(exits(&since(&before, &counts(gantry)?)))
    };
    // Costs that both runs have in common cancel out.
    let (few, many) = (run(FLUSHES)?, run(3 * FLUSHES)?);
    Ok(many.saturating_sub(few) as f64 / (2 * FLUSHES) as f64)
}

/// What a submission of nouveau's costs more, by counter: the difference of two runs, for this number of submissions.
fn of_submissions(gantry: &Gantry, guest: &mut Guest) -> Result<(Counts, f64)> {
    let mut run = |count: u64| -> Result<Counts> {
        let before = counts(gantry)?;
        does(guest, &format!("gpu-submit {count}"), "submissions")?;
        Ok(since(&before, &counts(gantry)?))
    };
    let (few, many) = (run(SUBMISSIONS)?, run(3 * SUBMISSIONS)?);
    Ok((since(&few, &many), (2 * SUBMISSIONS) as f64))
}

/// Doorbells of a submission of nouveau's.
pub fn doorbells_of_a_submission(gantry: &Gantry, guest: &mut Guest) -> Result<f64> {
    let (more, submissions) = of_submissions(gantry, guest)?;
    Ok(get(&more, "doorbells") as f64 / submissions)
}

/// Cost of one of nouveau's submissions.
fn submissions(
    gantry: &Gantry,
    guest: &mut Guest,
    row: &mut dyn FnMut(&str, String),
) -> Result<()> {
    let (more, submissions) = of_submissions(gantry, guest)?;
    let each = |count: u64| format!("{:.2}", count as f64 / submissions);
    row(
        "a submission of nouveau's: doorbells",
        each(get(&more, "doorbells")),
    );
    row(
        "a submission of nouveau's: all exits, those of its interrupts and flushes among them",
        each(exits(&more)),
    );
    row(
        "a submission of nouveau's: flushes",
        each(get(&more, "flushes")),
    );
    row(
        "a submission of nouveau's: interrupts",
        each(get(&more, "interrupts")),
    );
    Ok(())
}
