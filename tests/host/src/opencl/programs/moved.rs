//! Third-party programs give the same results as natively while their workers are replaced.

use std::{fs, path::Path};

use anyhow::{Result, ensure};
use gantry_tests::rig::packages;

use super::{
    both_ways,
    case::Case,
    results::{Results, by_clblast, by_end, by_piglit},
    through_gantry,
};
use crate::opencl::{
    applications::program,
    moves::{self, Mover},
    pool::{PIGLIT, Pool},
};

/// Programs needed in addition to what all scenarios need.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("clblast_test_xaxpy", "clblast-tests"),
    ("clFFT-client", "clfft-client"),
];

/// Minimum number of moves.
const MOVES: usize = 10;

/// Maximum number of runs of all programs to reach it: on a fast machine, many end before they can
/// be moved.
const TURNS: usize = 100;

/// piglit's API tests that do not end at once.
const API: &[&str] = &["cl-api-build-program", "cl-api-link-program"];

/// piglit's programs for devices: with images, and with many kernels.
const FOR_DEVICES: &[&str] = &[
    "tests/cl/program/execute/image-write-2d.cl",
    "generated_tests/cl/builtin/misc/builtin-shuffle-int-uint.cl",
    "generated_tests/cl/builtin/math/builtin-float-remquo-1.0.generated.cl",
];

fn cases() -> Vec<Case> {
    let piglit = Path::new(PIGLIT);
    let tester = piglit.join("bin/cl-program-tester");
    let api = API.iter().map(|name| {
        let path = piglit.join("bin").join(name);
        Case::new(path, ["-auto"], by_piglit)
    });
    let for_devices = FOR_DEVICES.iter().map(|name| {
        let path = piglit.join(name);
        Case::new(&tester, [&path.to_string_lossy(), "-auto"], by_piglit)
    });
    // pyopencl's own tests would have to be fetched first, so this is a program that uses it.
    let pyopencl = program("parts.py");
    let pyopencl = [&*pyopencl.to_string_lossy()];
    let lengths = ["-x", "16", "-y", "16", "-z", "16"];
    let others = [
        Case::new("/usr/bin/python3", pyopencl, by_end),
        Case::new("clFFT-client", lengths, by_end),
        Case::new("clblast_test_xaxpy", [], by_clblast),
    ];
    api.chain(for_devices).chain(others).collect()
}

/// Runs all programs on both sides until their workers have changed often enough.
pub fn run(pool: &Pool) -> Result<()> {
    packages::install(PROGRAMS)?;
    let (pool, control) = moves::movable(pool, "moved-foreign")?;
    let mover = Mover::start(&pool, &control, &[]);
    let cases = cases();
    let mut natively = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let (native, moved) = both_ways(&pool, case, index)?;
        let passes = |result: &String| result.starts_with("pass");
        ensure!(native.values().all(passes), "natively: {native:?}");
        is_same(&native, &moved)?;
        natively.push(native);
    }
    for _ in 1..TURNS {
        if mover.moves() >= MOVES {
            break;
        }
        for (index, (case, native)) in cases.iter().zip(&natively).enumerate() {
            is_same(native, &through_gantry(&pool, case, index)?)?;
        }
    }
    let lines = mover.end();
    let _ = fs::remove_file(&control);
    moves::has_moved(&lines, MOVES)
}

fn is_same(native: &Results, moved: &Results) -> Result<()> {
    ensure!(native == moved, "natively: {native:?}\nmoved: {moved:?}");
    Ok(())
}
