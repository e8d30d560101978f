//! Physical devices in a guest (VFIO), behind L1's IOMMU.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry, hotplug::gone};
use crate::{
    gantry::Gantry,
    guest::Guest,
    host_device::{EDU, HostDevice, NVME},
    net::sh,
    opencl::until,
};

pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: registers, DMA and interrupts of a device at start",
        at_start,
    ),
    (
        "passthrough: NVMe with the stock driver, unplugged and plugged again",
        nvme,
    ),
    (
        "passthrough: a device cannot reach beyond the guest's memory",
        isolation,
    ),
    (
        "passthrough: kill -9, and the device starts again in another VM",
        killed,
    ),
    (
        "passthrough: a pause is a pause, a snapshot is refused",
        paused,
    ),
    (
        "passthrough: a device that cannot be given says why",
        refused,
    ),
    (
        "passthrough: plugged and unplugged again and again leaves nothing behind",
        cycles,
    ),
    (
        "passthrough: swapped for another device, and back if that one is missing",
        swap,
    ),
    (
        "passthrough: a removal has a time limit, and can be forced",
        limits,
    ),
];

/// Path of a device's own file.
pub fn node(device: &HostDevice) -> Result<String> {
    let mut names = std::fs::read_dir(device.path.join("vfio-dev"))?;
    let name = names.next().context("the kernel has no file for it")??;
    Ok(format!("/dev/vfio/devices/{}", name.file_name().display()))
}

/// Registers, DMA and an interrupt.
pub fn edu_works(guest: &mut Guest) -> Result<()> {
    let said = guest.run("agent edu-check")?;
    ensure!(said.contains("edu works"), "{said}");
    Ok(())
}

fn at_start(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({
        "memory": {"size": 256 << 20},
        "devices": [{"path": edu.path, "id": "edu", "pci_device_id": 9}],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let bdf = &gantry.info()?["device_tree"]["edu"]["pci_bdf"];
    ensure!(bdf == "0000:00:09.0", "the device is at {bdf}");
    edu_works(&mut guest)?;
    gantry.act("vm.reboot")?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    edu_works(&mut guest)
}

/// Interrupts of the controller's queues so far.
fn interrupts(guest: &mut Guest) -> Result<u64> {
    let text = guest.run("grep nvme0q /proc/interrupts")?;
    let counts = |line: &str| -> u64 {
        let words = line.split_whitespace().skip(1);
        words.map_while(|word| word.parse::<u64>().ok()).sum()
    };
    Ok(text.lines().map(counts).sum())
}

fn nvme(context: &Context) -> Result<()> {
    let nvme = HostDevice::take(NVME, 0)?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, json!({"memory": {"size": 512 << 20}}))?;
    for round in 1..3 {
        let config = json!({"path": nvme.path, "id": "nvme", "pci_device_id": 12});
        let answer = gantry.put("vm.add-device", config)?;
        ensure!(answer["bdf"] == "0000:00:0c.0", "{answer}");
        guest.eventually("ls /dev/nvme0n1", |text| text == "/dev/nvme0n1")?;
        guest.run(&format!(
            "yes {round} | dd of=/tmp/pattern bs=1M count=24 iflag=fullblock 2>/dev/null"
        ))?;
        let before = interrupts(&mut guest)?;
        guest.run("dd if=/tmp/pattern of=/dev/nvme0n1 bs=1M conv=fsync 2>/dev/null")?;
        guest.run("echo 3 > /proc/sys/vm/drop_caches")?;
        guest.run("dd if=/dev/nvme0n1 bs=1M count=24 2>/dev/null | cmp - /tmp/pattern")?;
        let raised = interrupts(&mut guest)? - before;
        ensure!(raised > 16, "{raised} interrupts for 48 MiB");
        gantry.put("vm.remove-device", json!({"id": "nvme"}))?;
        gone(&gantry, "nvme")?;
        guest.run("test ! -e /dev/nvme0n1 -a ! -e /sys/bus/pci/devices/0000:00:0c.0")?;
    }
    // Back in its reset state: the host's own driver is bound to it and finds the last pattern, as
    // soon as it can read.
    sh(&format!(
        "echo > {0}/driver_override; echo {1} > {0}/driver/unbind; echo {1} > \
         /sys/bus/pci/drivers_probe; for i in $(seq 30); do dd if=/dev/nvme0n1 bs=1M count=1 \
         2>/dev/null | grep -q 2 && exit 0; sleep 1; done; exit 1",
        nvme.path.display(),
        nvme.address
    ))
    .map(|_| ())
}

/// A scenario for any board.
pub fn isolation(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path}]});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    // Beyond 256 MiB there is memory of L1, but not of the guest.
    let is_reported = || -> Result<bool> {
        let log = sh("dmesg | grep -i 'dmar.*fault addr 0x30000000' || true")?;
        Ok(!log.is_empty())
    };
    until("L1's kernel reports a fault", || {
        guest.run("agent edu-write-outside 0x30000000")?;
        if is_reported()? {
            return Ok(true);
        }
        // The kernel reports about three faults in five seconds, and QEMU's IOMMU loses a fault
        // that arrives before the previous one was read.
        thread::sleep(Duration::from_secs(6));
        is_reported()
    })?;
    edu_works(&mut guest)
}

