//! Applications of guests that go on elsewhere before their memory has followed.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    accelerator::{accel, counter, start_agent},
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    opencl::{self, Pool, until},
};

pub const SCENARIOS: &[Entry] = &[(
    "accelerator: an application goes on with another pool's worker before its memory has followed",
    between_pools,
)];

/// Begins to compute on two buffers of 1 MiB, all of which each round writes.
fn begin(guest: &mut Guest) -> Result<()> {
    guest.run(
        "rm -f /tmp/stop; (opencl-moving /tmp/stop device 1 >/tmp/moving 2>&1; echo ended $? >>/tmp/moving) & true",
    )?;
    goes_on(guest)
}

/// It computes something new.
fn goes_on(guest: &mut Guest) -> Result<()> {
    let before = guest.run("grep -c round /tmp/moving; true")?;
    let said = guest.eventually("grep -c round /tmp/moving; tail -n 1 /tmp/moving", |now| {
        now.lines().next() != Some(before.trim()) || now.contains("ended")
    })?;
    ensure!(!said.contains("ended"), "{said}");
    Ok(())
}

/// All that it has computed was right.
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
    Ok(())
}
