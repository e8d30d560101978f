//! Devices and vCPUs that are plugged and unplugged while the guest runs.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    disks::{image, write_pattern},
    network,
};
use crate::gantry::Gantry;

pub const SCENARIOS: &[Entry] = &[
    ("hot-plug: a disk comes, works and goes, five times", disk),
    ("hot-plug: a network card comes, works and goes", net),
    (
        "hot-plug: a socket device and persistent memory come and go",
        vsock_and_pmem,
    ),
    ("hot-plug: vCPUs up and down", cpus),
    (
        "hot-plug: what was asked to leave before a reboot is gone after it",
        removal_before_reboot,
    ),
    (
        "hot-plug: a guest ejects all its devices and keeps what it needs",
        ejected_unasked,
    ),
    (
        "hot-plug: what cannot be plugged or unplugged is refused",
        refused,
    ),
];

/// A device whose removal was pending when the machine ended is not in the next one.
fn removal_before_reboot(context: &Context) -> Result<()> {
    let path = context.dir.join("d.raw");
    image(&path, 1 << 20)?;
    let more = json!({"disks": [{"path": path, "id": "leaves"}]});
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    // A paused guest does not give anything up.
    gantry.act("vm.pause")?;
    gantry.put("vm.remove-device", json!({"id": "leaves"}))?;
    let info = gantry.info()?;
    ensure!(
        info["device_tree"]["leaves"]["state"] == "removing",
        "{info}"
    );
    gantry.act("vm.reboot")?;
    let info = gantry.info()?;
    ensure!(info["device_tree"].get("leaves").is_none(), "{info}");
    ensure!(
        info["config"].get("disks").is_none_or(Value::is_null),
        "{info}"
    );
    // The name is free, and the new device's removal is not pending.
    gantry.put("vm.add-disk", json!({"path": path, "id": "leaves"}))?;
    let info = gantry.info()?;
    ensure!(
        info["device_tree"]["leaves"]
            .get("state")
            .is_none_or(Value::is_null),
        "{info}"
    );
    Ok(())
}

/// A guest may eject devices unasked, but not those that a snapshot of it needs.
fn ejected_unasked(context: &Context) -> Result<()> {
    let path = context.dir.join("d.raw");
    image(&path, 1 << 20)?;
    let more = json!({
        "disks": [{"path": path, "id": "d"}],
        "rng": {"src": "/dev/urandom", "id": "r"},
        "balloon": {"size": 0, "id": "b"},
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    guest.run("for slot in /sys/bus/pci/slots/*; do echo 0 > $slot/power; done; true")?;
    gone(&gantry, "d")?;
    let info = gantry.info()?;
    for id in ["r", "b"] {
        ensure!(
            info["device_tree"].get(id).is_some(),
            "{id} is gone: {info}"
        );
    }
    let url = format!("file://{}", context.dir.join("snapshot").display());
    gantry.act("vm.pause")?;
    gantry.put("vm.snapshot", json!({"destination_url": url}))?;
    gantry.act("vm.delete")?;
    gantry.put("vm.restore", json!({"source_url": url, "resume": true}))?;
    Ok(())
}

pub fn gone(gantry: &Gantry, id: &str) -> Result<()> {
    gantry.info_until("the device is gone", |info| {
        info["device_tree"].get(id).is_none()
    })?;
    Ok(())
}

fn disk(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let path = context.dir.join("hot.raw");
    image(&path, 16 << 20)?;
    for _ in 0..5 {
        let answer = gantry.put("vm.add-disk", json!({"path": path, "id": "hot"}))?;
        let bdf = answer["bdf"]
            .as_str()
            .context("no place in the answer")?
            .to_owned();
        ensure!(
            answer["id"] == "hot" && bdf.starts_with("0000:00:"),
            "{answer}"
        );
        guest.eventually("ls /dev/vda", |text| text == "/dev/vda")?;
        guest.run(&format!("test -d /sys/bus/pci/devices/{bdf}"))?;
        write_pattern(&mut guest, "/dev/vda", 4)?;
        gantry.put("vm.remove-device", json!({"id": "hot"}))?;
        gone(&gantry, "hot")?;
        guest.run(&format!(
            "test ! -e /dev/vda -a ! -e /sys/bus/pci/devices/{bdf}"
        ))?;
        ensure!(
            gantry.info()?["config"]
                .get("disks")
                .is_none_or(Value::is_null)
        );
    }
    Ok(())
}

fn net(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let card = json!({"tap": "tap-h", "ip": "192.168.77.1", "mask": "255.255.255.0", "id": "n"});
    gantry.put("vm.add-net", card)?;
    guest.eventually("ls /sys/class/net", |text| text.contains("eth0"))?;
    network::set_up(&mut guest, "eth0")?;
    gantry.put("vm.remove-device", json!({"id": "n"}))?;
    gone(&gantry, "n")?;
    ensure!(!crate::net::exists("tap-h"));
    guest.run("test ! -e /sys/class/net/eth0")?;
    Ok(())
}

fn vsock_and_pmem(context: &Context) -> Result<()> {
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({}))?;
    let socket = context.dir.join("vsock");
    gantry.put(
        "vm.add-vsock",
        json!({"cid": 3, "socket": socket, "id": "v"}),
    )?;
    let path = context.dir.join("pmem");
    image(&path, 4 << 20)?;
    gantry.put("vm.add-pmem", json!({"file": path, "id": "p"}))?;
    let devices = "cat /sys/bus/virtio/devices/*/device";
    guest.eventually(devices, |text| {
        text.contains("0x0013") && text.contains("0x001b")
    })?;
    for id in ["v", "p"] {
        gantry.put("vm.remove-device", json!({"id": id}))?;
        gone(&gantry, id)?;
    }
    ensure!(!socket.exists(), "the device's socket is left behind");
    Ok(())
}

fn cpus(context: &Context) -> Result<()> {
    let more = json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 4}});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    for wanted in [4, 2, 3] {
        gantry.put("vm.resize", json!({"desired_vcpus": wanted}))?;
        let present = "ls -d /sys/devices/system/cpu/cpu[0-9]* | wc -l";
        guest.eventually(present, |text| text == wanted.to_string())?;
        guest
            .run("for c in /sys/devices/system/cpu/cpu[1-9]/online; do echo 1 > $c; done; true")?;
        guest.eventually("nproc", |text| text == wanted.to_string())?;
    }
    gantry.refused(
        "vm.resize",
        Some(json!({"desired_vcpus": 5})),
        400,
        "1 to 4",
    )
}

fn refused(context: &Context) -> Result<()> {
    let (gantry, _guest) = Gantry::boot(&context.dir, json!({}))?;
    let path = context.dir.join("d.raw");
    image(&path, 1 << 20)?;
    gantry.put("vm.add-disk", json!({"path": path, "id": "d"}))?;
    gantry.refused(
        "vm.add-disk",
        Some(json!({"path": path, "id": "d"})),
        409,
        "\\\"d\\\"",
    )?;
    gantry.refused("vm.remove-device", Some(json!({"id": "x"})), 404, "x")?;
    gantry.refused(
        "vm.add-disk",
        Some(json!({"path": "/no/such/file"})),
        400,
        "cannot use /no/such/file",
    )?;
    let segment = json!({"path": path, "pci_segment": 7});
    ensure!(gantry.request("PUT", "vm.add-disk", Some(&segment))?.status >= 400);
    let directory = json!({"path": context.dir});
    gantry.refused("vm.add-disk", Some(directory), 500, "not a disk image")
}
