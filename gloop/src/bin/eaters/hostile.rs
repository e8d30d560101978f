//! Kernels that break the rules. Each is to be run in a process of its own, beside others that must
//! not be affected.

use anyhow::{Result, bail, ensure};
use gloop::{
    cuda::Args,
    job::{Error, Grid, Job},
};

use crate::{bed::Bed, run::Runner};

/// Runs one of them, and reports the outcome.
pub fn run(bed: &Bed, which: &str, runner: &mut Runner) -> Result<()> {
    let job = |name: &str, blocks: u32, args: Args| -> Result<Job> {
        let grid = Grid::logical(blocks).blocks(blocks).pages(2, 4096);
        Ok(bed
            .runtime
            .prepare(&bed.kernel("hostile", name)?, grid, args)?)
    };
    let failed = |runner: &mut Runner, mut job: Job| match runner.finish(&mut job) {
        Ok(()) => bail!("it is said to be done"),
        Err(error) => Ok(format!("{error:#}")),
    };
    let outcome = match which {
        "requests" => {
            let mut job = job("requests", 64, Args::new().with(20_000u32))?;
            runner.finish(&mut job)?;
            drop(job);
            // The service thread has survived, and serves another job.
            let mut after = self::after(bed)?;
            runner.finish(&mut after)?;
            "1,280,000 forged requests were refused or served".to_owned()
        }
        "words" => {
            for (code, launch) in [(77u32, 1u32), (1, 5), (0, 1), (4, 1)] {
                let mut job = job("words", 1, Args::new().with(code).with(launch))?;
                let error = runner.finish(&mut job).err();
                let known = error.as_ref().and_then(|error| error.downcast_ref());
                ensure!(
                    matches!(known, Some(Error::Exit { .. } | Error::Fault(_))),
                    "exit code {code} of launch {launch}: {error:?}"
                );
            }
            "forged exit codes are errors of their own job".to_owned()
        }
        "grants" => failed(runner, job("grants", 1, Args::new().with(u32::MAX))?)?,
        "wild" => failed(
            runner,
            job("wild", 1, Args::new().with(0x7f00_0000_0000u64))?,
        )?,
        "endless" => {
            let out = bed.runtime.gpu().allocate(4)?;
            failed(runner, job("endless", 528, Args::new().with(out.at()))?)?
        }
        other => bail!("there is no kernel {other}: requests, words, grants, wild or endless"),
    };
    println!("{which}: {outcome}");
    Ok(())
}

/// A job that makes a request to the host.
fn after(bed: &Bed) -> Result<Job> {
    let handle = bed.runtime.gpu().allocate(8)?;
    let args = Args::new().with(handle.at()).with(0u32);
    let grid = Grid::logical(1).threads(256);
    let job = bed
        .runtime
        .prepare(&bed.kernel("echo", "listen")?, grid, args)?;
    // It is in use as long as the process lives.
    std::mem::forget(handle);
    Ok(job)
}
