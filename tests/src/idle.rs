//! Measures what an idle guest costs its host, and what an application in it adds that has a context, a queue and
//! buffers on the host's device and does nothing with them, or waits, by polling or for an interrupt.
//!
//! The measure is the host CPU time of all threads of gantry (guest time is that of the vCPU threads), of the pool and
//! its workers, and of the arbiter.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use serde_json::json;

use crate::{
    bench::cpu_time,
    gantry::Gantry,
    guest::Guest,
    opencl::{AGENT, Arbiter, Pool, guest_files, load_uio, start_agent, until},
};

/// Duration of each measurement.
const WHILE: Duration = Duration::from_secs(20);
/// How long to wait first: both sides poll for a moment before they sleep, and the guest's kernel defers some of its
/// work.
const WARM_UP: Duration = Duration::from_secs(5);
/// Number of measurements without and with the application, alternating.
const ROUNDS: usize = 2;

/// CPU seconds per second used by gantry, by pool and workers, and by the arbiter.
type Spent = [f64; 3];

/// The states of the guest.
const STATES: [(&str, Option<&str>); 4] = [
    ("idle guest without an application", None),
    (
        "idle guest with a context, a queue and 16 buffers",
        Some(""),
    ),
    ("the same, and a call that waits, in naps", Some("wait")),
    (
        "the same, and a call that waits for an interrupt",
        Some("wait"),
    ),
];
/// From this state on, the agent gets the port's interrupts.
const INTERRUPTED: usize = 3;

/// The processes that serve the guest.
type Host<'a> = (&'a Pool, &'a Arbiter);

/// Measures a guest in all states, and passes on a row for each, and what the context adds.
pub fn measure(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench-idle");
    fs::create_dir_all(dir)?;
    let (arbiter, pool) = Arbiter::start_with_pool(dir, "fair")?;
    let host = (&pool, &arbiter);
    let accel = json!({"socket": pool.socket, "window": 64 << 20, "slices": 4, "id": "a"});
    let payload = json!({"initramfs": guest_files(dir)?});
    let (gantry, mut guest) = Gantry::boot(dir, json!({"payload": payload, "accels": [accel]}))?;
    guest.run("gantry-agent install --driver-only; mkfifo /tmp/in")?;
    start_agent(&mut guest, "gantry-agent")?;
    let mut all = [Spent::default(); STATES.len()];
    for _ in 0..ROUNDS {
        for (state, sum) in all[..INTERRUPTED].iter_mut().enumerate() {
            add(sum, in_state(&mut guest, &gantry, host, state)?);
        }
    }
    load_uio(&mut guest)?;
    guest.run(&format!("killall gantry-agent; rm {AGENT}"))?;
    start_agent(&mut guest, "gantry-agent")?;
    for _ in 0..ROUNDS {
        let spent = in_state(&mut guest, &gantry, host, INTERRUPTED)?;
        add(&mut all[INTERRUPTED], spent);
    }
    let percent = |part: f64| format!("{:.3}", part * 100.0 / ROUNDS as f64);
    let whole = |spent: Spent| spent.iter().sum::<f64>();
    for ((what, _), spent) in STATES.into_iter().zip(all) {
        row(
            &format!("{what}: gantry; pool and workers; arbiter; all (% of a core)"),
            [spent[0], spent[1], spent[2], whole(spent)]
                .map(percent)
                .join("; "),
        );
    }
    row(
        "what the context adds (% of a core)",
        percent(whole(all[1]) - whole(all[0])),
    );
    Ok(())
}

/// Measures the CPU time while the guest is in a state.
fn in_state(guest: &mut Guest, gantry: &Gantry, host: Host<'_>, state: usize) -> Result<Spent> {
    let Some(argument) = STATES[state].1 else {
        return spent(gantry, host);
    };
    let said = guest.run(&format!(
        "rm -f /tmp/out; opencl-idle {argument} </tmp/in >/tmp/out 2>&1 & sleep 1000000 >/tmp/in & \
         until [ -s /tmp/out ]; do sleep 1; done; cat /tmp/out",
    ))?;
    ensure!(said.starts_with("idle "), "the application said {said:?}");
    let spent = spent(gantry, host)?;
    guest.run("killall sleep")?;
    until("the application's worker is gone", || {
        Ok(host.0.workers()?.len() == 1)
    })?;
    Ok(spent)
}

fn add(sum: &mut Spent, spent: Spent) {
    for (sum, part) in sum.iter_mut().zip(spent) {
        *sum += part;
    }
}

/// Measures the CPU time while nothing happens.
fn spent(gantry: &Gantry, (pool, arbiter): Host<'_>) -> Result<Spent> {
    let mut workers = pool.workers()?;
    workers.push(pool.pid());
    let groups = [&[gantry.pid()][..], &workers, &[arbiter.pid()]];
    let nanos = || -> Result<Vec<u64>> {
        let of = |group: &&[u32]| group.iter().map(|process| cpu_time(*process)).sum();
        groups.iter().map(of).collect()
    };
    thread::sleep(WARM_UP);
    let (before, start) = (nanos()?, Instant::now());
    thread::sleep(WHILE);
    let (after, passed) = (nanos()?, start.elapsed().as_secs_f64());
    Ok([0, 1, 2].map(|group| (after[group] - before[group]) as f64 / 1e9 / passed))
}
