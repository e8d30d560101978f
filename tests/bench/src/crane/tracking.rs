//! Measures what movability costs applications that are never moved. A worker always records how
//! each object was created, so the only baseline is the driver without any worker. The ratios are
//! therefore those of remoting as a whole, including tracking. A seat in a guest is the same
//! worker, on the guest's driver.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::Result;
use gantry_tests::rig::packages;

use super::{Movable, row};
use crate::median;

/// Number of runs of each program on each side, alternating.
pub(super) const RUNS: usize = 3;

/// Added time, or lost work per time, in percent of the native value.
pub(super) fn added(native: f64, remoted: f64, is_rate: bool) -> f64 {
    let ratio = if is_rate {
        native / remoted
    } else {
        remoted / native
    };
    100.0 * (ratio - 1.0)
}

/// Runs a program's own measurements on both sides: each value, and whether higher is better.
pub(super) fn both(
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

/// Kernels of three lengths back to back, and a launch with a wait.
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
