//! The process: confinement, idleness, and what it leaves behind.

use std::{fs, time::Duration};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Context, Entry, disks::image};
use crate::{gantry::Gantry, net::sh};

pub const SCENARIOS: &[Entry] = &[
    (
        "process: kill -9 leaves nothing that stops the next start",
        killed,
    ),
    ("process: every thread is confined by seccomp", seccomp),
    ("process: Landlock keeps it from other files", landlock),
    ("process: an idle guest costs next to nothing", idle),
    (
        "process: threads carry the names that tools look for",
        names,
    ),
    ("process: SIGTERM ends it in an orderly way", sigterm),
];

fn killed(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-k", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
        "vsock": {"cid": 3, "socket": context.dir.join("vsock")},
        "console": {"mode": "Socket", "socket": context.dir.join("console.sock")},
    });
    for _ in 0..2 {
        let (mut gantry, _guest) = Gantry::boot(&context.dir, more.clone())?;
        gantry.kill()?;
    }
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null")?;
    Ok(())
}

fn threads(gantry: &Gantry) -> Result<Vec<(String, String)>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{}/task", gantry.pid()))? {
        let path = entry?.path();
        let name = fs::read_to_string(path.join("comm"))?.trim().to_owned();
        threads.push((name, fs::read_to_string(path.join("status"))?));
    }
    Ok(threads)
}

fn seccomp(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({"disks": [{"path": path, "image_type": "Raw"}]});
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    for (name, status) in threads(&gantry)? {
        // Mode 2: a filter.
        ensure!(
            status.contains("Seccomp:\t2"),
            "thread {name} is not confined"
        );
    }
    Ok(())
}

fn landlock(context: &Context) -> Result<()> {
    let lsms = fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    ensure!(lsms.contains("landlock"), "L1 has no Landlock: {lsms:?}");
    let allowed = context.dir.join("allowed.raw");
    let other = context.dir.join("other.raw");
    image(&allowed, 1 << 20)?;
    image(&other, 1 << 20)?;
    // The console's socket would open the scenario's folder.
    let serial = context.dir.join("serial");
    fs::create_dir(&serial)?;
    let more = json!({
        "landlock_enable": true,
        "disks": [{"path": allowed, "image_type": "Raw"}],
        "serial": {"mode": "Socket", "socket": serial.join("serial.sock")},
    });
    let mut gantry = Gantry::start(&context.dir, &[])?;
    gantry.serial = serial.join("serial.sock");
    let mut guest = gantry.create_and_boot(more)?;
    guest.run("dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null")?;
    gantry.refused(
        "vm.add-disk",
        Some(json!({"path": other})),
        500,
        "other.raw",
    )
}

fn idle(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-i", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
        "balloon": {"size": 0},
        "vsock": {"cid": 3, "socket": context.dir.join("vsock")},
    });
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    std::thread::sleep(Duration::from_secs(2));
    let before = gantry.cpu_time()?;
    std::thread::sleep(Duration::from_secs(4));
    let used = gantry.cpu_time()? - before;
    // A busy thread would have used four seconds; the guest's own ticks take some in the rig.
    ensure!(used < Duration::from_secs(1), "{used:?} of CPU time in 4 s");
    Ok(())
}

fn names(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 << 20)?;
    let more = json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-n", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
    });
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    let names: Vec<_> = threads(&gantry)?
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    for prefix in ["vcpu0", "vcpu1", "_disk", "_net", "_rng"] {
        ensure!(
            names.iter().any(|name| name.starts_with(prefix)),
            "no {prefix} in {names:?}"
        );
    }
    Ok(())
}

fn sigterm(context: &Context) -> Result<()> {
    let (mut gantry, _guest) = Gantry::boot(&context.dir, json!({}))?;
    sh(&format!("kill -TERM {}", gantry.pid()))?;
    let status = gantry.wait_exit(Duration::from_secs(5))?;
    ensure!(status.success(), "gantry ended with {status}");
    ensure!(
        !gantry.socket.exists() && !gantry.serial.exists(),
        "sockets are left behind"
    );
    Ok(())
}
