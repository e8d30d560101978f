//! Snapshots.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    disks::{image, write_pattern},
    lifecycle::{next_count, start_counting},
};
use crate::{gantry::Gantry, guest::Guest};

pub const SCENARIOS: &[Entry] = &[
    (
        "snapshot: kill -9, restore, and the guest goes on counting",
        |c| restore(c, "Copy"),
    ),
    ("snapshot: restore on demand", |c| restore(c, "OnDemand")),
    ("snapshot: devices work after a restore", devices),
    (
        "snapshot: a directory that another process uses is refused",
        in_use,
    ),
    (
        "snapshot: a damaged or foreign snapshot is refused",
        damaged,
    ),
];

pub(super) fn url(context: &Context) -> String {
    format!("file://{}", context.dir.join("snapshot").display())
}

pub(super) fn take(gantry: &Gantry, context: &Context) -> Result<()> {
    let body = json!({"destination_url": url(context)});
    gantry.refused("vm.snapshot", Some(body.clone()), 405, "pause")?;
    gantry.act("vm.pause")?;
    gantry.put("vm.snapshot", body)?;
    Ok(())
}

/// Starts a new process that restores the guest.
pub(super) fn restored(context: &Context, more: Value) -> Result<(Gantry, Guest)> {
    let dir = context.dir.join("restored");
    fs::create_dir_all(&dir)?;
    let gantry = Gantry::start(&dir, &[])?;
    let mut body = json!({"source_url": url(context), "resume": true});
    crate::gantry::merge(&mut body, more);
    gantry.put("vm.restore", body)?;
    // The socket of the serial port is where the configuration says.
    let guest = Guest::connect(&context.dir.join("serial.sock"))?;
    Ok((gantry, guest))
}

fn restore(context: &Context, mode: &str) -> Result<()> {
    let more = json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}});
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    start_counting(&mut guest)?;
    let before = next_count(&mut guest)?;
    take(&gantry, context)?;
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({"memory_restore_mode": mode}))?;
    let after = next_count(&mut guest)?;
    ensure!(after >= before, "{before} before, {after} after");
    ensure!(after < before + 100, "{before} before, {after} after");
    ensure!(next_count(&mut guest)? > after);
    ensure!(gantry.state()? == "Running");
    // The counter prints in between.
    let output = guest.run("echo cpus=$(nproc)")?;
    ensure!(output.contains("cpus=2"), "{output}");
    Ok(())
}

fn in_use(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let directory = context.dir.join("snapshot");
    fs::create_dir(&directory)?;
    let lock = fs::File::open(&directory)?;
    lock.lock_shared()?;
    gantry.act("vm.pause")?;
    let body = json!({"destination_url": url(context)});
    gantry.refused("vm.snapshot", Some(body.clone()), 500, "another process")?;
    ensure!(fs::read_dir(&directory)?.next().is_none(), "files in there");
    lock.unlock()?;
    gantry.put("vm.snapshot", body)?;
    lock.lock()?;
    let other = context.dir.join("other");
    fs::create_dir(&other)?;
    let second = Gantry::start(&other, &[])?;
    let body = json!({"source_url": url(context)});
    second.refused("vm.restore", Some(body), 500, "another process")?;
    gantry.act("vm.resume")?;
    guest.run("true")?;
    Ok(())
}

fn devices(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 32 << 20)?;
    let more = json!({
        "disks": [{"path": path, "image_type": "Raw"}],
        "net": [{"tap": "tap-s", "ip": "192.168.77.1", "mask": "255.255.255.0"}],
        "balloon": {"size": 0},
        "vsock": {"cid": 3, "socket": context.dir.join("vsock")},
    });
    let (mut gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    super::network::set_up(&mut guest, "eth0")?;
    let sum = write_pattern(&mut guest, "/dev/vda", 8)?;
    take(&gantry, context)?;
    gantry.kill()?;
    let (gantry, mut guest) = restored(context, json!({}))?;
    guest.run("echo 3 > /proc/sys/vm/drop_caches")?;
    ensure!(guest.md5_of("dd if=/dev/vda bs=1M count=8 2>/dev/null")? == sum);
    write_pattern(&mut guest, "/dev/vda", 8)?;
    // The guest still has its neighbour's MAC address in its cache.
    super::network::reaches(&mut guest, "192.168.77.1")?;
    guest.run("dd if=/dev/hwrng bs=64 count=1 2>/dev/null | wc -c")?;
    // Hot-plug also still works.
    let hot = context.dir.join("hot.raw");
    image(&hot, 1 << 20)?;
    gantry.put("vm.add-disk", json!({"path": hot}))?;
    guest.eventually("ls /dev/vdb", |text| text == "/dev/vdb")?;
    Ok(())
}

fn damaged(context: &Context) -> Result<()> {
    let (gantry, _guest) = Gantry::boot(&context.dir, json!({}))?;
    take(&gantry, context)?;
    gantry.act("vm.delete")?;
    let snapshot = context.dir.join("snapshot");
    let request = json!({"source_url": url(context)});
    let state = fs::read(snapshot.join("state.json"))?;
    let mut broken = state.clone();
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    fs::write(snapshot.join("state.json"), &broken)?;
    gantry.refused("vm.restore", Some(request.clone()), 500, "damaged")?;
    let text = String::from_utf8_lossy(&state);
    let (before, after) = text
        .split_once("\"version\":")
        .context("the state has no version")?;
    let after = after.trim_start_matches(|digit: char| digit.is_ascii_digit());
    fs::write(
        snapshot.join("state.json"),
        format!("{before}\"version\":99{after}"),
    )?;
    gantry.refused("vm.restore", Some(request.clone()), 500, "version 99")?;
    fs::write(snapshot.join("state.json"), &state)?;
    let memory = fs::File::options()
        .write(true)
        .open(snapshot.join("memory-ranges"))?;
    memory.set_len(1 << 20)?;
    gantry.refused("vm.restore", Some(request), 500, "truncated")?;
    let nowhere = json!({"source_url": "file:///nowhere"});
    gantry.refused("vm.restore", Some(nowhere), 500, "nowhere")?;
    gantry.refused(
        "vm.restore",
        Some(json!({"source_url": "nowhere"})),
        400,
        "file://",
    )
}