/// A scenario for any board.
pub fn killed(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path}]});
    for _ in 0..2 {
        let (mut gantry, mut guest) = Gantry::boot(&context.dir, more.clone())?;
        edu_works(&mut guest)?;
        gantry.kill()?;
    }
    Ok(())
}

fn paused(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    gantry.act("vm.pause")?;
    let command = sh(&format!(
        "dd if={}/config bs=1 skip=4 count=1 2>/dev/null | od -A n -t u1",
        edu.path.display()
    ))?;
    let command: u8 = command.trim().parse().context("no command register")?;
    ensure!(command & 4 == 0, "the paused device may still use DMA");
    let url = format!("file://{}", context.dir.join("s").display());
    let body = json!({"destination_url": url});
    gantry.refused("vm.snapshot", Some(body), 500, "edu")?;
    gantry.act("vm.resume")?;
    edu_works(&mut guest)
}

/// A scenario for any board.
pub fn refused(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let other = HostDevice::find(EDU, 1)?;
    let more = json!({"devices": [{"path": edu.path}]});
    let (gantry, _guest) = Gantry::boot(&context.dir, more)?;
    let add = |path: &std::path::Path, words| {
        let config = json!({"path": path, "id": "x"});
        gantry.refused("vm.add-device", Some(config), 500, words)
    };
    add(
        "/sys/bus/pci/devices/0000:00:1f.7".as_ref(),
        "no PCI device and no mediated device",
    )?;
    add(
        "/sys/bus/pci/devices/0000:00:00.0".as_ref(),
        "instead of vfio-pci",
    )?;
    add(&edu.path, "the VM has this device already")?;
    // None of this prevents a device that is available from being added.
    other.bind()?;
    gantry.put("vm.add-device", json!({"path": other.path, "id": "x"}))?;
    let second = context.dir.join("second");
    std::fs::create_dir(&second)?;
    let second = Gantry::start(&second, &[])?;
    let config = json!({
        "payload": {"kernel": crate::gantry::BZIMAGE},
        "devices": [{"path": edu.path}],
    });
    second.put("vm.create", config)?;
    second.refused("vm.boot", None, 500, "another VM has a device of it")
}

/// Descriptors, mappings and threads of a process. Connections of the API and the kernel's threads
/// for asynchronous I/O come and go by themselves.
pub fn holdings(gantry: &Gantry) -> Result<[usize; 3]> {
    let process = std::path::PathBuf::from(format!("/proc/{}", gantry.pid()));
    let mut descriptors = 0;
    for entry in std::fs::read_dir(process.join("fd"))? {
        let target = std::fs::read_link(entry?.path()).unwrap_or_default();
        descriptors += usize::from(!target.to_string_lossy().starts_with("socket:"));
    }
    let mut threads = 0;
    for entry in std::fs::read_dir(process.join("task"))? {
        let name = std::fs::read_to_string(entry?.path().join("comm")).unwrap_or_default();
        threads += usize::from(!name.starts_with("iou-"));
    }
    let mappings = std::fs::read_to_string(process.join("maps"))?
        .lines()
        .count();
    Ok([descriptors, mappings, threads])
}

/// Whether a process has leaked resources after this many rounds. A leak grows in each of them,
/// while a single request may just be in progress.
pub fn has_leaked(before: [usize; 3], after: [usize; 3], rounds: usize) -> bool {
    let grown = before.iter().zip(&after).map(|(b, a)| a.saturating_sub(*b));
    grown.max() >= Some(rounds / 2)
}

/// Number of plug and unplug rounds.
const CYCLES: usize = 12;

