//! A guest that uses its host's device over a network, as if it belonged to another machine.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry, network::set_up};
use crate::{
    gantry::Gantry,
    net::{HOST, sh},
    opencl::{self, Pool, until},
};

pub const SCENARIOS: &[Entry] = &[(
    "stream: a guest computes by TLS, and when its network is cut both sides end",
    cut,
)];

const TAP: &str = "tap-tls";

fn cut(context: &Context) -> Result<()> {
    let net = json!({"tap": TAP, "ip": HOST, "mask": "255.255.255.0"});
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "net": [net],
    });
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    set_up(&mut guest, "eth0")?;
    guest.run("gantry-agent install --driver-only")?;
    let pool = Pool::start_for_others(&context.dir)?;
    let tls = opencl::by_tls();
    let (status, figures) = guest.status_of(&format!("{tls} opencl-figures --brief 2>&1"))?;
    let right = status == 0 && figures.contains("numbers is right");
    ensure!(right, "{figures}");
    until("the application's worker is gone", || {
        Ok(pool.workers()?.len() == 1)
    })?;
    // An application that has more to do than there is time for, and whose kernels have been
    // compiled by now.
    guest.run(&format!(
        "({tls} opencl-figures >/tmp/figures 2>&1; echo ended $? >>/tmp/figures) & true"
    ))?;
    guest.eventually("cat /tmp/figures", |text| text.contains("numbers is right"))?;
    until("one serves, one waits", || Ok(pool.workers()?.len() == 2))?;
    sh(&format!("ifconfig {TAP} down"))?;
    // Both notice after a minute, see docs/user/devices-of-other-hosts.md.
    let end = guest.eventually("cat /tmp/figures", |text| text.contains("ended"))?;
    ensure!(end.contains("failed with code"), "{end}");
    until("the worker that served is gone", || {
        Ok(pool.workers()?.len() == 1)
    })?;
    sh(&format!("ifconfig {TAP} up"))?;
    let list = guest.run(&format!("{tls} clinfo -l"))?;
    ensure!(list.contains("Device #0"), "{list}");
    Ok(())
}
