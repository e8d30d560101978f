//! Guests that compute by CUDA, before a driver that needs no GPU.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    accelerator::{accel, counter},
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    net::sh,
    opencl::{self, Pool, until},
};

pub const SCENARIOS: &[Entry] = &[(
    "cuda: programs of two guests compute on the host's driver, one pool serves them OpenCL too, and a killed worker fails its own alone",
    compute,
)];

/// Device memory of each machine in MiB.
const MEMORY: u64 = 64;
const RIGHT: &str = "sums, counts and products are right";

fn boot(context: &Context, pool: &Pool, name: &str) -> Result<(Gantry, Guest)> {
    let dir = context.dir.join(name);
    fs::create_dir_all(&dir)?;
    let mut accel = accel(pool);
    accel["api"] = json!("Cuda");
    accel["memory"] = json!(MEMORY << 20);
    let mut for_opencl = super::accelerator::accel(pool);
    for_opencl["id"] = json!("cl");
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&dir)?},
        "accels": [accel, for_opencl],
    });
    let (gantry, mut guest) = Gantry::boot(&dir, more)?;
    opencl::start_agent(&mut guest, "gantry-agent")?;
    Ok((gantry, guest))
}

/// Starts a program that computes until an error, and waits until it has computed once.
fn start(guest: &mut Guest) -> Result<()> {
    guest.run("cuda-programs endless >/tmp/endless 2>&1 & true")?;
    guest.eventually("cat /tmp/endless /tmp/agent.log", |text| {
        text.contains("the first is right")
    })?;
    Ok(())
}

fn compute(context: &Context) -> Result<()> {
    let pool = Pool::start_for_both(&context.dir)?;
    let (mut first, mut its_guest) = boot(context, &pool, "first")?;
    let said = its_guest.run("cuda-programs 2>&1 || cat /tmp/agent.log")?;
    let printed = "a kernel says: block 0 thread 3 of 32:  1.50 d 123456789abf %";
    for expected in [RIGHT, printed, &format!("{MEMORY} MiB of device memory")] {
        ensure!(said.contains(expected), "no {expected:?} in: {said}");
    }
    let said = its_guest.run("cuda-programs memory 2>&1")?;
    ensure!(
        said.contains(&format!("{MEMORY} MiB were allocated"))
            && said.contains("CUDA_ERROR_OUT_OF_MEMORY"),
        "{said}"
    );
    let (second, mut other) = boot(context, &pool, "second")?;
    // By the same pool.
    other.run("gantry-agent install")?;
    let list = other.run("clinfo -l; cat /tmp/agent.log")?;
    ensure!(list.contains("Device #0"), "{list}");
    let waiting = |served: &[u32]| -> Result<u32> {
        let one = || Ok(pool.workers()?.len() == served.len() + 1);
        until("one worker waits", one)?;
        let all = pool.workers()?;
        let found = all.into_iter().find(|worker| !served.contains(worker));
        found.context("no worker waits")
    };
    let of_first = waiting(&[])?;
    start(&mut its_guest)?;
    let of_second = waiting(&[of_first])?;
    start(&mut other)?;
    sh(&format!("kill -9 {of_second}"))?;
    let end = other.eventually("cat /tmp/endless", |text| text.contains("ended: "))?;
    ensure!(end.contains("CUDA_ERROR"), "{end}");
    // The program is told first.
    until("the lost worker is counted", || {
        Ok(counter(&second, "workers_lost")? == 1)
    })?;
    // Its next program is served, and the other machine's has noticed nothing.
    let said = other.run("cuda-programs 2>&1 || cat /tmp/agent.log")?;
    ensure!(said.contains(RIGHT), "{said}");
    let going = its_guest.run("pidof cuda-programs && cat /tmp/endless")?;
    ensure!(!going.contains("ended"), "{going}");
    ensure!(counter(&first, "workers_lost")? == 0);
    ensure!(pool.workers()?.contains(&of_first));
    // What serves a machine's program goes with the machine.
    first.kill()?;
    until("the worker is gone", || {
        Ok(!pool.workers()?.contains(&of_first))
    })
}
