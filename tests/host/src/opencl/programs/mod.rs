//! Third-party programs natively and through the OpenCL driver: how they are run, and what they report.

pub mod case;
pub mod moved;
pub mod results;

use std::{fs, process::Command, thread};

use anyhow::Result;

use self::{case::Case, results::Results};
use super::pool::Pool;

/// Results of one program natively and through Gantry, at the same time.
pub fn both_ways(pool: &Pool, case: &Case, index: usize) -> Result<(Results, Results)> {
    let native = pool.native_for(case.seconds, &case.program);
    thread::scope(|scope| {
        let native = scope.spawn(|| run_in(pool, &format!("native-{index}"), case, native));
        let remoted = through_gantry(pool, case, index);
        let native = native.join();
        let native = native.map_err(|_| anyhow::anyhow!("{} was not run", case.name()))?;
        Ok((native?, remoted?))
    })
}

/// Results through Gantry only.
pub fn through_gantry(pool: &Pool, case: &Case, index: usize) -> Result<Results> {
    let remoted = pool.remoted_for(case.seconds, &case.program);
    run_in(pool, &format!("remoted-{index}"), case, remoted)
}

/// Runs a program by this command in a directory of its own, which is removed afterwards.
fn run_in(pool: &Pool, name: &str, case: &Case, command: Command) -> Result<Results> {
    let folder = pool.folder(name)?;
    let results = case.run(command, &folder)?;
    fs::remove_dir_all(folder)?;
    Ok(results)
}
