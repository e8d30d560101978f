//! Measures how long programs take natively and through the driver, alternating.

use std::{fs, path::Path, process::Command, time::Instant};

use anyhow::Result;
use gantry_host_tests::opencl::{pool::Pool, programs::case::Case};

use crate::median;

/// The column headings of [`rows`].
pub const HEAD: &str = "| program | natively, first (s) | natively, again (s) | through Gantry, \
                        first (s) | through Gantry, again (s) | first | again |\n\
                        |---|---|---|---|---|---|---|";

/// Prints a row for each program: medians of this many runs. On each side, first with nothing
/// compiled yet, and then again.
pub fn rows(pool: &Pool, cases: &[Case], runs: usize) -> Result<()> {
    for case in cases {
        let mut times: [Vec<f64>; 4] = Default::default();
        for _ in 0..runs {
            let native = || pool.native_for(case.seconds, &case.program);
            let remoted = || pool.remoted_for(case.seconds, &case.program);
            let folder = pool.folder("timed")?;
            pool.forget_compiled()?;
            times[0].push(timed(case, native(), &folder)?);
            times[1].push(timed(case, native(), &folder)?);
            times[2].push(timed(case, remoted(), &folder)?);
            times[3].push(timed(case, remoted(), &folder)?);
            fs::remove_dir_all(folder)?;
        }
        let [first, again, remoted, remoted_again] = times.map(median);
        println!(
            "| {} | {first:.2} | {again:.3} | {remoted:.2} | {remoted_again:.3} | {:.2} | {:.2} |",
            case.name(),
            remoted / first,
            remoted_again / again
        );
    }
    Ok(())
}

/// Seconds from its start to its end.
fn timed(case: &Case, command: Command, folder: &Path) -> Result<f64> {
    let start = Instant::now();
    case.run(command, folder)?;
    Ok(start.elapsed().as_secs_f64())
}
