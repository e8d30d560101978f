//! Applications of guests that continue elsewhere before their memory has followed.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    accelerator::{accel, counter, goes_on, start_agent},
    migration::{self, phase_until},
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    opencl::{self, Pool, until},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "accelerator: an application goes on with another pool's worker before its memory has followed",
        between_pools,
    ),
    (
        "accelerator: an application goes on in another VMM before its memory has, and a killed source is its error",
        between_machines,
    ),
];

/// Starts a program that computes on two buffers of 1 MiB and writes all of both in each round.
fn begin(guest: &mut Guest) -> Result<()> {
    guest.run(
        "rm -f /tmp/stop; : >/tmp/moving; (opencl-moving /tmp/stop device 1 >/tmp/moving 2>&1; echo ended $? >>/tmp/moving) & true",
    )?;
    goes_on(guest)
}

/// Ends the program, and checks that everything it computed was right.
fn ends(guest: &mut Guest) -> Result<()> {
    guest.run("touch /tmp/stop")?;
    let end = guest.eventually("cat /tmp/moving", |text| text.contains("ended"))?;
    ensure!(
        end.contains("rounds were right") && end.contains("ended 0"),
        "{end}"
    );
    Ok(())
}

/// A guest whose program computes, with two pools.
fn computing(context: &Context) -> Result<(Gantry, Guest, [Pool; 2])> {
    let pools = [Pool::start(&context.dir)?, Pool::start_other(&context.dir)?];
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "accels": [accel(&pools[0])],
        "memory": {"shared": true},
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    start_agent(&mut guest)?;
    begin(&mut guest)?;
    Ok((gantry, guest, pools))
}

fn between_pools(context: &Context) -> Result<()> {
    let (gantry, mut guest, [pool, other]) = computing(context)?;
    for to in [&other, &pool, &other] {
        let serving = to.workers()?;
        let body = json!({"id": "a", "socket": to.socket, "postcopy": true});
        let moved = gantry.put("vm.move-accel", body)?;
        ensure!(moved["slices"] == json!([0]), "{moved}");
        goes_on(&mut guest)?;
        until("another worker of the pool serves it", || {
            Ok(to.workers()?.iter().any(|worker| !serving.contains(worker)))
        })?;
    }
    ends(&mut guest)?;
    ensure!(counter(&gantry, "workers_lost")? == 0);
    // Each time, those of its two buffers follow that were written since they were copied.
    let followed = counter(&gantry, "contents_followed")?;
    ensure!((1..=6).contains(&followed), "{followed} have followed");
    Ok(())
}

fn between_machines(context: &Context) -> Result<()> {
    let (gantry, guest, [pool, other]) = computing(context)?;
    drop(guest);
    let dir = context.dir.join("second");
    let there = migration::wait_with(&dir, &gantry.serial, &[(&pool.socket, &other.socket)])?;
    let how = json!({"accel": "Move", "accel_postcopy": true});
    let (mut gantry, mut guest) = migration::go(gantry, there, how)?;
    goes_on(&mut guest)?;
    // The program needs both buffers to continue.
    ensure!(counter(&gantry, "contents_followed")? == 2);
    drop(guest);
    // Slow enough that the source can be killed after memory was handed over and before everything has followed.
    let dir = context.dir.join("third");
    let there = migration::wait_with(&dir, &gantry.serial, &[(&other.socket, &pool.socket)])?;
    let body = json!({
        "destination_url": there.url, "local": true, "preserve_source": true,
        "accel": "Move", "accel_postcopy": true, "bandwidth": 128 << 10,
    });
    gantry.put("vm.send-migration", body)?;
    let info = phase_until(&gantry, &["Postcopy", "Completed", "Failed"])?;
    ensure!(info["phase"] == "Postcopy", "{info}\n{}", gantry.log());
    let runs = "the VM runs at the destination";
    gantry.refused("vm.cancel-migration", None, 405, runs)?;
    let left = other.workers()?;
    gantry.kill()?;
    let gantry = there.arrived()?;
    let mut guest = Guest::connect(&gantry.serial)?;
    let end = guest.eventually("cat /tmp/moving", |text| text.contains("ended"))?;
    ensure!(
        !end.contains("rounds were right") && !end.contains("is wrong"),
        "{end}"
    );
    // Workers that wait for applications stay.
    until("the worker that had it has ended", || {
        let now = other.workers()?;
        Ok(left.iter().any(|worker| !now.contains(worker)))
    })?;
    // The next application is served.
    begin(&mut guest)?;
    ends(&mut guest)
}
