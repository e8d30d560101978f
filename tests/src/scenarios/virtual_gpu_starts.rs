//! `kill -9` of the mediator, of the GPU's server, and of Gantry, while a guest's nouveau initializes its virtual GPU.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    Context, Entry,
    gf100::{does, insert, load},
    virtual_gpu::{Mediated, reconnections, until_found_again},
};
use crate::{
    gantry::{Gantry, PATIENCE},
    guest::Guest,
    opencl::until,
    rig::images::L2_GPU,
};

/// The scenarios, which share an L1.
pub const SCENARIOS: &[Entry] = &[
    (
        "virtual GPU: a mediator or a GPU that is killed amid nouveau's start hangs no guest, and the GPU works afterwards",
        mediators,
    ),
    (
        "virtual GPU: a VMM that is killed amid nouveau's start leaves its part of the GPU free, and blank for the next VM",
        vmms,
    ),
];

/// Minimum number of register writes of a start: about 3,280 after a boot, fewer when nouveau is loaded again.
const WHOLE: u64 = 2500;
/// Maximum number of starts per kill. On a busy host, a start may be complete before its counter is read.
const TRIES: usize = 3;

type Kill = fn(&mut Mediated) -> Result<()>;

fn mediators(context: &Context) -> Result<()> {
    let mut gpu = Mediated::start(context)?;
    // A panic stays on the console.
    let (gantry, mut guest) = gpu.boot(context, "guest", "panic=0")?;
    load(&mut guest)?;
    let kills: [(u64, &str, Kill); 4] = [
        (300, "the mediator", Mediated::kill_mediator),
        (1000, "the GPU", Mediated::kill_gpu),
        (1800, "the mediator", Mediated::kill_mediator),
        (2300, "the GPU", Mediated::kill_gpu),
    ];
    for (step, whom, kill) in kills {
        let writes = amid(&gantry, &mut guest, step)?;
        let before = reconnections(&gantry)?;
        kill(&mut gpu)?;
        gpu.start_again(context)?;
        until_found_again(&gantry, before)?;
        let end = end_of_start(&mut guest)
            .with_context(|| format!("{whom} was killed after {writes} register writes"))?;
        println!("{whom} is killed after {writes} register writes: {end}");
        if end == End::Failed {
            again(&mut guest)?;
        }
        does(&mut guest, "gpu-check", "gpu works")?;
    }
    Ok(())
}

/// How a start has ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// nouveau has its device.
    Works,
    /// nouveau has given up, and says so.
    Failed,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Works => "nouveau starts",
            Self::Failed => "nouveau fails",
        })
    }
}

fn register_writes(gantry: &Gantry) -> Result<u64> {
    let counters = gantry.ok("GET", "vm.counters", None)?;
    let writes = counters["gpu"]["register_writes"].as_u64();
    writes.context("the GPU has no counter of register writes")
}

/// Loads nouveau anew, and returns amid its start: after `step` register writes, and before all of them. Returns how
/// many there were.
fn amid(gantry: &Gantry, guest: &mut Guest, step: u64) -> Result<u64> {
    for _ in 0..TRIES {
        guest.run("[ ! -e /sys/module/nouveau ] || rmmod nouveau")?;
        guest.run("dmesg -c >/dev/null")?;
        let before = register_writes(gantry)?;
        guest.run("(insmod /modules/nouveau.ko; echo over) >/tmp/start 2>&1 &")?;
        let deadline = Instant::now() + PATIENCE;
        let writes = loop {
            let writes = register_writes(gantry)? - before;
            if writes >= step {
                break writes;
            }
            ensure!(
                Instant::now() < deadline,
                "nouveau's start ends with {writes} register writes"
            );
            std::thread::sleep(Duration::from_millis(1));
        };
        if writes < WHOLE {
            return Ok(writes);
        }
        end_of_start(guest)?;
    }
    bail!("no start was met amid {step} register writes in {TRIES} tries")
}

/// Waits until a start has ended, and returns whether nouveau works.
fn end_of_start(guest: &mut Guest) -> Result<End> {
    guest.eventually("cat /tmp/start", |text| text.contains("over"))?;
    let (status, _) = guest.status_of("[ -e /dev/dri/renderD128 ]")?;
    if status == 0 {
        return Ok(End::Works);
    }
    let said = guest.run("dmesg | grep nouveau")?;
    ensure!(
        said.contains("failed with error"),
        "there is no device, and nouveau says: {said}"
    );
    Ok(End::Failed)
}

/// Loads nouveau anew, and waits for its device.
fn again(guest: &mut Guest) -> Result<()> {
    guest.run("rmmod nouveau && insmod /modules/nouveau.ko")?;
    guest.eventually("ls /dev/dri", |text| text.contains("renderD128"))?;
    Ok(())
}

/// Kills VMMs amid nouveau's start. Each next VM must get their part of VRAM without their contents.
fn vmms(context: &Context) -> Result<()> {
    let (_nouveau, dependencies) = L2_GPU.split_last().context("there is no module")?;
    let gpu = Mediated::start(context)?;
    for step in [1000, 2300] {
        let (mut gantry, mut guest) = gpu.boot(context, &format!("killed-{step}"), "")?;
        does(&mut guest, "gpu-blank", "are blank")?;
        insert(&mut guest, dependencies)?;
        let writes = amid(&gantry, &mut guest, step)?;
        gantry.kill()?;
        println!("a VMM is killed after {writes} register writes");
        until("the mediator has no client", || {
            Ok(gpu.status()?.clients.is_empty())
        })?;
    }
    let (_gantry, mut guest) = gpu.boot(context, "next", "")?;
    does(&mut guest, "gpu-blank", "are blank")?;
    load(&mut guest)?;
    does(&mut guest, "gpu-check", "gpu works")?;
    // The check can fail: a driver leaves something in VRAM.
    guest.run("rmmod nouveau")?;
    does(&mut guest, "gpu-blank", "VRAM has")
}