/// A scenario for any board.
pub fn cycles(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let path = context.dir.join("disk.raw");
    super::disks::image(&path, 64 << 20)?;
    let more = json!({"disks": [{"path": path, "image_type": "Raw"}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    // With load on another device all the time.
    guest.run("(while true; do dd if=/dev/zero of=/dev/vda bs=1M 2>/dev/null; done) & true")?;
    let mut before = None;
    for round in 0..CYCLES {
        gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
        guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "4")?;
        if round % 4 == 0 {
            edu_works(&mut guest)?;
        }
        gantry.put("vm.remove-device", json!({"id": "edu"}))?;
        gone(&gantry, "edu")?;
        // The first device creates the container, which then stays.
        before.get_or_insert(holdings(&gantry)?);
    }
    let after = holdings(&gantry)?;
    ensure!(
        before.is_some_and(|before| !has_leaked(before, after, CYCLES)),
        "descriptors, mappings and threads: {before:?} before, {after:?} after {CYCLES} rounds"
    );
    Ok(())
}

fn path_of(gantry: &Gantry, id: &str) -> Result<Option<String>> {
    let info = gantry.info()?;
    let devices = info["config"]["devices"].as_array().cloned();
    let found = devices
        .into_iter()
        .flatten()
        .find(|device| device["id"] == id);
    Ok(found.and_then(|device| device["path"].as_str().map(str::to_owned)))
}

/// A scenario for any board.
pub fn swap(context: &Context) -> Result<()> {
    let (first, second) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    let more = json!({"devices": [{"path": first.path, "id": "edu", "pci_device_id": 7}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    let expect_device = |expected: Option<&HostDevice>| {
        gantry.info_until("the swap is over", |info| {
            let node = &info["device_tree"]["edu"];
            node["state"].is_null() && node.is_null() == expected.is_none()
        })?;
        let path = path_of(&gantry, "edu")?;
        let expected = expected.map(|device| device.path.display().to_string());
        ensure!(path == expected, "the guest has {path:?}, not {expected:?}");
        Ok(())
    };
    gantry.put("vm.swap-device", json!({"id": "edu", "path": second.path}))?;
    expect_device(Some(&second))?;
    guest.eventually("ls -d /sys/bus/pci/devices/0000:00:07.0", |text| {
        text.ends_with("07.0")
    })?;
    edu_works(&mut guest)?;
    // The other device exists, but is not bound to vfio-pci: the old one comes back.
    first.release()?;
    gantry.put("vm.swap-device", json!({"id": "edu", "path": first.path}))?;
    expect_device(Some(&second))?;
    guest.eventually("ls -d /sys/bus/pci/devices/0000:00:07.0", |text| {
        text.ends_with("07.0")
    })?;
    edu_works(&mut guest)?;
    let without = json!({"id": "edu", "path": first.path, "on_failure": "Without"});
    gantry.put("vm.swap-device", without)?;
    expect_device(None)?;
    let nowhere = json!({"id": "edu", "path": "/sys/bus/pci/devices/0000:ff:00.0"});
    gantry.refused("vm.swap-device", Some(nowhere), 404, "edu")
}

fn limits(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    // A paused guest does not reply.
    gantry.act("vm.pause")?;
    gantry.put("vm.remove-device", json!({"id": "edu", "timeout": 3}))?;
    let state = &gantry.info()?["device_tree"]["edu"]["state"];
    ensure!(state == "removing", "the device is {state}");
    gantry.info_until("the time limit is over", |info| {
        info["device_tree"]["edu"]["state"].is_null()
    })?;
    ensure!(path_of(&gantry, "edu")?.is_some(), "the device has gone");
    // A swap that times out leaves the guest its device, even if the guest gives it up in the end.
    let other = HostDevice::take(EDU, 1)?;
    let swap = json!({"id": "edu", "path": other.path, "timeout": 4});
    gantry.put("vm.swap-device", swap)?;
    let again = Some(json!({"id": "edu"}));
    gantry.refused("vm.remove-device", again, 400, "is being swapped")?;
    gantry.info_until("the time limit is over", |info| {
        info["device_tree"]["edu"]["state"].is_null()
    })?;
    gantry.act("vm.resume")?;
    guest.eventually("dmesg | grep -c '1234:11e8'", |seen| {
        seen.parse::<u32>().is_ok_and(|seen| seen >= 2)
    })?;
    ensure!(path_of(&gantry, "edu")? == Some(edu.path.display().to_string()));
    edu_works(&mut guest)?;
    gantry.act("vm.pause")?;
    gantry.put("vm.remove-device", json!({"id": "edu", "force": true}))?;
    ensure!(
        path_of(&gantry, "edu")?.is_none(),
        "the device is still there"
    );
    gantry.act("vm.resume")?;
    guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "2")?;
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "3")?;
    edu_works(&mut guest)?;
    // A device that is added before the guest has noticed that the previous one is gone.
    let found = |seen: &str| seen.parse::<u32>().unwrap_or(0);
    let before = found(&guest.run("dmesg | grep -c '1234:11e8'")?);
    gantry.act("vm.pause")?;
    gantry.put("vm.remove-device", json!({"id": "edu", "force": true}))?;
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    gantry.act("vm.resume")?;
    guest.eventually("dmesg | grep -c '1234:11e8'", |seen| found(seen) > before)?;
    guest.eventually("agent edu-check", |said| said.contains("edu works"))?;
    // A device that is added and then removed before that.
    gantry.act("vm.pause")?;
    gantry.put("vm.remove-device", json!({"id": "edu", "force": true}))?;
    gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
    gantry.put("vm.remove-device", json!({"id": "edu"}))?;
    gantry.act("vm.resume")?;
    gone(&gantry, "edu")
}
