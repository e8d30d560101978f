//! Migrates a whole VM with an application from one host to another over a link of 1 Gb/s, as Crane does. Both hosts
//! are this machine, each with a network namespace and a pool of workers.

use anyhow::Result;
use gantry_host_tests::{
    moved_guest::{self, GANTRY, GUEST, Route},
    network::Network,
    ring,
};
use gantry_tests::{
    rig::packages,
    ring::{clock, desk::Rounds},
};

use super::{Movable, row};

/// Sizes of the application's state in MiB, as for other moves.
const STATES: [u32; 2] = [16, 256];
/// Programs that create the network, and their Debian packages.
pub const PACKAGES: &[(&str, &str)] = &[("ip", "iproute2"), ("tc", "iproute2")];

/// Rounds per million counts of the time-stamp counter.
fn rate(rounds: Rounds) -> f64 {
    rounds.count as f64 * 1e6 / rounds.counts.max(1) as f64
}

/// Migrates guests with more and with less state, which is copied during the stop, before it, or afterwards.
pub fn link(pools: &[Movable; 2]) -> Result<()> {
    let what = "whole migration, 2 GiB at 1 Gb/s";
    let needed = ["ip", "tc", "/dev/kvm"];
    if let Some(missing) = needed.into_iter().find(|name| !packages::is_there(name)) {
        row(what, "53 s", &format!("left out: there is no {missing}"));
        return Ok(());
    }
    let release = &pools[0].pool.release;
    let guest = match release.join(GUEST) {
        brought if brought.exists() => brought,
        _ => ring::guests()?.join(GUEST),
    };
    let network = Network::new()?;
    let gantry = release.join(GANTRY);
    let route = Route {
        pools: [&pools[0].pool, &pools[1].pool],
        network: Some(&network),
        filled: 2048,
        gantry: &gantry,
        guest: &guest,
    };
    let clock = clock();
    for size in STATES {
        for (way, how) in [
            ("", &[][..]),
            (", --accel-copies", &["--accel-copies"]),
            (", --accel-postcopy", &["--accel-postcopy"]),
        ] {
            let moved = moved_guest::go(&route, size, how)?;
            let plain = network.rate()?;
            let seconds = moved.number("elapsed_ms") / 1e3;
            row(
                &format!("{what}, {size} MiB of an application's state{way}"),
                "53 s; stop-and-copy 40 s",
                &format!(
                    "{seconds:.2} s, {:.2} times a plain copy of as many bytes ({:.0} MB at {:.1} MB/s); VM stops for {:.0} ms, \
                     application for {:.0} ms; {:.1} MB of its state before the stop, {:.1} MB in it; its rate until then \
                     {:.1} % of {:.0} rounds/s; its results are right",
                    seconds * plain / moved.bytes(),
                    moved.bytes() / 1e6,
                    plain / 1e6,
                    moved.number("downtime_ms"),
                    moved.all.longest as f64 / clock / 1e3,
                    moved.number("accel_bytes") / 1e6,
                    moved.number("accel_stop_bytes") / 1e6,
                    100.0 * rate(moved.amid) / rate(moved.alone),
                    rate(moved.alone) * clock,
                ),
            );
        }
    }
    Ok(())
}
